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
from packtrain.records.formats.jsonl import BOM, LONGEST, NOT_UTF8, split_lines
from packtrain.records.formats.source_files import Format, in_chunks
from packtrain.records.shards.decompression import file_blocks
from packtrain.records.source import Entry, Unit
from packtrain.records.span import Plain, plain_blocks

NOT_CSV = "not a valid row"
UNCLOSED = "a quote is not closed, rows may be missing"
BAD_HEADER = "header cannot be used"


@dataclass(frozen=True, slots=True)
class DelimitedRow:
    """The bytes of one row."""

    at: int  # byte
    line: int  # 1-based, of its first line
    raw: bytes
    error: RecordError | None = None


class CommaSeparated(Format):
    delimiter = ","
    block = 1 << 20  # bytes of rows per unit
    longest = LONGEST

    def __init__(self) -> None:
        csv.field_size_limit(max(csv.field_size_limit(), LONGEST))  # that of Python is for cells, not for texts

    def cut(self, file: str) -> Iterator[Unit]:
        """Units of about `block` bytes of rows, each with the names of the columns."""
        rows = self._rows(file_blocks(file))
        columns = self._columns(next(rows, None))
        for chunk in in_chunks(rows, lambda row: len(row.raw), self.block):
            yield Unit(file=file, first=chunk[0].line, payload=(columns, chunk))

    def entries(self, unit: Unit, name: str) -> Iterator[Entry]:
        columns, rows = unit.payload
        return (self._entry(f"{name}:{row.line}", columns, row) for row in rows)

    def entry_at(self, file: str, plain: Plain, at: int, origin: str) -> Entry:
        columns = self._columns(next(self._rows(plain_blocks(plain, 0)), None))
        row = next(self._rows(plain_blocks(plain, at), at), None)
        missing = DelimitedRow(at, 0, b"", RecordError("read", NOT_CSV, "no row is there"))
        return self._entry(origin, columns, row or missing)

    def num_entries(self, unit: Unit) -> int:
        return len(unit.payload[1])

    def _rows(self, blocks: Iterable[bytes], at: int = 0) -> Iterator[DelimitedRow]:
        """The rows from a place on, without blank lines. A fault after which no row can be found is the last."""
        row_lines: list[bytes] = []  # lines of the row that is being read
        number = 0

        def lines() -> Iterator[str]:
            for line in split_lines(blocks, self.longest):
                row_lines.append(line)
                if sum(map(len, row_lines)) > self.longest:
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
            raw = b"".join(row_lines)
            row_lines.clear()
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
    delimiter = "\t"
