"""Checksums of files: against damage on disks and on the way to them, not against those who want to deceive.

A CRC-32 of each block, and a CRC-32 of those: blocks are read side by side, at several GB a second.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packtrain.core.artifacts import open_own
from packtrain.core.errors import ArtifactError

BLOCK = 16 << 20
THREADS = 4
_PIECE = 1 << 20  # read at a time; fits the processor's cache

Report = Callable[[int], None]  # gets the number of further bytes that were read


def _nobody(_: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Checking:
    """How much of a folder was read for its checksums; handed to the caller on the way."""

    path: Path
    bytes: int
    total: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSum:
    """Size and checksum of a file when it was written."""

    bytes: int
    checksum: str

    @classmethod
    def of(cls, path: Path, report: Report = _nobody) -> FileSum:
        """Measure a file as it is now; a link is refused."""
        descriptor = open_own(path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            return cls(bytes=size, checksum=_checksum(descriptor, size, report))
        finally:
            os.close(descriptor)

    @classmethod
    def from_plain(cls, plain: object) -> FileSum:
        """Read the JSON form; ValueError for anything else."""
        if not isinstance(plain, dict) or set(plain) != {"bytes", "checksum"}:
            raise ValueError("a file without its size and checksum")
        if type(plain["bytes"]) is not int or type(plain["checksum"]) is not str:
            raise ValueError("a file whose size or checksum is invalid")
        return cls(**plain)

    def plain(self) -> dict[str, int | str]:
        """The JSON form."""
        return {"bytes": self.bytes, "checksum": self.checksum}

    def fault(self, path: Path) -> str | None:
        """How the file differs now, or None."""
        try:
            size = path.stat().st_size
            if size == self.bytes:
                return None if FileSum.of(path) == self else "its content has changed since it was written"
        except FileNotFoundError:
            return "it is missing"
        return f"it has {size:,} of {self.bytes:,} bytes"


def checks_here() -> bool:
    """Is it this process that checks for all processes of its node? Launchers number those."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def file_sums(folder: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    """Size and checksum of some files of a folder, for JSON."""
    return {name: FileSum.of(folder / name).plain() for name in sorted(names)}


def require_sums(folder: Path, sums: Mapping[str, object], *, fix: str) -> None:
    """Refuse a folder of which a file is not as it was written; `sums` are those that its JSON lists, by name."""
    for name, plain in sums.items():
        try:
            written = FileSum.from_plain(plain)
            state = _state(folder / name)
            fault = written.fault(folder / name) if state is None or (state, written) not in _sound else None
        except ValueError as error:
            fault, state = str(error), None
        if fault is not None:
            expected = "the unchanged file: it was damaged on disk or while copying"
            raise ArtifactError(str(folder / name), got=fault, expected=expected, fix=fix)
        if state is not None:
            _sound.add((state, written))


# Files that this process has read to their end: a run opens its plan and its rows several times while it is prepared.
_sound: set[tuple[tuple[int, ...], FileSum]] = set()
_JUST_NOW = 2_000_000_000  # nanoseconds: so recent a change may be followed by another one at the same time


def _state(path: Path) -> tuple[int, ...] | None:
    """Numbers that change with a file; None where it has changed just now, or is missing."""
    try:
        status = path.stat()
    except OSError:
        return None
    if time.time_ns() - status.st_mtime_ns < _JUST_NOW:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _checksum(descriptor: int, size: int, report: Report) -> str:
    def block(start: int) -> bytes:
        end, crc, piece = min(start + BLOCK, size), 0, memoryview(bytearray(min(_PIECE, size - start)))
        at = start
        while at < end:
            got = os.preadv(descriptor, [piece[: end - at]], at)
            if not got:
                raise OSError(f"the file ends after {at:,} of {size:,} bytes")
            crc, at = zlib.crc32(piece[:got], crc), at + got
        return crc.to_bytes(4, "big")

    starts, together = range(0, size, BLOCK), 0
    with ThreadPoolExecutor(max(1, min(THREADS, len(os.sched_getaffinity(0))))) as pool:
        for start, crc in zip(starts, (pool.map if len(starts) > 1 else map)(block, starts), strict=True):
            together = zlib.crc32(crc, together)
            report(min(BLOCK, size - start))
    return f"{together:08x}"
