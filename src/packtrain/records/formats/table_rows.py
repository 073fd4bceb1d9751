"""Single rows of table files, at any place: the last files stay open and the last row groups decoded, within bounds."""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.records.span import Plain, PlainFile

Source = str | PlainFile  # a local file, or bytes that are in none
# Rows come with a flag: known to be sound, so that reading them cannot crash.
FoundRow = tuple[pa.RecordBatch, bool]
Rows = tuple[pa.Table, bool]


CHUNK = 1 << 20  # bytes of rows that are plain Python at a time, as far as the table tells
MAX_CHUNK_ROWS = 256


class Held:
    """Decoded spans of tables, the latest of them, up to a number of bytes; one may be larger if it is alone."""

    most_tables = 512  # those of mapped files take no memory of their own, but keep their file open

    def __init__(self, most: int) -> None:
        self.most = most
        self._bytes = 0
        self._tables: OrderedDict[Hashable, tuple[Rows, int]] = OrderedDict()

    def get(self, key: Hashable, decode: Callable[[], tuple[Rows, int]]) -> Rows:
        """The span under a key. Where it is not held, `decode` gives it and the memory it takes."""
        if key in self._tables:
            self._tables.move_to_end(key)
            return self._tables[key][0]
        rows, size = decode()
        self._tables[key] = rows, size
        self._bytes += size
        while len(self._tables) > 1 and (self._bytes > self.most or len(self._tables) > self.most_tables):
            self._bytes -= self._tables.popitem(last=False)[1][1]
        return rows


class RowReader:
    """Rows of the table files of one process."""

    open_files = 32
    held_bytes = 128 << 20

    def __init__(self, open_table: Callable[[Source, Hashable], ParquetRows | ArrowRows]) -> None:
        self._open_table = open_table
        self._opened: OrderedDict[Hashable, ParquetRows | ArrowRows] = OrderedDict()
        self._held = Held(self.held_bytes)

    def row(self, file: str, plain: Plain, number: int) -> FoundRow | None:
        """One row of a file; None where it has none of that number."""
        if plain.path is None:  # the file may be closed when the next row is asked for
            source = PlainFile(plain)
            return self._open_table(source, (file, source.size())).row(number, self._held)
        state = os.stat(plain.path)  # another file may have the same name by now
        key = (plain.path, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)
        if key not in self._opened:
            self._opened[key] = self._open_table(plain.path, key)
            if len(self._opened) > self.open_files:
                self._opened.popitem(last=False)
        self._opened.move_to_end(key)
        return self._opened[key].row(number, self._held)


