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
    file = _opened(path)
    held = False
    try:
        held = file is not None and lock(file, wait=wait)
        yield held
    finally:
        if file is not None:
            if held:  # closing would leave it to processes that were forked meanwhile
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def is_held(path: Path) -> bool:
    """Is a process in a block with this path? False where that cannot be known."""
    try:
        file = open_own(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not try_lock(file, shared=True)
    except OSError:
        return False
    finally:
        os.close(file)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock an open file without waiting; False where another process holds it, OSError where the disk has no locks.

    The system releases it when the process ends, however it ends.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def lock(descriptor: int, *, wait: bool = True) -> bool:
    """Lock an open file until it is closed; False where the disk has no locks, BlockingIOError instead of waiting."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


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
