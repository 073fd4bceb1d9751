"""CSV and TSV, plain or compressed: the first row names the columns, every value is text, an empty one is None.

A quoted value may hold newlines, so where a row begins is known only from the beginning of the file: units carry their
rows. The place of a row is the byte at which it begins.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from packtrain.core.errors import RecordError
from packtrain.records.formats.jsonl import BOM, LONGEST, NOT_UTF8
from packtrain.records.formats.source_files import failed_entry, gathered, shown_name, units_of_files
from packtrain.records.shards.decompression import file_blocks
from packtrain.records.source import Entry, SourceSpec, Unit
from packtrain.records.span import Plain, plain_blocks

NOT_CSV = "not a valid row"
UNCLOSED = "a quote is not closed, rows may be missing"
BAD_HEADER = "header cannot be used"


@dataclass(frozen=True, slots=True)
class DelimitedRow:
    """One row as it stands in the file."""

    at: int  # byte
    line: int  # 1-based, of its first line
    raw: bytes
    error: RecordError | None = None


class CommaSeparated:
    """Reads CSV."""

    delimiter = ","
    block = 1 << 20  # bytes of rows per unit
    longest = LONGEST

    def __init__(self) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), LONGEST))  # that of Python is for cells, not for texts

    def units(self, spec: SourceSpec) -> Iterator[Unit]:
        """Spans of rows of every file, each with the names of the columns."""
        return units_of_files(spec, self._spans)

    def read(self, spec: SourceSpec, unit: Unit) -> Iterator[Entry]:
        """One entry for each row."""
        if failed := failed_entry(spec, unit):
            yield failed
            return
        name = shown_name(spec, unit.file)
        columns, rows = unit.payload
        for row in rows:
            yield self._entry(f"{name}:{row.line}", columns, row)

    def read_at(self, spec: SourceSpec, file: str, plain: Plain, at: int, origin: str) -> Entry:
        """The row that begins at a byte."""
        try:
            columns = self._columns(next(self._rows(plain_blocks(plain, 0)), None))
        except RecordError as error:
            return Entry(origin=origin, error=error, at=at)
        row = next(self._rows(plain_blocks(plain, at), at), None)
        return self._entry(
            origin, columns, row or DelimitedRow(at, 0, b"", RecordError("read", NOT_CSV, "no row is there"))
        )

    def count(self, spec: SourceSpec, unit: Unit) -> int:
        """How many entries `read` yields."""
        return 1 if isinstance(unit.payload, RecordError) else len(unit.payload[1])

    def _spans(self, file: str) -> Iterator[Unit]:
        """Units of about `block` bytes of rows."""
        rows = self._rows(file_blocks(file))
        columns = self._columns(next(rows, None))
        for held in gathered(rows, lambda row: len(row.raw), self.block):
            yield Unit(number=0, source=0, file=file, first=held[0].line, payload=(columns, held))

    def _rows(self, blocks: Iterable[bytes], at: int = 0) -> Iterator[DelimitedRow]:
        """The rows from a place on, without blank lines. A fault after which no row can be found is the last."""
        taken: list[bytes] = []  # lines of the row that is being read
        number = 0

        def lines() -> Iterator[str]:
            for line in _lines(blocks, self.longest):
                taken.append(line)
                if sum(map(len, taken)) > self.longest:
                    raise RecordError("read", UNCLOSED, f"a row of more than {self.longest:,} bytes")
                yield str(line, "latin-1")  # whatever the bytes are: what divides rows is ASCII

        reader = csv.reader(lines(), delimiter=self.delimiter, strict=True)
        while True:
            error: RecordError | None = None
            try:
                next(reader)
            except StopIteration:
                return
            except csv.Error as fault:
                ended = "unexpected end of data" in str(fault)
                error = RecordError("read", UNCLOSED if ended else NOT_CSV, str(fault))
            except RecordError as fault:
                error = fault
            raw = b"".join(taken)
            taken.clear()
            if error is not None and error.reason != NOT_CSV:
                yield DelimitedRow(at, number + 1, b"", error)
                return
            if raw.removeprefix(BOM).strip():
                yield DelimitedRow(at, number + 1, raw, error)
            at, number = at + len(raw), number + raw.count(b"\n")

    def _columns(self, row: DelimitedRow | None) -> list[str]:
        """The names in the first row."""
        if row is None:
            raise RecordError("read", BAD_HEADER, "the file is empty")
        names = self._values(row)
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise RecordError("read", BAD_HEADER, f"two columns are called {twice[0]!r}")
        return names

    def _values(self, row: DelimitedRow) -> list[str]:
        if row.error:
            raise row.error
        try:
            text = str(row.raw.removeprefix(BOM) if row.at == 0 else row.raw, "utf-8")
        except UnicodeDecodeError as error:
            raise RecordError("read", NOT_UTF8, f"byte {error.start + 1} is {row.raw[error.start]:#04x}") from error
        lines = (line + "\n" for line in text.removesuffix("\n").split("\n"))
        return next(csv.reader(lines, delimiter=self.delimiter, strict=True))

    def _entry(self, origin: str, columns: list[str], row: DelimitedRow) -> Entry:
        check = zlib.crc32(row.raw)
        try:
            values = self._values(row)
            if len(values) != len(columns):
                raise RecordError("read", NOT_CSV, f"{len(values)} values for {len(columns)} columns")
        except RecordError as error:
            return Entry(origin=origin, error=error, at=row.at, check=check)
        filled = (value or None for value in values)
        return Entry(origin=origin, value=dict(zip(columns, filled, strict=True)), at=row.at, check=check)


class TabSeparated(CommaSeparated):
    """Reads TSV."""

    delimiter = "\t"


def _lines(blocks: Iterable[bytes], longest: int) -> Iterator[bytes]:
    """Lines with their newlines; one that is too long comes in pieces, of which the first is too long already."""
    parts: list[bytes] = []
    length = 0
    for block in blocks:
        *ended, rest = block.split(b"\n")
        for piece in ended:
            yield b"".join([*parts, piece, b"\n"])
            parts, length = [], 0
        parts.append(rest)
        length += len(rest)
        if length > longest:
            yield b"".join(parts)
            parts, length = [], 0
    if length:
        yield b"".join(parts)
