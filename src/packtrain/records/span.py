"""Bytes that are read at any place: a part of a file, of an archive or of memory, or a whole decompressed data file."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol, cast


class Span:
    """`size` bytes beginning at `start` of an open file, or the bytes themselves. Owns its file descriptor."""

    __slots__ = ("_data", "_fd", "_start", "path", "size")

    def __init__(
        self, *, fd: int = -1, start: int = 0, size: int = 0, data: bytes | None = None, path: str | None = None
    ) -> None:
        self._fd, self._start, self._data = fd, start, data
        self.path = path  # a local file that holds just these bytes
        self.size = size if data is None else len(data)

    def read_at(self, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only where the span ends."""
        if self._data is not None:
            return self._data[position : position + length]
        length = min(length, self.size - position)
        if length <= 0:
            return b""
        piece = os.pread(self._fd, length, self._start + position)
        if len(piece) == length or not piece:
            return piece
        # network file systems may return less than asked for
        return piece + self.read_at(position + len(piece), length - len(piece))

    def file(self) -> BinaryIO:
        """A seekable file object over the span. It does not own the descriptor: close the span itself."""
        if self._data is not None:
            return io.BytesIO(self._data)
        return cast(BinaryIO, io.BufferedReader(PlainFile(self), 16384))

    def into_file(self) -> BinaryIO:
        """A file object that owns the descriptor; the span must not be used or closed any more."""
        if self._data is not None:
            return io.BytesIO(self._data)
        if self._start == 0 and os.fstat(self._fd).st_size == self.size:
            return os.fdopen(self._fd, "rb")
        return cast(BinaryIO, io.BufferedReader(PlainFile(self, owned=self), 65536))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


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


def plain_blocks(plain: Plain, at: int, most: int = 1 << 62) -> Iterator[bytes]:
    """At most `most` bytes from a place on; small blocks first, since one entry is often small."""
    size, end = FIRST_BLOCK, at + most
    while block := plain.read_at(at, min(size, end - at)):
        yield block
        at, size = at + len(block), min(2 * size, LARGEST_BLOCK)


class PlainFile(io.RawIOBase):
    """A read-only file over bytes that are in no local file of their own, for libraries that want one."""

    def __init__(self, plain: Plain, *, owned: Span | None = None) -> None:
        self._plain, self._owned = plain, owned
        self._size: int | None = getattr(plain, "size", None)
        self._position = 0

    def size(self) -> int:
        """Looked for once where the bytes do not know it, by reading single ones."""
        if self._size is None:
            low, high = 0, 1  # there are at least `low` bytes, and fewer than `high`
            while self._plain.read_at(high - 1, 1):
                low, high = high, 2 * high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._plain.read_at(middle - 1, 1) else (low, middle)
            self._size = low
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = 0 if whence == os.SEEK_SET else self._position if whence == os.SEEK_CUR else self.size()
        if base + offset < 0:
            raise ValueError(f"seek to {base + offset}")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            size = max(0, self.size() - self._position)
        piece = self._plain.read_at(self._position, size)
        self._position += len(piece)
        return piece

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        piece = self.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        if self._owned is not None and not self.closed:
            self._owned.close()
        super().close()
