"""One process of a machine at a time, by a lock on a file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from packtrain.core.artifacts import open_own

_NOT_FOR_US = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def alone(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Wait until no other process is in a block with this path, or raise BlockingIOError where that is not wanted.

    False where the disk has no locks, or where we may neither write nor find one: then nobody waits. What is complete
    there can be used all the same, and whoever wants to write finds out why it cannot.
    """
    lock = _opened(path)
    held = False
    try:
        if lock is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                raise
            except OSError:  # a disk without locks
                pass
        yield held
    finally:
        if lock is not None:
            if held:  # closing would leave it to processes that were forked meanwhile
                fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def _opened(path: Path) -> int | None:
    """The file of a lock, made where it is not there; without leave to write, one that a writer has made."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        if error.errno not in _NOT_FOR_US:
            raise
    try:
        return open_own(path, os.O_RDONLY)
    except OSError:
        return None
