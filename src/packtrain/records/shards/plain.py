"""The decompressed bytes of a data file at any place, and as what parsers take: blocks from a place on, or a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Protocol

from packtrain.records.span import CursorFile

FIRST_BLOCK, LARGEST_BLOCK = 1 << 14, 1 << 18


class Plain(Protocol):
    """The decompressed bytes of one data file."""

    path: str | None  # a local file that holds just these bytes; None where there is none

    def read_at(self, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only where the file ends. OSError where they cannot be had."""
        ...


class Files(Protocol):
    """Where data files are read from. One object for each process; it must pickle."""

    def plain(self, file: str) -> AbstractContextManager[Plain]:
        """One data file; it stays readable until the block ends."""
        ...

    def renew(self, file: str) -> bool:
        """Forget what was copied or made from a file, so that it is fetched again; False where nothing was."""
        ...


def plain_blocks(plain: Plain, at: int) -> Iterator[bytes]:
    """The bytes from a place on; small blocks first, since one entry is often small."""
    size = FIRST_BLOCK
    while block := plain.read_at(at, size):
        yield block
        at, size = at + len(block), min(2 * size, LARGEST_BLOCK)


class PlainFile(CursorFile):
    """A read-only file over bytes that are in no local file of their own."""

    def __init__(self, plain: Plain) -> None:
        self._plain, self._size = plain, -1

    def read_at(self, position: int, length: int) -> bytes:
        return self._plain.read_at(position, length)

    def size(self) -> int:
        """Looked for once, by reading single bytes."""
        if self._size < 0:
            low, high = 0, 1  # there are at least `low` bytes, and fewer than `high`
            while self._plain.read_at(high - 1, 1):
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._plain.read_at(middle - 1, 1) else (low, middle)
            self._size = low
        return self._size
