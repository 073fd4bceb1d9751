"""One process of a machine at a time, by a lock on a file."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NOT_FOR_US = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Wait until no other process is in a block with this path.

    False where the disk has no locks, or where we may neither write nor find one: then nobody waits. What is complete
    there can be used all the same, and whoever wants to write finds out why it cannot.
    """
    lock = _opened(path)
    held = False
    try:
        if lock is not None:
            with suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
                held = True
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
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        if error.errno not in _NOT_FOR_US:
            raise
    try:
        return os.open(path, os.O_RDONLY)
    except OSError:
        return None
