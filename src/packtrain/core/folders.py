"""Folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from packtrain.core.artifacts import leftovers, room_for, sync
from packtrain.core.locks import lock


@contextmanager
def whole_folder(folder: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its place when the block ends without an error.

    A folder that is there and not empty is an OSError then; with `replace`, which is for the only process that writes
    there, it stays until then. What killed processes have left is removed.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder, alone=replace)
    # Not by process id: on a shared disk another machine may have a process of the same one.
    work = folder.with_name(f".{folder.name}.{uuid.uuid4().int}.tmp")
    work.mkdir()
    alive = os.open(work, os.O_RDONLY)
    try:
        lock(alive)
        with room_for(folder):
            yield work
            for path in (*work.rglob("*"), work):
                sync(path)
            if replace:
                _exchange(work, folder)
            else:
                os.replace(work, folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        os.close(alive)


def made_once(folder: Path, write: Callable[[Path], object]) -> Path:
    """A folder that is written where it is not there yet; another process may be faster."""
    if not folder.is_dir():
        try:
            with whole_folder(folder) as fresh:
                write(fresh)
        except OSError:
            if not folder.is_dir():
                raise
    return folder


def _remove_abandoned(folder: Path, *, alone: bool) -> None:
    """Only a living process holds the lock on its folder; on a disk without locks, one that is alone knows.

    An empty one may be about to be locked.
    """
    for path in leftovers(folder.parent, folder.name):
        with suppress(OSError):  # locked, or gone by now
            left = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                if (lock(left, wait=False) or alone) and any(path.iterdir()):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(left)


def _exchange(work: Path, folder: Path) -> None:
    before = work.with_suffix(".old")
    if folder.exists():
        os.rename(folder, before)
    try:
        os.rename(work, folder)
    except OSError:
        if before.exists():
            os.rename(before, folder)
        raise
    for path in leftovers(folder.parent, folder.name, "old"):
        shutil.rmtree(path, ignore_errors=True)
