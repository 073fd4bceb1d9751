"""The rows of a cost table as delivery needs them, and the reader of the records that they name.

rows-<fingerprint>.arrow   one row for each row of the table, in its order; the list of data files is in its metadata
rows-<fingerprint>.json    size and checksum of that, written after it: without this there are no rows

The file is written once and memory-mapped by every process. A record is read only where its entry is the
measured one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa

from packtrain.core.artifacts import alone, atomic_path, read_json, remove_leftovers, write_json
from packtrain.core.checksums import checks_here, file_sums, require_sums
from packtrain.core.errors import ArtifactError, DataError, RecordError, in_one_line
from packtrain.core.fingerprint import digest, file_state
from packtrain.core.retries import retry
from packtrain.core.values import Record
from packtrain.delivery.encode.encoded_sample import SampleCounts
from packtrain.measuring.measurer import Converter
from packtrain.measuring.request import Request
from packtrain.measuring.table import COSTS, CostTable, DataFile
from packtrain.records.formats.hf_dataset import in_files
from packtrain.records.media import MediaStore
from packtrain.records.open import read_place
from packtrain.records.source import Entry
from packtrain.records.span import Files

KIND, VERSION = "rows", 2
_AGAIN = "delete it (packtrain cache clear --kind rows); it is rebuilt"
ROWS_PER_BATCH = 65_536  # in memory at a time while the file is written
SUMS = "sums"
_FINGERPRINT, _FILES = b"packtrain.fingerprint", b"packtrain.files"
_COPIED = ("tokens", "patches", "supervised_tokens", "images", "videos", "frames")
ROW_SCHEMA = pa.schema(
    [("id", pa.string()), ("origin", pa.string()), ("source", pa.int32()), ("file", pa.int32())]
    + [(name, pa.int64()) for name in ("at", "check", *_COPIED)]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow(SampleCounts):
    """One row: which sample it is, where it is, and what delivering it must come to."""

    id: str
    origin: str
    source: int  # number of its source in the request
    file: int  # number in `RowTable.files`
    at: int
    check: int
    frames: int


class RowTable:
    """The rows of one cost table under one set of limits. It pickles as its path.

    Whoever makes or opens it compares it with its checksum, once for all processes of a node.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, table: CostTable, folder: str | Path) -> RowTable:
        """The rows of a table, written into the folder if they are not there; any number of processes may ask."""
        fingerprint = rows_fingerprint(table)
        path = Path(folder) / f"rows-{fingerprint}.arrow"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not checksum_path(path).exists():
            with alone(path.with_name(f".{path.name}.lock")) as locked:  # without locks each writes the same
                if locked:
                    remove_leftovers(path.parent, (path.name, checksum_path(path).name))
                if not checksum_path(path).exists():
                    _write(table, path, fingerprint)
                    write_json(
                        checksum_path(path), KIND, VERSION, {SUMS: file_sums(path.parent, [path.name])}, checked=True
                    )
        rows = cls(path).verify()
        if rows.fingerprint != fingerprint or len(rows) != len(table):
            got = f"{len(rows):,} rows of {rows.fingerprint}"
            raise ArtifactError(str(path), got=got, expected=f"{len(table):,} rows of {fingerprint}", fix=_AGAIN)
        return rows

    @classmethod
    def open(cls, path: str | Path) -> RowTable:
        """The rows in a file, or in a folder that holds one such file."""
        path = Path(path)
        if path.is_dir():
            paths = sorted(path.glob("rows-*.arrow"))
            if len(paths) != 1:
                names = ", ".join(file.name for file in paths) or "none"
                raise ArtifactError(str(path), got=names, expected="one rows-*.arrow", fix="name the file itself")
            path = paths[0]
        rows = cls(path).verify()
        len(rows)  # so that a file that cannot be used is noticed here
        return rows

    def verify(self) -> RowTable:
        """Return this table after comparing it with its checksum."""
        if checks_here():
            stored = read_json(checksum_path(self.path), KIND, VERSION, checked=True, fix=_AGAIN).get(SUMS)
            sums = stored if isinstance(stored, dict) else {}
            require_sums(self.path.parent, {self.path.name: sums.get(self.path.name)}, fix=_AGAIN)
        return self

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, number: int) -> SampleRow:
        """One row; only its own values are read."""
        if not 0 <= number < len(self):
            raise IndexError(f"row {number} of {len(self)}")
        return SampleRow(**{name: column[number].as_py() for name, column in self._columns.items()})

    def column(self, name: str) -> np.ndarray:
        """One column of numbers."""
        return np.asarray(self._columns[name].to_numpy())

    @property
    def fingerprint(self) -> str:
        """Hash of the measured table and the limits that these rows come from."""
        return str(self._table.schema.metadata[_FINGERPRINT].decode())

    @cached_property
    def files(self) -> tuple[DataFile, ...]:
        """The data files by their number."""
        return tuple(DataFile(*file) for file in json.loads(self._table.schema.metadata[_FILES]))

    @cached_property
    def _table(self) -> pa.Table:
        try:
            table = pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()
            table.validate()
        except (OSError, pa.ArrowException) as error:
            got = in_one_line(error)
            raise ArtifactError(str(self.path), got=got, expected="rows of a cost table", fix=_AGAIN) from None
        if not table.schema.equals(ROW_SCHEMA) or _FILES not in (table.schema.metadata or {}):
            got, expected = ", ".join(table.schema.names), ", ".join(ROW_SCHEMA.names)
            raise ArtifactError(str(self.path), got=got, expected=expected, fix=_AGAIN)
        return table

    @cached_property
    def _columns(self) -> dict[str, Any]:
        return {name: self._table[name] for name in ROW_SCHEMA.names}

    def __reduce__(self) -> tuple[type[RowTable], tuple[Path]]:
        return RowTable, (self.path,)


