"""The content of files that may be compressed, block by block; and reading at any place on top of that."""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.retries import PAUSES
from packtrain.records.shards.address import Identity, raw_chunks, unreadable
from packtrain.records.span import Span

Compression = Literal["none", "gzip", "zstd"]

BLOCK = 1 << 18  # the most bytes that one block holds, whatever the ratio of compression
ZSTD_INPUT = 1 << 7  # four bytes of zstd may expand to 128 KiB, and the output of a call cannot be bounded otherwise
READ = 1 << 18
GZIP_WITH_HEADER = 16 + zlib.MAX_WBITS

DAMAGED = "compressed file is damaged"
CUT_OFF = "compressed file is cut off"

SPOILING = frozenset((DAMAGED, CUT_OFF))  # faults after which no record of a file can be trusted, nor read again
SPOILT = "in a compressed file that is damaged or cut off"

# The first byte of a zstd frame that holds no content; a file may begin with one.
SKIPPABLE_ZSTD = frozenset(range(0x50, 0x60))


def detect_compression(head: bytes) -> Compression:
    """The compression of a file, by its first bytes: names lie."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] in SKIPPABLE_ZSTD):
        return "zstd"
    return "none"


def file_compression(path: str) -> Compression:
    """The compression of the file at `path`. Raises RecordError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return detect_compression(file.read(4))
    except OSError as error:
        raise unreadable(error) from error


def file_blocks(path: str, start: int = 0) -> Iterator[bytes]:
    """The decompressed content of a file in blocks of at most BLOCK bytes; of an uncompressed one from a byte on.

    Raises RecordError at a fault, after the blocks before it.
    """
    try:
        with open(path, "rb") as file:
            kind: Compression = "none" if start else detect_compression(file.read(4))
            file.seek(start)
            yield from plain_content(iter(lambda: file.read(READ), b""), kind)
    except OSError as error:
        raise unreadable(error) from error


def plain_content(stored: Iterable[bytes], kind: Compression, *, zstd_input: int = ZSTD_INPUT) -> Iterator[bytes]:
    """The content of stored bytes in blocks. RecordError at a fault, after the blocks before it."""
    pieces = stored if kind == "none" else _gunzip(stored) if kind == "gzip" else _unzstd(stored, zstd_input)
    for piece in pieces:
        for start in range(0, len(piece), BLOCK):
            yield piece[start : start + BLOCK] if len(piece) > BLOCK else piece


