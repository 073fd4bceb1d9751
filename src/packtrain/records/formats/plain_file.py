"""A data file's decompressed bytes as the things that parsers take: blocks from one place on, or a seekable file."""

from __future__ import annotations

from collections.abc import Iterator

from packtrain.records.shards.plain import Plain
from packtrain.records.span import CursorFile

FIRST_BLOCK, LARGEST_BLOCK = 1 << 14, 1 << 18


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
