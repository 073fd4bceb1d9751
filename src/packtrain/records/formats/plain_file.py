"""A data file's decompressed bytes as the things that parsers take: blocks from one place on, or a seekable file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator

from packtrain.records.shards.plain import Plain

FIRST_BLOCK, LARGEST_BLOCK = 1 << 14, 1 << 18


def plain_blocks(plain: Plain, at: int) -> Iterator[bytes]:
    """The bytes from a place on; small blocks first, since one entry is often small."""
    size = FIRST_BLOCK
    while block := plain.read_at(at, size):
        yield block
        at, size = at + len(block), min(2 * size, LARGEST_BLOCK)


class PlainFile(io.RawIOBase):
    """A read-only file over bytes that are in no local file of their own."""

    def __init__(self, plain: Plain) -> None:
        self._plain, self._position = plain, 0
        self._size = -1

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        """How long the file is: looked for once, by reading single bytes."""
        if self._size < 0:
            low, high = 0, 1  # there are at least `low` bytes, and fewer than `high`
            while self._plain.read_at(high - 1, 1):
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._plain.read_at(middle - 1, 1) else (low, middle)
            self._size = low
        return self._size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_END:
            offset += self.size()
        elif whence == os.SEEK_CUR:
            offset += self._position
        if offset < 0:
            raise ValueError(f"seek to {offset}")
        self._position = offset
        return offset

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = max(0, self.size() - self._position)
        data = self._plain.read_at(self._position, size)
        self._position += len(data)
        return data
