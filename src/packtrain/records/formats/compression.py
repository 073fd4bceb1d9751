"""The bytes of a file that may be compressed, block by block; everything before a fault is delivered."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Literal

from packtrain.core.errors import ConfigError, RecordError

Compression = Literal["none", "gzip", "zstd"]

BLOCK = 1 << 18  # the most bytes that one block holds, whatever the ratio of compression
ZSTD_INPUT = 1 << 7  # four bytes of zstd may expand to 128 KiB, and the output of a call cannot be bounded otherwise
GZIP_INPUT = 1 << 16
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
            if kind == "gzip":
                yield from _gzip_blocks(file)
            elif kind == "zstd":
                yield from _zstd_blocks(file)
            else:
                while block := file.read(BLOCK):
                    yield block
    except OSError as error:
        raise unreadable(error) from error


def _gzip_blocks(file: BinaryIO) -> Iterator[bytes]:
    """The content of all gzip members, one after the other."""
    member = zlib.decompressobj(GZIP_WITH_HEADER)
    begun = False  # has the current member received a byte?
    while chunk := file.read(GZIP_INPUT):
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


def _zstd_blocks(file: BinaryIO) -> Iterator[bytes]:
    """The content of all zstd frames, one after the other."""
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            f"reading {file.name}",
            got="a zstd file, and no module named 'zstandard'",
            expected="the zstandard package",
            fix="pip install zstandard",
        ) from error
    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    while chunk := file.read(ZSTD_INPUT):
        while chunk:
            begun = True
            try:
                output = frame.decompress(chunk)
            except zstandard.ZstdError as error:
                raise RecordError("read", DAMAGED, str(error)) from error
            for start in range(0, len(output), BLOCK):
                yield output[start : start + BLOCK]
            chunk = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    if begun:
        raise RecordError("read", CUT_OFF, "the zstd stream ends inside a frame")