def chunk_rows(num_bytes: int, num_rows: int) -> int:
    """How many rows to hold as plain Python at a time: a power of two, so that chunks and units end together."""
    fitting = min(MAX_CHUNK_ROWS, CHUNK * num_rows // max(1, num_bytes))
    return 1 << max(0, fitting.bit_length() - 1)


class ParquetGroups:
    """An open Parquet file by its row groups, which are decoded in batches of a few rows."""

    def __init__(self, source: Source) -> None:
        # Buffered reading, so that a column of a large row group is not loaded at once.
        self.table = pq.ParquetFile(
            source if isinstance(source, str) else arrow_source(source),
            buffer_size=1 << 18,
            pre_buffer=False,
            page_checksum_verification=True,
        )
        groups = [self.table.metadata.row_group(number) for number in range(self.table.metadata.num_row_groups)]
        self.starts = list(accumulate((group.num_rows for group in groups), initial=0))
        self.steps = [chunk_rows(group.total_byte_size, group.num_rows) for group in groups]

    def decode(self, group: int) -> Iterator[pa.RecordBatch]:
        """The rows of a group."""
        return self.table.iter_batches(  # type: ignore[no-any-return]
            batch_size=self.steps[group], row_groups=[group], use_threads=False
        )


class ParquetRows(ParquetGroups):
    """Single rows. A row group can only be decoded as a whole; a large one is then kept on disk."""

    def __init__(self, source: Source, key: Hashable) -> None:
        super().__init__(source)
        self._key = key

    def row(self, number: int, held: Held) -> FoundRow | None:
        """One row; None where the file has none of that number."""
        if not 0 <= number < self.starts[-1]:
            return None
        group = bisect_right(self.starts, number) - 1
        rows = held.get((self._key, group), lambda: self._decode_group(group, held.most))
        return _single_row(rows, number - self.starts[group])

    def _decode_group(self, group: int, most: int) -> tuple[Rows, int]:
        """A row group and the memory it takes; one that is too large is read from disk where it is needed."""
        batches = self.decode(group)
        kept: list[pa.RecordBatch] = []
        size = 0
        for batch in batches:
            kept.append(batch)
            size += batch.nbytes
            if size > most:
                return (_spill(chain(kept, batches), self.table.schema_arrow), True), most
        return (pa.Table.from_batches(kept, self.table.schema_arrow), True), size


class ArrowRows:
    """An open Arrow file of either kind. Batches of a mapped file are where they are, unless they are compressed."""

    def __init__(self, source: Any, key: Hashable) -> None:
        self._source, self._key = source, key
        self._file = source.read(6) == b"ARROW1"
        source.seek(0)
        self._reader = pa.ipc.open_file(source) if self._file else pa.ipc.open_stream(source)
        self._places: list[int] = []  # of the batches of a stream
        self._starts = list(accumulate(_until_fault(self._lengths()), initial=0))

    def row(self, number: int, held: Held) -> FoundRow | None:
        """One row; None where the file has none of that number."""
        if not 0 <= number < self._starts[-1]:
            return None
        at = bisect_right(self._starts, number) - 1
        return _single_row(held.get((self._key, at), lambda: self._decode_group(at)), number - self._starts[at])

    def _lengths(self) -> Iterator[int]:
        """The rows of each batch; one column tells them."""
        schema = self._reader.schema
        narrow = next((at for at, field in enumerate(schema) if pa.types.is_primitive(field.type)), 0)
        options = pa.ipc.IpcReadOptions(included_fields=[narrow]) if len(schema) else None
        self._source.seek(0)
        if self._file:
            reader = pa.ipc.open_file(self._source, options=options)
            yield from (reader.get_batch(number).num_rows for number in range(reader.num_record_batches))
            return
        reader = pa.ipc.open_stream(self._source, options=options)
        while True:
            place = self._source.tell()
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                return
            self._places.append(place)
            yield batch.num_rows

    def _decode_group(self, at: int) -> tuple[Rows, int]:
        before = pa.total_allocated_bytes()
        batch = self._batch(at)
        rows = pa.Table.from_batches([batch]), is_sound(batch)
        return rows, max(0, pa.total_allocated_bytes() - before)  # nothing where it is only mapped

    def _batch(self, at: int) -> pa.RecordBatch:
        if self._file:
            return self._reader.get_batch(at)
        schema = self._reader.schema
        if not any(_has_dictionary(field.type) for field in schema):
            self._source.seek(self._places[at])
            return pa.ipc.read_record_batch(pa.ipc.read_message(self._source), schema)
        self._source.seek(0)  # dictionaries may be anywhere before the batches that need them
        reader = pa.ipc.open_stream(self._source)
        for _ in range(at):
            reader.read_next_batch()
        return reader.read_next_batch()


def arrow_source(source: Source) -> Any:
    """A source for arrow; a local file is memory-mapped."""
    return pa.memory_map(source) if isinstance(source, str) else pa.PythonFile(source, mode="r")


def is_sound(batch: pa.RecordBatch) -> bool:
    """Arrow trusts the offsets in a file; wrong ones would be read beyond the end of memory."""
    try:
        batch.validate(full=True)
    except (pa.ArrowException, ValueError):
        return False
    return True


def plain_bytes(batch: pa.RecordBatch) -> int:
    """Upper bound of a sound batch's size as plain Python, where each row has its own copy of shared values."""
    shared = any(_shares(field.type) for field in batch.schema)
    return int(batch.nbytes) * (batch.num_rows if shared else 1)


def _shares(kind: pa.DataType) -> bool:
    """May several rows of this type share bytes, so that its size says nothing of theirs?"""
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    tests = (
        pa.types.is_dictionary,
        pa.types.is_run_end_encoded,
        pa.types.is_string_view,
        pa.types.is_binary_view,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    return any(test(kind) for test in tests) or any(_shares(kind.field(at).type) for at in range(kind.num_fields))


def _until_fault(lengths: Iterator[int]) -> Iterator[int]:
    """The items before a fault, which were measured; a fault of the system itself is raised."""
    try:
        yield from lengths
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno:
            raise


def _single_row(rows: Rows, row: int) -> FoundRow:
    return rows[0].slice(row, 1).to_batches()[0], rows[1]


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    return pa.types.is_dictionary(kind) or any(_has_dictionary(kind.field(at).type) for at in range(kind.num_fields))


def _spill(batches: Iterator[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Batches mapped from a file that is gone when nobody uses it any more."""
    handle, name = tempfile.mkstemp(prefix="packtrain-rows-")
    try:
        with os.fdopen(handle, "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return pa.ipc.open_stream(pa.memory_map(name)).read_all()
    finally:
        os.unlink(name)
