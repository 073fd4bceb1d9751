"""JSON Lines, plain or compressed: one object per line, and only a newline ends a line.

A plain file is cut into byte ranges that begin at line starts, so that workers read them alone. A compressed file can
only be read from its beginning: its units carry their lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from packtrain.core.errors import RecordError
from packtrain.records.formats.compression import file_blocks, file_compression, unreadable
from packtrain.records.formats.json_object import BOM, LONGEST, TOO_LONG, json_entry, size_of
from packtrain.records.formats.source_files import failed_entry, gathered, shown_name, units_of_files
from packtrain.records.shards.plain import Plain
from packtrain.records.source import Entry, SourceSpec, Unit

BLANK = b" \t\r\n"  # what JSON calls white space; anything else on a line is content
SKIPPING = 1 << 16  # bytes read at once while passing over a line that is too long
FIRST_LOOK = 1 << 14  # bytes read at first to find the end of one line; then twice as many, and so on

Line = tuple[int, bytes | RecordError]  # the byte at which it starts; a fault stands where its line would


class JsonLines:
    """Reads JSON Lines."""

    block = 1 << 20  # bytes of lines per unit
    longest = LONGEST

    def units(self, spec: SourceSpec) -> Iterator[Unit]:
        """Byte ranges of plain files, lines of compressed ones."""
        return units_of_files(
            spec, lambda file: self._ranges(file) if file_compression(file) == "none" else self._spans(file)
        )

    def read(self, spec: SourceSpec, unit: Unit) -> Iterator[Entry]:
        """One entry for each line that is not blank."""
        if failed := failed_entry(spec, unit):
            yield failed
            return
        name = shown_name(spec, unit.file)
        for number, (at, line) in self._lines(unit):
            yield json_entry(f"{name}:{number}", at, line)

    def read_at(self, spec: SourceSpec, file: str, plain: Plain, at: int, origin: str) -> Entry:
        """The line that starts at a byte."""
        return json_entry(origin, at, self._line_at(plain, at))

    def count(self, spec: SourceSpec, unit: Unit) -> int:
        """How many entries `read` yields; nothing is parsed."""
        return 1 if isinstance(unit.payload, RecordError) else sum(1 for _ in self._lines(unit))

    def _lines(self, unit: Unit) -> Iterator[tuple[int, Line]]:
        """The lines of a unit that are not blank, with their numbers."""
        lines: Iterable[Line] = self._lines_of_range(unit) if unit.payload is None else unit.payload
        for number, (at, line) in enumerate(lines, start=unit.first):
            if isinstance(line, RecordError) or line.removeprefix(BOM).strip(BLANK):
                yield number, (at, line)

    def _line_at(self, plain: Plain, at: int) -> bytes | RecordError:
        """One line without its newline; no more than the longest allowed is read."""
        pieces: list[bytes] = []
        length, look = 0, FIRST_LOOK
        while length <= self.longest:
            wanted = min(look, self.longest + 1 - length)
            piece = plain.read_at(at + length, wanted)
            line, newline, _ = piece.partition(b"\n")
            pieces.append(line)
            length += len(line)
            if newline or len(piece) < wanted:
                return b"".join(pieces)
            look *= 2
        return self._too_long()

    def _ranges(self, file: str) -> Iterator[Unit]:
        """Cut a plain file at the first line start in each block: a unit owns the lines that start inside it."""
        start, first, offset, line = 0, 1, 0, 1  # `line` is the number of the line that holds byte `offset`
        try:
            with open(file, "rb") as handle:
                while block := handle.read(self.block):
                    newline = block.find(b"\n")
                    if newline >= 0:
                        cut = offset + newline + 1
                        if cut - start >= self.block:
                            yield Unit(number=0, source=0, file=file, start=start, stop=cut, first=first)
                            start, first = cut, line + 1
                    line += block.count(b"\n")
                    offset += len(block)
        except OSError as error:
            raise unreadable(error) from error
        if offset > start:
            yield Unit(number=0, source=0, file=file, start=start, stop=offset, first=first)

    def _lines_of_range(self, unit: Unit) -> Iterator[Line]:
        """The lines that start inside a byte range; the last one may reach beyond it."""
        position = unit.start
        try:
            with open(unit.file, "rb") as handle:
                handle.seek(unit.start)
                while position < unit.stop:
                    line = handle.readline(self.longest + 1)
                    if not line:
                        size = os.fstat(handle.fileno()).st_size
                        detail = f"it has {size} bytes, and had {unit.stop} when it was opened"
                        yield position, RecordError("read", "file has shrunk while it was read", detail)
                        return
                    at, position = position, position + len(line)
                    if len(line) > self.longest and not line.endswith(b"\n"):
                        position += _skip_line(handle)
                        yield at, self._too_long()
                    else:
                        yield at, line.removesuffix(b"\n")
        except OSError as error:
            yield position, unreadable(error)

    def _spans(self, file: str) -> Iterator[Unit]:
        """Units of about `block` bytes of lines, made while decompressing."""
        first = 1
        for lines in gathered(self._lines_of_stream(file), size_of, self.block):
            yield Unit(number=0, source=0, file=file, first=first, payload=lines)
            first += len(lines)

    def _lines_of_stream(self, file: str) -> Iterator[Line]:
        """The lines of a compressed file. At a fault the line it cut is given up for the error that says so."""
        parts: list[bytes] = []  # of the line that is not complete yet; empty once it is known to be too long
        at, length = 0, 0
        try:
            for block in file_blocks(file):
                *ended, rest = block.split(b"\n")
                for piece in ended:
                    length += len(piece)
                    yield at, self._too_long() if length > self.longest else b"".join([*parts, piece])
                    at, parts, length = at + length + 1, [], 0
                length += len(rest)
                parts = [*parts, rest] if length <= self.longest else []
        except RecordError as error:
            yield at, error
            return
        if length:
            yield at, self._too_long() if length > self.longest else b"".join(parts)

    def _too_long(self) -> RecordError:
        return RecordError("read", TOO_LONG, f"the line has more than {self.longest:,} bytes")


def _skip_line(handle: BinaryIO) -> int:
    """Pass over the rest of a line without keeping it; how many bytes that was."""
    skipped = 0
    while piece := handle.readline(SKIPPING):
        skipped += len(piece)
        if piece.endswith(b"\n"):
            break
    return skipped
