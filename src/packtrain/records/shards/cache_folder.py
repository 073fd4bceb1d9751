"""A cache folder whose byte budget holds at every moment, over all processes that use it.

The folder itself is the record of what is reserved, by the names of its files:

    <address>.<version>.<token>.<bytes reserved>.part     being fetched; its writer holds a lock on it
    <address>.<version>.<token>.<bytes>.ready             complete; readers hold shared locks on it
    <token>.member                                        the addresses that one process wants; it holds a lock on it

Bytes are reserved before they are written, and a file is deleted before its bytes count as free. Every change is made
under one lock of the folder and is one rename or one removal, so a process may be killed between any two steps and
there is no second record to disagree with.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from packtrain.core.artifacts import share, try_lock, unlock
from packtrain.core.errors import ConfigError
from packtrain.core.retries import waiting
from packtrain.records.shards.address import Identity
from packtrain.records.shards.decompression import write_all
from packtrain.records.shards.open_files import Descriptors, Handle
from packtrain.records.span import Span

State = Literal["part", "ready"]
MARKER = "packtrain-shard-cache"
LOCK = "lock"
_ENTRY = re.compile(r"([0-9a-f]{32})\.([0-9a-f]{16})\.([0-9a-f]{16})\.([0-9]{1,18})\.(part|ready)")
_MEMBER = re.compile(r"[0-9a-f]{16}\.member")

PIECES = (1 << 18, 8 << 20)  # bytes reserved at once where the size of a file is not known: at least, at most
SHARE = 64  # a piece is at most this part of the budget, so that fetches beside each other do not starve
LOCK_PATIENCE = 30.0  # seconds; the lock is held for milliseconds
USE_NOTED = 2.0  # seconds between two notes of when a file was last used
NEW = os.O_CREAT | os.O_EXCL | os.O_RDWR


class NoRoom(Exception):
    """The budget leaves no room that may be taken; `needed` bytes would have been the least."""

    def __init__(self, needed: int) -> None:
        self.needed = needed
        super().__init__(f"no room for {needed:,} bytes")


class CacheFault(Exception):
    """The folder cannot be used now: a full or failing disk, or a lock that nobody gives back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryKey:
    """One content of one file, as digests: no name of a source can reach the file system."""

    address: str
    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheEntry:
    """One cached file, whole or in the making."""

    key: EntryKey
    token: str
    reserved: int  # bytes; never fewer than the file has
    state: State

    @property
    def name(self) -> str:
        return f"{self.key.address}.{self.key.version}.{self.token}.{self.reserved}.{self.state}"


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