def checksum_path(path: Path) -> Path:
    """The file beside a file of rows that has its checksum."""
    return path.with_suffix(".json")


def rows_fingerprint(table: CostTable) -> str:
    """A hash of what decides the rows: the measured table itself, the limits on top of it, and where its files lie."""
    state = file_state(table.folder / COSTS)
    return digest([VERSION, state, table.summary.inputs, table.limits.given(), len(table), table.files])


def _write(table: CostTable, path: Path, fingerprint: str) -> None:
    """Write the rows in spans, whole or not at all."""
    schema = ROW_SCHEMA.with_metadata({_FINGERPRINT: fingerprint, _FILES: json.dumps(table.files)})
    sources = np.array([file.source for file in table.files], np.int32)
    names = [name for name in ROW_SCHEMA.names if name != "source"]
    with (
        atomic_path(path) as temporary,
        pa.OSFile(str(temporary), "wb") as file,
        pa.ipc.new_file(file, schema) as writer,
    ):
        for start in range(0, len(table), ROWS_PER_BATCH):
            values = table.rows(names, np.arange(start, min(start + ROWS_PER_BATCH, len(table))))
            values["source"] = sources[values["file"]]
            columns = [pa.array(values[field.name]).cast(field.type) for field in ROW_SCHEMA]
            writer.write_batch(pa.record_batch(columns, schema=schema))


class RecordReader:
    """Reads the records of a table's rows. It pickles; every process opens its files for itself."""

    def __init__(self, request: Request, rows: RowTable, files: Files) -> None:
        self._request, self._rows, self._files = request, rows, files

    @contextmanager
    def open_record(self, number: int) -> Iterator[Record]:
        """The record of one row, whose media can be opened for the length of a block.

        DataError where the file cannot be read, or holds something else than was measured.
        """
        row = self._rows.row(number)
        with ExitStack() as stack:
            entry = self._entry(row, stack)
            if self._difference(row, entry):
                stack.close()
                if self._renew_file(row):  # a copy may have been damaged on its way: the source is asked first
                    entry = self._entry(row, stack)
            yield self._convert(row, entry)

    def store(self, source: int) -> MediaStore:
        """The media store of one source."""
        return self._converter.store(source)

    def _renew_file(self, row: SampleRow) -> bool:
        try:
            return in_files(self._request.specs[row.source]) and self._files.renew(self._rows.files[row.file].file)
        except (OSError, RecordError) as error:
            self._raise_unreadable(row, error)

    def _difference(self, row: SampleRow, entry: Entry) -> str:
        """How an entry differs from the measured one; empty if it does not."""
        if entry.error is not None:
            return str(entry.error)
        return "other text at that position" if entry.check != row.check else ""

    def _entry(self, row: SampleRow, stack: ExitStack) -> Entry:
        """The entry at a row's place, after as many attempts as are worth it; its file stays open with the stack."""
        file = self._rows.files[row.file].file
        inside = in_files(self._request.specs[row.source])

        def read() -> Entry:
            with ExitStack() as attempt:
                plain = attempt.enter_context(self._files.plain(file)) if inside else _NoFile()
                entry = read_place(self._request.specs, row.source, file, plain, row.at, row.origin)
                stack.push(attempt.pop_all())
                return entry

        try:
            return retry(read)
        except (OSError, RecordError) as error:  # RecordError: a file that is gone, or damaged as a whole
            self._raise_unreadable(row, error)

    def _convert(self, row: SampleRow, entry: Entry) -> Record:
        """The record, if it is the one that was measured."""
        if difference := self._difference(row, entry):
            self._raise_changed(row, difference)
        try:
            record = self._converter.record(entry, row.source)
        except RecordError as error:
            self._raise_changed(row, str(error))
        if record.id != row.id:
            self._raise_changed(row, f"a record with the id {record.id!r}")
        return record

    def _raise_unreadable(self, row: SampleRow, error: Exception) -> NoReturn:
        raise DataError(
            f"data file {self._rows.files[row.file].file}",
            got=str(error),
            expected=f"sample {row.id} ({row.origin})",
            fix="restore the file, or check its disk or network; then resume",
        ) from error

    def _raise_changed(self, row: SampleRow, difference: str) -> NoReturn:
        raise DataError(
            f"data file {self._rows.files[row.file].file} has changed since it was measured",
            got=difference,
            expected=f"sample {row.id} ({row.origin})",
            fix="restore the measured file, or measure and pack again",
        )

    @cached_property
    def _converter(self) -> Converter:
        return Converter(self._request)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_converter"}


class _NoFile:
    """Stands in for the file of a dataset without data files."""

    path: str | None = None

    def read_at(self, position: int, length: int) -> bytes:
        raise OSError("this dataset has no data files")
