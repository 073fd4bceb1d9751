"""The files that a process has open, in use or idle: a bounded number, found again by name.

A forked process must not go on with its parent's locks, threads and open files. A lock belongs to an open file, which
a child shares with its parent: left open in the child, it would stay locked after the parent's death.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from packtrain.core.artifacts import unlock
from packtrain.records.span import Plain

MOST_OPEN = 64


class Resets(Protocol):
    """Something that holds what belongs to one process."""

    def reset_after_fork(self) -> None:
        """Forget what belongs to the parent."""
        ...


_watched: weakref.WeakSet[Resets] = weakref.WeakSet()
_registered: list[bool] = []
_gate = threading.RLock()  # a fork waits until a file that is being opened is known


def reset_in_children(holder: Resets) -> None:
    """Have `holder` start afresh in every process that is forked from this one."""
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_gate.acquire, after_in_parent=_gate.release, after_in_child=_in_child)
        _registered.append(True)
    _watched.add(holder)


def _in_child() -> None:
    _gate.release()
    for holder in list(_watched):
        holder.reset_after_fork()


class Descriptors:
    """Open files of one process on which locks may be held; a child closes its copies without unlocking them."""

    def __init__(self) -> None:
        self._fds: set[int] = set()
        reset_in_children(self)

    def open(self, path: str, flags: int) -> int:
        """Open a file; links are not followed."""
        with _gate:
            fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            self._fds.add(fd)
        return fd

    def close(self, fd: int) -> None:
        """Unlock and close a file: closing alone would leave it locked where a child has a copy."""
        with _gate:
            if fd in self._fds:
                self._fds.discard(fd)
                with suppress(OSError):
                    unlock(fd)
                os.close(fd)

    def __del__(self) -> None:
        for fd in list(self._fds):
            self.close(fd)

    def reset_after_fork(self) -> None:
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        self._fds.clear()


class Handle:
    """An open file, pinned at first and usable up to some moment. No lock is needed on it; subclasses may hold one."""

    def __init__(self, plain: Plain, close: Callable[[], None], until: float = float("inf")) -> None:
        self.plain, self.close = plain, close
        self._until = until

    def pin(self) -> bool:
        """Keep an idle file readable until `unpin`; False when it is time to open it in another way."""
        return time.monotonic() < self._until

    def unpin(self) -> None:
        """Nobody uses the file now."""


@dataclass(slots=True)
class _Slot:
    """A handle and how many blocks use it."""

    handle: Handle
    users: int = 1


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