def file_address(file: str) -> str:
    """The digest of a path or URL."""
    return hashlib.sha256(file.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def entry_key(file: str, identity: Identity, kind: str = "") -> EntryKey:
    """The key of a file as it is now; `kind` tells apart several things made from it."""
    version = hashlib.sha256(f"{identity.size} {identity.stamp}".encode()).hexdigest()[:16]
    return EntryKey(address=file_address(kind + file), version=version)


def is_ours(name: str) -> bool:
    """Does a cache make files of this name?"""
    return name in (MARKER, LOCK) or bool(_ENTRY.fullmatch(name) or _MEMBER.fullmatch(name))


def list_folder(folder: str) -> tuple[list[CacheEntry], list[str]]:
    """The entries and the names of the members."""
    entries, members = [], []
    for name in os.listdir(folder):
        if match := _ENTRY.fullmatch(name):
            address, version, token, reserved, state = match.groups()
            key = EntryKey(address=address, version=version)
            kind: State = "part" if state == "part" else "ready"
            entries.append(CacheEntry(key=key, token=token, reserved=int(reserved), state=kind))
        elif _MEMBER.fullmatch(name):
            members.append(name)
    return entries, members


def remove_if_unused(path: str) -> bool:
    """Remove a file on which nobody holds a lock, and free its space even where someone has it open.

    True where it is gone. Only with the folder's lock held: otherwise a file could be locked before it is removed.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if not try_lock(fd):
            return False
        os.ftruncate(fd, 0)
        os.unlink(path)
        return True
    finally:
        os.close(fd)


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
            with os.scandir(self.path) as items:
                is_file = {item.name: item.is_file(follow_symlinks=False) for item in items}
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise CacheFault(f"{self.path}: {error.strerror}") from error
            expected = "a writable folder"
            raise ConfigError(f"cache folder {self.path}", got=error.strerror, expected=expected) from error
        foreign = sorted(name for name in is_file if not (is_file[name] and is_ours(name)))
        if foreign or (is_file and MARKER not in is_file):
            raise ConfigError(
                f"cache folder {self.path}",
                got="files that are not from a shard cache: " + ", ".join((foreign or sorted(is_file))[:3]),
                expected="a folder used for nothing else: empty, or made by a shard cache",
                fix="use another folder",
            )
        with self.locked(MARKER):
            pass  # made first of all: a folder with files but without it is not ours
        with self.locked() as (entries, members):
            self._remove_dead(entries)
            self._free(entries, self._wanted_addresses(members), 0, spare_wanted=False)

    @contextmanager
    def locked(self, name: str = LOCK) -> Iterator[tuple[list[CacheEntry], list[str]]]:
        """The folder for ourselves, with what lies in it. Faults of the disk become CacheFault."""
        with self._faults():
            fd = self._files.open(os.path.join(self.path, name), os.O_CREAT | os.O_RDWR)
            try:
                _wait_for(fd)
                yield list_folder(self.path)
            finally:
                self.close(fd)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Faults of the disk as CacheFault."""
        try:
            yield
        except OSError as error:
            raise CacheFault(f"{self.path}: {error.strerror or error}") from error

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
                        return Busy(reserved=entry.reserved, written=os.stat(self._path(entry)).st_size)
            for entry in entries:  # another content of the same file is of no use any more
                if entry.key.address == key.address and entry.key != key:
                    remove_if_unused(self._path(entry))
            entry = CacheEntry(key=key, token=_new_token(), reserved=0, state="part")
            fd = self._files.open(self._path(entry), NEW)
            if not try_lock(fd):
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
                    wanted = self._wanted_addresses(members)
                    self._free(entries, wanted, more, spare_wanted=spare_wanted)
            if (room := self._room(entries)) < more:
                raise NoRoom(needed)
            self._rename(writing, max(needed, min(wish, writing.entry.reserved + room)), "part")

    def write(self, writing: Writing, block: bytes, *, spare_wanted: bool) -> None:
        """Append to a file, never more than is reserved."""
        needed = writing.written + len(block)
        if needed > writing.entry.reserved:
            self.reserve(writing, needed, needed + self._piece, spare_wanted=spare_wanted)
        with self._faults():
            write_all(writing.fd, block)
        writing.written = needed

    def finish(self, writing: Writing) -> CachedFile:
        """A file is complete: from now on others can read it; what it did not need is free again."""
        with self._faults():
            os.fsync(writing.fd)
        with self.locked():
            self._rename(writing, writing.written, "ready")
            share(writing.fd)
        return CachedFile(fd=writing.fd, path=self._path(writing.entry), size=writing.written)

    def abandon(self, writing: Writing) -> None:
        """Remove a file that will not be completed. It needs no lock of the folder: its name is ours alone."""
        with suppress(OSError):  # then the next process finds it without a lock, and removes it
            os.ftruncate(writing.fd, 0)
            os.unlink(self._path(writing.entry))
        self.close(writing.fd)

    def remove(self, key: EntryKey) -> bool:
        """Remove a complete file; False where someone is reading it."""
        with self.locked() as (entries, _):
            ready = [entry for entry in entries if entry.key == key and entry.state == "ready"]
            removed = [remove_if_unused(self._path(entry)) for entry in ready]  # every one, also after a failure
            return all(removed)

    def join(self) -> int:
        """A file that says what this process wants; the descriptor holds the lock that says that it lives."""
        with self.locked():
            fd = self._files.open(os.path.join(self.path, f"{_new_token()}.member"), NEW)
            try_lock(fd)
        return fd

    def leave(self, fd: int) -> None:
        """Want nothing any more."""
        self.close(fd)
        with suppress(CacheFault), self.locked() as (_, members):
            self._wanted_addresses(members)

    def declare(self, fd: int, addresses: Iterable[str], done: Iterable[str] = ()) -> None:
        """Say what this process wants from now on. What it has `done` is removed where nobody else wants it."""
        text = "".join(address + "\n" for address in addresses).encode()
        with self.locked() as (entries, members):
            os.ftruncate(fd, 0)
            os.pwrite(fd, text, 0)
            if leaving := set(done):
                leaving -= self._wanted_addresses(members)
            for entry in entries:
                if entry.key.address in leaving and entry.state == "ready":
                    remove_if_unused(self._path(entry))

    def _open(self, entry: CacheEntry) -> CachedFile | None:
        """A complete file with a shared lock; None, and the file removed, where it is not what its name says."""
        path = self._path(entry)
        fd = self._files.open(path, os.O_RDONLY)
        state = os.fstat(fd)
        if stat.S_ISREG(state.st_mode) and state.st_size == entry.reserved and try_lock(fd, shared=True):
            os.utime(fd)
            return CachedFile(fd=fd, path=path, size=entry.reserved)
        self.close(fd)
        remove_if_unused(path)
        return None

    def _path(self, entry: CacheEntry) -> str:
        return os.path.join(self.path, entry.name)

    def _rename(self, writing: Writing, reserved: int, state: State) -> None:
        """The same file with another reservation."""
        entry = replace(writing.entry, reserved=reserved, state=state)
        os.rename(self._path(writing.entry), self._path(entry))
        writing.entry = entry

    def _wanted_addresses(self, members: Iterable[str]) -> set[str]:
        """The addresses that living processes want; the files of dead ones are removed."""
        wanted: set[str] = set()
        for name in members:
            path = os.path.join(self.path, name)
            if not remove_if_unused(path):
                with suppress(FileNotFoundError), open(path, encoding="ascii", errors="replace") as file:
                    wanted.update(file.read().splitlines())
        return wanted

    def _room(self, entries: Iterable[CacheEntry]) -> int:
        return self.budget - sum(entry.reserved for entry in entries)

    def _remove_dead(self, entries: list[CacheEntry]) -> None:
        """Remove what processes were fetching when they ended."""
        for entry in [entry for entry in entries if entry.state == "part"]:
            if remove_if_unused(self._path(entry)):
                entries.remove(entry)

    def _free(self, entries: list[CacheEntry], wanted: set[str], room: int, *, spare_wanted: bool) -> None:
        """Remove files that nobody reads until there is room: first unwanted ones, then those unused longest."""
        ready = [entry for entry in entries if entry.state == "ready"]
        order = sorted(ready, key=lambda entry: (entry.key.address in wanted, self._last_use(entry)))
        for entry in order:
            if self._room(entries) >= room or (spare_wanted and entry.key.address in wanted):
                return
            if remove_if_unused(self._path(entry)):
                entries.remove(entry)

    def _last_use(self, entry: CacheEntry) -> float:
        try:
            return os.stat(self._path(entry)).st_mtime
        except FileNotFoundError:
            return 0.0


def _new_token() -> str:
    """A name that no other process has."""
    return secrets.token_hex(8)


def _wait_for(fd: int) -> None:
    """Take the folder's lock; its holder may be stopped, so not for ever."""
    if not any(try_lock(fd) for _ in waiting(LOCK_PATIENCE, 0.0005, 0.02)):
        raise TimeoutError(f"another process has held the lock for {LOCK_PATIENCE:.0f} s")


class CachedHandle(Handle):
    """An open file of a cache folder. Pinned by a shared lock; idle, it may be evicted, which `pin` notices."""

    def __init__(self, folder: CacheFolder, ready: CachedFile) -> None:
        super().__init__(Span(fd=ready.fd, size=ready.size, path=ready.path), partial(folder.close, ready.fd))
        self._fd = ready.fd
        self._noted = time.monotonic()

    def pin(self) -> bool:
        """Lock the file, and see that it has not been removed."""
        if not try_lock(self._fd, shared=True):
            return False
        if os.fstat(self._fd).st_nlink == 0:
            self.unpin()
            return False
        if time.monotonic() - self._noted > USE_NOTED:
            self._noted = time.monotonic()
            os.utime(self._fd)
        return True

    def unpin(self) -> None:
        """Let the file be evicted."""
        unlock(self._fd)
