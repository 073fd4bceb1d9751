"""A cache folder whose byte budget holds at every moment, over all processes that use it.

Bytes are reserved before they are written, and a file is deleted before its bytes count as free. Every change is made
under one lock of the folder and is one rename or one removal, so a process may be killed between any two steps.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from packtrain.core.errors import ConfigError
from packtrain.records.shards.entries import (
    LOCK,
    MARKER,
    CacheEntry,
    EntryKey,
    is_ours,
    list_folder,
    new_part,
    new_token,
    remove_if_unused,
    try_lock,
    wanted_by_living,
    with_reservation,
)
from packtrain.records.shards.forks import Descriptors
from packtrain.records.shards.forward import write_all

PIECES = (1 << 18, 8 << 20)  # bytes reserved at once where the size of a file is not known: at least, at most
SHARE = 64  # a piece is at most this part of the budget, so that fetches beside each other do not starve
LOCK_PATIENCE = 30.0  # seconds; the lock is held for milliseconds
NEW = os.O_CREAT | os.O_EXCL | os.O_RDWR


class NoRoom(Exception):
    """The budget leaves no room that may be taken; `needed` bytes would have been the least."""

    def __init__(self, needed: int) -> None:
        self.needed = needed
        super().__init__(f"no room for {needed:,} bytes")


class CacheFault(Exception):
    """The folder cannot be used now: a full or failing disk, or a lock that nobody gives back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedFile:
    """A complete file, open, with a shared lock on it: it stays until the descriptor is unlocked or closed."""

    fd: int
    path: str
    size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Busy:
    """Another process, or thread, is fetching this file; equal values mean that it has not come further."""

    reserved: int
    written: int


@dataclass(slots=True)
class Writing:
    """A file that this process fetches; it holds the only lock on it."""

    fd: int
    entry: CacheEntry
    written: int = 0