def _gunzip(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The content of all gzip members, one after the other."""
    member = zlib.decompressobj(GZIP_WITH_HEADER)
    begun = False  # has the current member received a byte?
    for chunk in chunks:
        while chunk:
            if not begun and not (chunk := chunk.lstrip(b"\0")):
                break  # zeros between and after members are padding
            begun, before = True, member.copy()
            try:
                block = member.decompress(chunk, BLOCK)
            except zlib.error as error:
                yield from _until_fault(before, chunk)
                raise RecordError("read", DAMAGED, str(error)) from error
            if block:
                yield block
            chunk = member.unused_data if member.eof else member.unconsumed_tail
            if member.eof:
                member, begun = zlib.decompressobj(GZIP_WITH_HEADER), False
    while begun and (block := member.decompress(b"", BLOCK)):
        yield block  # the input is used up while the last call's output was full
    if begun and not member.eof:
        raise RecordError("read", CUT_OFF, "the gzip stream ends before its end mark")


def _until_fault(member: Any, chunk: bytes) -> Iterator[bytes]:
    """The output before a fault in the data: zlib discards it when a call fails."""
    try:
        for position in range(len(chunk)):
            piece = chunk[position : position + 1]
            while piece:
                if block := member.decompress(piece, BLOCK):
                    yield block
                piece = member.unconsumed_tail
    except zlib.error:
        return


def _unzstd(chunks: Iterable[bytes], most: int) -> Iterator[bytes]:
    """The content of all zstd frames, one after the other; at most `most` bytes go in at once."""
    try:
        import zstandard  # a machine that has no such files need not have it
    except ImportError as error:
        raise ConfigError(
            "reading a zstd file", got="no module named 'zstandard'", fix="pip install zstandard"
        ) from error
    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    for piece in (chunk[start : start + most] for chunk in chunks for start in range(0, len(chunk), most)):
        while piece:
            begun = True
            try:
                yield frame.decompress(piece)
            except zstandard.ZstdError as error:
                raise RecordError("read", DAMAGED, str(error)) from error
            piece = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    if begun:
        raise RecordError("read", CUT_OFF, "the zstd stream ends inside a frame")


MORE_ZSTD_INPUT = 1 << 11  # four bytes of zstd may expand to 128 KiB: so one call makes 64 MiB at the very most
LOOK_BACK = 1 << 22  # bytes before the reading position that can be read again without starting over
TOO_LARGE = "table is too large to be read without disk space"
TABLE_HEADS = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")  # formats that are read from their end, or all over


def decompress(path: str, identity: Identity, pauses: Sequence[float] = PAUSES) -> Iterator[bytes]:
    """The content of a file in blocks of at most BLOCK bytes.

    Where the compressed stream is damaged or ends early, a RecordError that names the file; checksums are verified.
    """
    chunks = raw_chunks(path, identity, pauses)
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) >= 4:
            break
    kind = detect_compression(head) if head else "none"
    content = plain_content(itertools.chain([head], chunks), kind, zstd_input=MORE_ZSTD_INPUT)
    try:
        yield from _merge_blocks(content) if kind == "zstd" else content
    except RecordError as error:
        if error.reason not in SPOILING:
            raise
        raise RecordError("read", error.reason, f"{path}: {error.detail}") from error


def _merge_blocks(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in blocks: small pieces are put together."""
    pending: list[bytes] = []
    size = 0
    for piece in pieces:
        if size + len(piece) > BLOCK:
            yield b"".join(pending)
            pending, size = [], 0
        pending.append(piece)
        size += len(piece)
    if pending:
        yield b"".join(pending)


class ForwardPlain:
    """Any place of a file that can only be read forward: it goes on from where it is, or starts over.

    Nothing is stored but the last few megabytes, so a place far back costs reading the file from its beginning.
    """

    path: str | None = None

    def __init__(self, file: str, identity: Identity, pauses: Sequence[float] = PAUSES) -> None:
        self._file, self._identity, self._pauses = file, identity, pauses
        self._lock = threading.Lock()
        self.starts = 0  # how often the file was opened
        self._begin()

    def read_at(self, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only where the file ends."""
        with self._lock:
            if position < self._first:
                self._begin()
            try:
                self._advance(position, position + max(0, length))
            except BaseException:
                self._begin()  # a generator that has raised is at its end, which would look like the file's
                raise
            at, parts = self._first, []
            for block in self._held:
                parts.append(block[max(0, position - at) : max(0, position + length - at)])
                at += len(block)
            return b"".join(parts)

    def _begin(self) -> None:
        self._blocks: Iterator[bytes] | None = None
        self._held: deque[bytes] = deque()
        self._first = self._end = 0  # the places of what is held

    def _advance(self, position: int, stop: int) -> None:
        """Hold the bytes up to `stop`; drop what lies far before `position`."""
        while self._end < stop:
            if self._blocks is None:
                self.starts += 1
                self._blocks = decompress(self._file, self._identity, self._pauses)
            if (block := next(self._blocks, None)) is None:
                return
            self._held.append(block)
            self._end += len(block)
            while self._end - self._first > LOOK_BACK and self._first + len(self._held[0]) <= position:
                self._first += len(self._held.popleft())

    def close(self) -> None:
        self._begin()


def in_memory(blocks: Iterator[bytes], name: str, most: int) -> Span:
    """A whole file in memory, with a path for libraries that want one where the system has such files."""
    fd = os.memfd_create("packtrain", os.MFD_CLOEXEC) if hasattr(os, "memfd_create") else -1
    chunks, size = [], 0
    try:
        for block in blocks:
            size += len(block)
            if size > most:
                fix = "give the shard cache a folder with more room, or a larger budget"
                raise RecordError("read", TOO_LARGE, f"{name} has more than {most:,} bytes: {fix}")
            if fd >= 0:
                write_all(fd, block)
            else:
                chunks.append(block)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return Span(fd=fd, size=size, path=f"/proc/self/fd/{fd}") if fd >= 0 else Span(data=b"".join(chunks))


def direct_plain(file: str, identity: Identity, most: int, pauses: Sequence[float]) -> ForwardPlain | Span:
    """A file without a place on disk: read forward, or held in memory where its format is read all over."""
    forward = ForwardPlain(file, identity, pauses)
    if forward.read_at(0, 6).startswith(TABLE_HEADS):
        forward.close()
        return in_memory(decompress(file, identity, pauses), file, most)
    return forward


def write_all(fd: int, data: bytes) -> None:
    """Write everything: a call may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
