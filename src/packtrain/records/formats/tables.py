"""Tables in Parquet and Arrow files: one row is one entry, and only a few rows are plain Python at a time.

Every row of a unit becomes exactly one entry: where a span of a table is damaged, each lost row says so.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from bisect import bisect_right
from collections.abc import Hashable, Iterator
from itertools import pairwise

import pyarrow as pa

from packtrain.core.errors import RecordError
from packtrain.records.formats.source_files import Format
from packtrain.records.formats.table_rows import (
    ArrowRows,
    ParquetGroups,
    ParquetRows,
    RowReader,
    Source,
    arrow_source,
    chunk_rows,
    is_sound,
    plain_bytes,
)
from packtrain.records.shards.address import unreadable
from packtrain.records.source import Entry, Unit
from packtrain.records.span import Plain

BAD_TABLE = "table cannot be read"
DAMAGED = "table is damaged"
CUT_OFF = "table is cut off, rows may be missing"
BAD_ROW = "row cannot be read"

STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"

# The number in the file of the first row; the rows; are they known to be sound, so that reading them cannot crash?
Rows = tuple[int, pa.RecordBatch, bool]


class Table(Format):
    """Base of the two table formats: units are ranges of rows."""

    rows_per_unit = 4096

    def __init__(self) -> None:
        self._cursor: ParquetCursor | ArrowCursor | None = None
        self._rows_at = RowReader(self.open_rows)
        self._lock = threading.Lock()  # a process has one reader, and may read in several threads

    def ranges(self, path: str) -> Iterator[tuple[int, int]]:
        """The rows of each unit. Raises RecordError or an arrow error at a fault, after the ranges before it."""
        raise NotImplementedError

    def open(self, path: str) -> ParquetCursor | ArrowCursor:
        """A cursor before the first row; it moves forward, so that units read in order decode nothing twice."""
        raise NotImplementedError

    def open_rows(self, source: Source, key: Hashable) -> ParquetRows | ArrowRows:
        """The rows of one file, to be read at any place; `key` tells it from other files."""
        raise NotImplementedError

    def cut(self, file: str) -> Iterator[Unit]:
        try:
            for start, stop in self.ranges(file):
                yield Unit(file=file, start=start, stop=stop, first=start)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise _table_error(BAD_TABLE, error) from error

    def entries(self, unit: Unit, name: str) -> Iterator[Entry]:
        row = unit.start
        try:
            for _, batch, sound in self._rows(unit):
                for value in plain_rows(batch, sound):
                    yield row_entry(f"{name}:{row}", row, value)
                    row += 1
            problem = RecordError("read", CUT_OFF, f"the file no longer has row {row}") if row < unit.stop else None
        except (pa.ArrowException, OSError, ValueError) as error:
            problem = _table_error(DAMAGED, error)
        if problem:
            for lost in range(row, unit.stop):
                yield Entry(origin=f"{name}:{lost}", error=problem, at=lost)

    def entry_at(self, file: str, plain: Plain, at: int, origin: str) -> Entry:
        try:
            with self._lock:
                row = self._rows_at.row(file, plain, at)
                if row is None:
                    raise RecordError("read", CUT_OFF, f"the file no longer has row {at}")
                return row_entry(origin, at, next(plain_rows(*row)))
        except (pa.ArrowException, OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno:
                raise  # the system's fault, not the table's
            raise _table_error(DAMAGED, error) from error

    def num_entries(self, unit: Unit) -> int:
        return unit.stop - unit.start

    def _rows(self, unit: Unit) -> Iterator[Rows]:
        """The rows of a unit in small batches."""
        cursor, self._cursor = self._cursor, None  # taken away while in use: a fault must not leave a broken one
        if cursor is None or cursor.path != unit.file or cursor.row > unit.start:
            cursor = self.open(unit.file)
        for first, batch, sound in cursor.batches(unit.start):
            begin, end = max(first, unit.start), min(first + batch.num_rows, unit.stop)
            # Asked for its size, Arrow follows the offsets of an unsound batch out of its memory.
            step = chunk_rows(plain_bytes(batch), batch.num_rows) if sound else 1
            for row in range(begin, end, step):
                _require_whole(cursor.path, cursor.mapped)
                yield row, batch.slice(row - first, min(step, end - row)), sound
            if first + batch.num_rows >= unit.stop:
                break
        self._cursor = cursor


class Parquet(Table):
    """Reads Parquet files; a unit is a row group, or a range of rows of a large one."""

    def ranges(self, path: str) -> Iterator[tuple[int, int]]:
        """Row groups, split where they are large."""
        for begin, end in pairwise(ParquetGroups(path).starts):
            for start in range(begin, end, self.rows_per_unit):
                yield start, min(start + self.rows_per_unit, end)

    def open(self, path: str) -> ParquetCursor:
        return ParquetCursor(path)

    def open_rows(self, source: Source, key: Hashable) -> ParquetRows:
        return ParquetRows(source, key)


class Arrow(Table):
    """Reads Arrow files of both kinds (IPC file and IPC stream), memory-mapped."""

    rows_per_unit = 1024

    def ranges(self, path: str) -> Iterator[tuple[int, int]]:
        """Record batches, joined where they are small and split where they are large."""
        start = stop = 0
        fault: Exception | None = None
        batches = _arrow_batches(path)
        while True:
            try:
                batch = next(batches, None)
            except (RecordError, pa.ArrowException, OSError, ValueError) as error:
                batch, fault = None, error
            if batch is None:
                break
            stop += batch.num_rows
            while stop - start >= self.rows_per_unit:
                yield start, start + self.rows_per_unit
                start += self.rows_per_unit
        if stop > start:
            yield start, stop
        if fault:
            raise fault

    def open(self, path: str) -> ArrowCursor:
        return ArrowCursor(path)

    def open_rows(self, source: Source, key: Hashable) -> ArrowRows:
        return ArrowRows(arrow_source(source), key)


def row_entry(origin: str, row: int, value: dict[str, object] | RecordError) -> Entry:
    """A row of a table file, or why it cannot be had, as an entry."""
    if isinstance(value, RecordError):
        return Entry(origin=origin, error=value, at=row)
    try:
        return Entry(origin=origin, value=value, at=row, check=row_check(value), padded=True)
    except RecursionError:
        return Entry(origin=origin, error=RecordError("read", BAD_ROW, "nested too deeply"), at=row)


def row_check(value: dict[str, object]) -> int:
    """A checksum of all that a row holds, media too; row groups, encodings and versions of Arrow leave no trace in it.

    >>> row_check({"text": "a", "image": b"1"}) == row_check({"text": "a", "image": b"2"})
    False
    """
    return zlib.crc32(_encoder.encode(value).encode())


def _not_json(value: object) -> object:
    """Values that JSON has no name for: bytes by their checksum, dates and the like by their text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return ["bytes", len(value), zlib.crc32(value)]
    return str(value)


