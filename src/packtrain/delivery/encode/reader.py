"""One record of a measured dataset, at any place: reads its entry, sees that it is the measured one, converts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, NoReturn

from packtrain.core.errors import DataError, RecordError
from packtrain.core.retries import retried
from packtrain.core.values import MediaRef, Record
from packtrain.delivery.encode.row_table import RowTable, SampleRow
from packtrain.measuring.measurer import Converter
from packtrain.measuring.request import Request
from packtrain.records.formats.hf_dataset import in_files
from packtrain.records.media import MediaStore
from packtrain.records.open import read_place
from packtrain.records.source import Entry
from packtrain.records.span import Files, Plain

PAUSES = (0.1, 0.5, 2.0, 8.0)  # seconds before each new attempt after a fault of the disk or the network


class RecordReader:
    """Reads the records of a table's rows. It pickles; every process opens its files for itself."""

    def __init__(self, request: Request, rows: RowTable, files: Files) -> None:
        self._request, self._rows, self._files = request, rows, files

    def record(self, number: int) -> Record:
        """The record of one row, usable for as long as it is wanted.

        DataError where the file cannot be read, or holds something else than was measured.
        """
        with self._found(self._rows.row(number), keep=True) as record:
            return record

    @contextmanager
    def opened(self, number: int) -> Iterator[Record]:
        """As `record`, for the length of a block: media in a cached shard stay there and are not loaded beforehand."""
        with self._found(self._rows.row(number), keep=False) as record:
            yield record

    def store(self, source: int) -> MediaStore:
        """Where the media of one source are."""
        return self._converter.store(source)

    @contextmanager
    def _found(self, row: SampleRow, keep: bool) -> Iterator[Record]:
        with ExitStack() as stack:
            entry = self._entry(row, stack, keep)
            if self._differs(row, entry):
                stack.close()
                if self._renewed(row):  # a copy may have been damaged on its way: the source is asked first
                    entry = self._entry(row, stack, keep)
            yield self._converted(row, entry)

    def _renewed(self, row: SampleRow) -> bool:
        try:
            return in_files(self._request.specs[row.source]) and self._files.renew(self._rows.files[row.file].file)
        except (OSError, RecordError) as error:
            self._unreadable(row, error)

    def _differs(self, row: SampleRow, entry: Entry) -> str:
        """What tells an entry from the measured one; empty where nothing does."""
        if entry.error is not None:
            return str(entry.error)
        return "other text at that position" if entry.check != row.check else ""

    def _entry(self, row: SampleRow, stack: ExitStack, keep: bool) -> Entry:
        """The entry at a row's place, after as many attempts as are worth it; its file stays open with the stack."""
        file = self._rows.files[row.file].file
        inside = in_files(self._request.specs[row.source])

        def read() -> Entry:
            with ExitStack() as attempt:
                plain = attempt.enter_context(self._files.plain(file)) if inside else _Nowhere()
                entry = read_place(self._request.specs, row.source, file, plain, row.at, row.origin)
                entry = _in_memory(entry, plain) if keep and plain.path != file else entry
                stack.push(attempt.pop_all())
                return entry

        try:
            return retried(read, PAUSES)
        except (OSError, RecordError) as error:  # RecordError: a file that is gone, or damaged as a whole
            self._unreadable(row, error)

    def _converted(self, row: SampleRow, entry: Entry) -> Record:
        """The record, if it is the one that was measured."""
        if found := self._differs(row, entry):
            self._changed(row, found)
        try:
            record = self._converter.record(entry, row.source)
        except RecordError as error:
            self._changed(row, str(error))
        if record.id != row.id:
            self._changed(row, f"a record with the id {record.id!r}")
        return record

    def _unreadable(self, row: SampleRow, error: Exception) -> NoReturn:
        raise DataError(
            f"data file {self._rows.files[row.file].file}",
            got=str(error),
            expected=f"sample {row.id} ({row.origin})",
            fix="restore the file, or check its disk or network; then resume",
        ) from error

    def _changed(self, row: SampleRow, found: str) -> NoReturn:
        raise DataError(
            f"data file {self._rows.files[row.file].file} has changed since it was measured",
            got=found,
            expected=f"sample {row.id} ({row.origin})",
            fix="restore the measured file, or measure and pack again",
        )

    @cached_property
    def _converter(self) -> Converter:
        return Converter(self._request)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_converter"}


class _Nowhere:
    """The bytes of a dataset that is in no files of ours to read."""

    path: str | None = None

    def read_at(self, position: int, length: int) -> bytes:
        raise OSError("this dataset has no data files")


def _in_memory(entry: Entry, plain: Plain) -> Entry:
    """Media in a copy of the data file that may soon be gone are taken along; the measured data file itself stays."""
    taken = {
        name: MediaRef(name=ref.name, data=plain.read_at(ref.offset, ref.size)) if ref.archive is not None else ref
        for name, ref in entry.media.items()
    }
    return replace(entry, media=taken)