class CacheFolder:
    """The operations on a cache folder; each leaves it in a sound state."""

    def __init__(self, path: str, budget: int) -> None:
        self.path, self.budget = path, budget
        self._piece = min(max(PIECES[0], budget // SHARE), PIECES[1])
        self._files = Descriptors()

    def prepare(self) -> None:
        """Make the folder, or check that it is one of ours: nothing else may ever be deleted."""
        try:
            os.makedirs(self.path, exist_ok=True)
            with os.scandir(self.path) as found:
                items = {item.name: item.is_file(follow_symlinks=False) for item in found}
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise CacheFault(f"{self.path}: {error.strerror}") from error
            expected = "a writable folder"
            raise ConfigError(f"cache folder {self.path}", got=error.strerror, expected=expected) from error
        foreign = sorted(name for name, is_file in items.items() if not (is_file and is_ours(name)))
        if foreign or (items and MARKER not in items):
            raise ConfigError(
                f"cache folder {self.path}",
                got="files that are not from a shard cache: " + ", ".join((foreign or sorted(items))[:3]),
                expected="a folder used for nothing else: empty, or made by a shard cache",
                fix="use another folder",
            )
        with self.locked(MARKER):
            pass  # made first of all: a folder with files but without it is not ours
        with self.locked() as (entries, members):
            self._remove_dead(entries)
            self._free(entries, wanted_by_living(self.path, members), 0, spare_wanted=False)

    @contextmanager
    def locked(self, name: str = LOCK) -> Iterator[tuple[list[CacheEntry], list[str]]]:
        """The folder for ourselves, with what lies in it. Faults of the disk become CacheFault."""
        fd = -1
        try:
            fd = self._files.open(os.path.join(self.path, name), os.O_CREAT | os.O_RDWR)
            _wait_for(fd)
            yield list_folder(self.path)
        except OSError as error:
            raise CacheFault(f"{self.path}: {error.strerror or error}") from error
        finally:
            if fd >= 0:
                self.close(fd)

    def close(self, fd: int) -> None:
        """Give back a descriptor that one of these operations has opened."""
        self._files.close(fd)

    def claim(self, key: EntryKey) -> CachedFile | Busy | Writing:
        """The file where it is there; otherwise who is to fetch it: someone else, or the caller."""
        with self.locked() as (entries, _):
            self._remove_dead(entries)
            for entry in entries:
                if entry.key == key and entry.state == "ready" and (ready := self._open(entry)):
                    return ready
            for entry in entries:
                if entry.key == key and entry.state == "part":
                    with suppress(FileNotFoundError):  # given up just now
                        return Busy(reserved=entry.reserved, written=os.stat(self._at(entry)).st_size)
            for entry in entries:  # another content of the same file is of no use any more
                if entry.key.address == key.address and entry.key != key:
                    remove_if_unused(self._at(entry))
            entry = new_part(key)
            fd = self._files.open(self._at(entry), NEW)
            if not try_lock(fd, fcntl.LOCK_EX):
                raise AssertionError("a new file that is locked")
            return Writing(fd, entry)

    def reserve(self, writing: Writing, needed: int, wish: int, *, spare_wanted: bool) -> None:
        """At least `needed` bytes in all for a file, `wish` where there is room. Raises NoRoom."""
        if needed > self.budget:
            raise NoRoom(needed)
        with self.locked() as (entries, members):
            more = needed - writing.entry.reserved
            if self._room(entries) < more:
                self._remove_dead(entries)
                if self._room(entries) < more:
                    wanted = wanted_by_living(self.path, members)
                    self._free(entries, wanted, more, spare_wanted=spare_wanted)
            if (room := self._room(entries)) < more:
                raise NoRoom(needed)
            granted = with_reservation(writing.entry, max(needed, min(wish, writing.entry.reserved + room)))
            os.rename(self._at(writing.entry), self._at(granted))
            writing.entry = granted

    def write(self, writing: Writing, block: bytes, *, spare_wanted: bool) -> None:
        """Append to a file, never more than is reserved."""
        needed = writing.written + len(block)
        if needed > writing.entry.reserved:
            self.reserve(writing, needed, needed + self._piece, spare_wanted=spare_wanted)
        try:
            write_all(writing.fd, block)
        except OSError as error:
            raise CacheFault(f"{self.path}: {error.strerror or error}") from error
        writing.written = needed

    def finish(self, writing: Writing) -> CachedFile:
        """A file is complete: from now on others can read it; what it did not need is free again."""
        try:
            os.fsync(writing.fd)
        except OSError as error:
            raise CacheFault(f"{self.path}: {error.strerror or error}") from error
        with self.locked():
            entry = with_reservation(writing.entry, writing.written, "ready")
            os.rename(self._at(writing.entry), self._at(entry))
            writing.entry = entry
            fcntl.flock(writing.fd, fcntl.LOCK_SH)
        return CachedFile(fd=writing.fd, path=self._at(entry), size=writing.written)

    def abandon(self, writing: Writing) -> None:
        """Remove a file that will not be completed. It needs no lock of the folder: its name is ours alone."""
        with suppress(OSError):  # then it is found without a lock, and removed, by whoever comes next
            os.ftruncate(writing.fd, 0)
            os.unlink(self._at(writing.entry))
        self.close(writing.fd)

    def remove(self, key: EntryKey) -> bool:
        """Remove a complete file; False where someone is reading it."""
        with self.locked() as (entries, _):
            found = [entry for entry in entries if entry.key == key and entry.state == "ready"]
            return not [entry for entry in found if not remove_if_unused(self._at(entry))]

    def join(self) -> int:
        """A file that says what this process wants; the descriptor holds the lock that says that it lives."""
        with self.locked():
            fd = self._files.open(os.path.join(self.path, f"{new_token()}.member"), NEW)
            try_lock(fd, fcntl.LOCK_EX)
        return fd

    def leave(self, fd: int) -> None:
        """Want nothing any more."""
        self.close(fd)
        with suppress(CacheFault), self.locked() as (_, members):
            wanted_by_living(self.path, members)

    def declare(self, fd: int, addresses: Iterable[str], done: Iterable[str] = ()) -> None:
        """Say what this process wants from now on. What it has `done` is removed where nobody else wants it."""
        text = "".join(address + "\n" for address in addresses).encode()
        with self.locked() as (entries, members):
            os.ftruncate(fd, 0)
            os.pwrite(fd, text, 0)
            if leaving := set(done):
                leaving -= wanted_by_living(self.path, members)
            for entry in entries:
                if entry.key.address in leaving and entry.state == "ready":
                    remove_if_unused(self._at(entry))

    def _open(self, entry: CacheEntry) -> CachedFile | None:
        """A complete file with a shared lock; None, and the file removed, where it is not what its name says."""
        path = self._at(entry)
        fd = self._files.open(path, os.O_RDONLY)
        state = os.fstat(fd)
        if stat.S_ISREG(state.st_mode) and state.st_size == entry.reserved and try_lock(fd, fcntl.LOCK_SH):
            os.utime(fd)
            return CachedFile(fd=fd, path=path, size=entry.reserved)
        self.close(fd)
        remove_if_unused(path)
        return None

    def _at(self, entry: CacheEntry) -> str:
        return os.path.join(self.path, entry.name)

    def _room(self, entries: Iterable[CacheEntry]) -> int:
        return self.budget - sum(entry.reserved for entry in entries)

    def _remove_dead(self, entries: list[CacheEntry]) -> None:
        """Remove what processes were fetching when they ended."""
        for entry in [entry for entry in entries if entry.state == "part"]:
            if remove_if_unused(self._at(entry)):
                entries.remove(entry)

    def _free(self, entries: list[CacheEntry], wanted: set[str], room: int, *, spare_wanted: bool) -> None:
        """Remove files that nobody reads until there is room: first unwanted ones, then those unused longest."""
        ready = [entry for entry in entries if entry.state == "ready"]
        order = sorted(ready, key=lambda entry: (entry.key.address in wanted, self._last_use(entry)))
        for entry in order:
            if self._room(entries) >= room or (spare_wanted and entry.key.address in wanted):
                return
            if remove_if_unused(self._at(entry)):
                entries.remove(entry)

    def _last_use(self, entry: CacheEntry) -> float:
        try:
            return os.stat(self._at(entry)).st_mtime
        except FileNotFoundError:
            return 0.0


def _wait_for(fd: int) -> None:
    """Take the folder's lock; its holder may be stopped, so not for ever."""
    pause, end = 0.0005, time.monotonic() + LOCK_PATIENCE
    while not try_lock(fd, fcntl.LOCK_EX):
        if time.monotonic() > end:
            raise TimeoutError(f"another process has held the lock for {LOCK_PATIENCE:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