_encoder = json.JSONEncoder(default=_not_json, check_circular=False)


def plain_rows(batch: pa.RecordBatch, sound: bool = True) -> Iterator[dict[str, object] | RecordError]:
    """The rows as plain Python; where they cannot all be converted, those that can, and an error for each other."""
    if sound:
        try:
            yield from batch.to_pylist()
            return
        except (pa.ArrowException, ValueError, OverflowError, LookupError, ImportError, TypeError):
            pass
    for row in range(batch.num_rows):
        one = batch.slice(row, 1)
        try:
            one.validate(full=True)
            yield one.to_pylist()[0]
        except (pa.ArrowException, ValueError, OverflowError, LookupError, ImportError, TypeError) as error:
            yield _table_error(BAD_ROW, error)


class ParquetCursor(ParquetGroups):
    """A place in a Parquet file."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path, self.row, self.mapped = path, 0, 0
        self._group = -1
        self._batches: Iterator[pa.RecordBatch] = iter(())
        self._held: pa.RecordBatch | None = None  # begins at `row`

    def batches(self, start: int) -> Iterator[Rows]:
        """Batches from the one that holds row `start`."""
        group = bisect_right(self.starts, start) - 1
        if group > self._group:
            self._enter(group)
        while self._group < len(self.steps):
            if self._held is None:
                self._held = next(self._batches, None)
            if self._held is None:
                self._enter(self._group + 1)
                continue
            after = self.row + self._held.num_rows
            if after > start:
                yield self.row, self._held, True
            self.row, self._held = after, None

    def _enter(self, group: int) -> None:
        """Go to the first row of a row group."""
        self._group, self.row, self._held = group, self.starts[min(group, len(self.steps))], None
        if group < len(self.steps):
            self._batches = self.decode(group)


class ArrowCursor:
    """A place in an Arrow file."""

    def __init__(self, path: str) -> None:
        self.path, self.row, self.mapped = path, 0, os.stat(path).st_size
        self._batches = _arrow_batches(path)
        self._held: tuple[pa.RecordBatch, bool] | None = None  # begins at `row`

    def batches(self, start: int) -> Iterator[Rows]:
        """Batches from the one that holds row `start`."""
        while True:
            if self._held is None:
                if (batch := next(self._batches, None)) is None:
                    return
                wanted = self.row + batch.num_rows > start  # passing over a mapped batch costs nothing
                self._held = batch, wanted and is_sound(batch)
            batch, sound = self._held
            if self.row + batch.num_rows > start:
                yield self.row, batch, sound
            self.row, self._held = self.row + batch.num_rows, None


def _arrow_batches(path: str) -> Iterator[pa.RecordBatch]:
    """The record batches of an IPC file or stream. Raises RecordError where a stream lacks its end."""
    source = pa.memory_map(path)
    head = source.read(8)
    source.seek(0)
    if head.startswith(b"ARROW1"):
        reader = pa.ipc.open_file(source)
        for number in range(reader.num_record_batches):
            _require_whole(path, source.size())
            yield reader.get_batch(number)
        return
    batches = iter(pa.ipc.open_stream(source))
    while True:
        _require_whole(path, source.size())
        if (batch := next(batches, None)) is None:
            break
        yield batch
    if head.startswith(STREAM_END[:4]):  # streams older than Arrow 0.15 end otherwise
        end = source.tell()
        source.seek(max(0, end - len(STREAM_END)))
        if source.read(len(STREAM_END)) != STREAM_END:
            raise RecordError("read", CUT_OFF, "the stream has no end mark")
        if end < source.size():
            raise RecordError("read", DAMAGED, f"data after the end of the stream, from byte {end}")


def _require_whole(path: str, mapped: int) -> None:
    """Whoever reads a mapped file beyond its present end is killed by the system, without a word."""
    if mapped and (now := os.stat(path).st_size) < mapped:
        raise pa.ArrowInvalid(f"the file became shorter while it was read: {now:,} of {mapped:,} bytes are left")


def _table_error(reason: str, error: Exception) -> RecordError:
    """Arrow's message on one line."""
    if isinstance(error, OSError) and error.errno:
        return unreadable(error)
    return RecordError("read", reason, " ".join(str(error).split())[:300])
