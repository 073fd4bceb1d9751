"""The files that a process has open, in use or idle: a bounded number, found again by name."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

from packtrain.records.shards.cache_folder import CachedFile, CacheFolder
from packtrain.records.shards.entries import try_lock
from packtrain.records.shards.forks import reset_in_children
from packtrain.records.shards.plain import Plain
from packtrain.records.span import Span

MOST_OPEN = 64
USE_NOTED = 2.0  # seconds between two notes of when a file was last used


class Handle(Protocol):
    """An open file. It begins pinned."""

    plain: Plain

    def pin(self) -> bool:
        """Keep an idle file readable until `unpin`; False where it cannot be used any more."""
        ...

    def unpin(self) -> None:
        """Nobody uses the file now."""
        ...

    def close(self) -> None:
        """Give it back."""
        ...


class CachedHandle:
    """A file in the cache. Pinned by a shared lock; idle, it may be evicted, which `pin` notices."""

    def __init__(self, folder: CacheFolder, ready: CachedFile) -> None:
        self._folder, self._fd = folder, ready.fd
        self._noted = time.monotonic()
        self.plain: Plain = SpanPlain(Span(fd=ready.fd, size=ready.size), ready.path)

    def pin(self) -> bool:
        """Lock the file, and see that it has not been removed."""
        if not try_lock(self._fd, fcntl.LOCK_SH):
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
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file."""
        self._folder.close(self._fd)


class FreeHandle:
    """A file on which no lock is needed, usable up to some moment."""

    def __init__(self, plain: Plain, close: Callable[[], None], until: float = float("inf")) -> None:
        self.plain, self.close = plain, close
        self._until = until

    def pin(self) -> bool:
        """False when it is time to open the file in another way."""
        return time.monotonic() < self._until

    def unpin(self) -> None:
        """Nothing is locked."""


class SpanPlain:
    """The bytes of a local file."""

    def __init__(self, span: Span, path: str | None) -> None:
        self.path, self._span = path, span

    def read_at(self, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only where the file ends."""
        return self._span.read_at(position, length)


class _Slot:
    """A handle and how many blocks use it."""

    __slots__ = ("handle", "users")

    def __init__(self, handle: Handle) -> None:
        self.handle, self.users = handle, 1


class HandleTable:
    """Open files by name; idle ones stay open, those unused longest are closed first."""

    def __init__(self) -> None:
        self._begin()
        reset_in_children(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._slots: OrderedDict[str, _Slot] = OrderedDict()

    reset_after_fork = _begin  # what is open belongs to the parent

    @contextmanager
    def use(self, file: str, acquire: Callable[[str], Handle]) -> Iterator[Plain]:
        """A file by its name; `acquire` opens it where it is not open."""
        slots, slot = self._slots, self._idle_or_used(file)
        if slot is None:
            slot = _Slot(acquire(file))
            with self._lock:
                self._discard(file)  # another thread may have been faster; the later one stays
                self._slots[file] = slot
                self._trim()
        try:
            yield slot.handle.plain
        finally:
            if slots is self._slots:  # not in a child that was forked inside the block
                self._release(file, slot)

    def forget(self, files: Iterable[str]) -> None:
        """Close these where they are idle; those in use when they are not any more."""
        with self._lock:
            for file in files:
                self._discard(file)

    def close(self) -> None:
        """Close everything that is idle."""
        self.forget(list(self._slots))

    def _idle_or_used(self, file: str) -> _Slot | None:
        with self._lock:
            slot = self._slots.get(file)
            if slot is None:
                return None
            if slot.users == 0 and not slot.handle.pin():
                self._discard(file)
                return None
            slot.users += 1
            self._slots.move_to_end(file)
            return slot

    def _release(self, file: str, slot: _Slot) -> None:
        with self._lock:
            slot.users -= 1
            if slot.users == 0:
                slot.handle.unpin()
                if self._slots.get(file) is not slot:
                    slot.handle.close()

    def _discard(self, file: str) -> None:
        slot = self._slots.pop(file, None)
        if slot and slot.users == 0:
            slot.handle.close()

    def _trim(self) -> None:
        for file in [name for name, slot in self._slots.items() if slot.users == 0]:
            if len(self._slots) <= MOST_OPEN:
                return
            self._discard(file)
