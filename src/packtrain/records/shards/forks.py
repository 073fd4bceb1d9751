"""Forked processes must not go on with their parent's locks, threads and open files: who has such is told here.

A lock belongs to an open file, and a forked child shares its parent's open files: left open in the child, they would
stay locked after the parent's death.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from contextlib import suppress
from typing import Protocol


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
                    fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)

    def __del__(self) -> None:
        for fd in list(self._fds):
            self.close(fd)

    def reset_after_fork(self) -> None:
        """Close the copies."""
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        self._fds.clear()
