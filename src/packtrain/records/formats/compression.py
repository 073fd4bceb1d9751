"""The bytes of a file that may be compressed, block by block; everything before a fault is delivered."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from packtrain.core.errors import ConfigError, RecordError

Compression = Literal["none", "gzip", "zstd"]

BLOCK = 1 << 18  # the most bytes that one block holds, whatever the ratio of compression
ZSTD_INPUT = 1 << 7  # four bytes of zstd may expand to 128 KiB, and the output of a call cannot be bounded otherwise
READ = 1 << 18
GZIP_WITH_HEADER = 16 + zlib.MAX_WBITS

CANNOT_OPEN = "file cannot be read"
DAMAGED = "compressed file is damaged"
CUT_OFF = "compressed file is cut off"

SPOILING = frozenset((DAMAGED, CUT_OFF))  # faults behind which nothing of a file can be trusted, nor read at its place
SPOILT = "in a compressed file that is damaged or cut off"

# The first byte of a zstd frame that holds no content; a file may begin with one.
SKIPPABLE_ZSTD = frozenset(range(0x50, 0x60))


def compression_of(head: bytes) -> Compression:
    """How a file is compressed, by its first bytes: names lie."""
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(b"\x28\xb5\x2f\xfd") or (head[1:4] == b"\x2a\x4d\x18" and head[0] in SKIPPABLE_ZSTD):
        return "zstd"
    return "none"


def unreadable(error: OSError) -> RecordError:
    """The record error for a file that the system does not let us read."""
    return RecordError("read", CANNOT_OPEN, error.strerror or str(error))


def file_compression(path: str) -> Compression:
    """How the file at `path` is compressed. Raises RecordError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return compression_of(file.read(4))
    except OSError as error:
        raise unreadable(error) from error


def file_blocks(path: str) -> Iterator[bytes]:
    """The decompressed content of a file in blocks of at most BLOCK bytes.

    Raises RecordError at a fault, after the blocks before it.
    """
    try:
        with open(path, "rb") as file:
            kind = compression_of(file.read(4))
            file.seek(0)
            yield from plain_content(iter(lambda: file.read(READ), b""), kind)
    except OSError as error:
        raise unreadable(error) from error


def plain_content(stored: Iterable[bytes], kind: Compression, *, zstd_input: int = ZSTD_INPUT) -> Iterator[bytes]:
    """The content of stored bytes in blocks. RecordError at a fault, after the blocks before it."""
    found = stored if kind == "none" else _gunzip(stored) if kind == "gzip" else _unzstd(stored, zstd_input)
    for piece in found:
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
    """What a failed call had already decompressed: zlib throws it away together with the fault."""
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
    """The content of all zstd frames, one after the other; at most so many bytes go in at once."""
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
