"""One process of a machine at a time, by a lock on a file."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Wait until no other process is in a block with this path; False where the disk has no locks, and none waits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            held = True
        except OSError:
            held = False
        try:
            yield held
        finally:
            if held:  # closing would leave it to processes that were forked meanwhile
                fcntl.flock(lock, fcntl.LOCK_UN)
