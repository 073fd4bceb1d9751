"""Packs by name: a key in, the encoded samples of that pack out, in whatever process asks.

Nothing is encoded before it is asked for, and nothing is kept: a pack is a pure function of its key, so it is the same
in any process, in any order, on any rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from packtrain.core.errors import DataError, RecordError
from packtrain.core.retries import Answer, retried
from packtrain.core.values import LedgerEntry, Record
from packtrain.delivery.encode.encoded_sample import EMPTY_PACK, EncodedSample, PackedRow, PackKey
from packtrain.delivery.encode.expected import Expected
from packtrain.delivery.encode.row_table import SampleRow
from packtrain.packing.pack_plan import PackPlan

if TYPE_CHECKING:
    from packtrain.records.media import MediaStore

STAGE = "deliver"  # of ledger entries of samples that were planned and could not be delivered
PAUSES = (0.1, 0.5, 2.0)  # seconds before each new attempt after a fault while media were read


class DeliveryRows(Protocol):
    """The rows of the cost table."""

    def row(self, number: int) -> SampleRow:
        """One row: its id, origin, source and what it was measured to cost."""
        ...


class Reader(Protocol):
    """Reads single records. It must pickle, and a process that is forked must not share open files with its parent."""

    def opened(self, number: int) -> AbstractContextManager[Record]:
        """The record of one row, for the length of a block. DataError where it is not what was measured."""
        ...

    def store(self, source: int) -> MediaStore:
        """Where the media of one source are."""
        ...


class Encoder(Protocol):
    """Encodes single records. It must pickle."""

    def encode(
        self, record: Record, store: MediaStore, *, row: int, expected: Expected | None, start: int, tokens: int
    ) -> EncodedSample:
        """One sample, or a piece of it.

        RecordError: it never can be encoded. DriftError: it is not as long as planned. OSError: it cannot be read now.
        """
        ...


class PackSource:
    """The packs of a plan as a map-style dataset: `source[PackKey(epoch, pack)]` is a PackedRow.

    A sample that can never be decoded is left out, and the row says so. Whatever else goes wrong stops the run.
    """

    def __init__(self, plan: PackPlan, rows: DeliveryRows, reader: Reader, encoder: Encoder) -> None:
        self.plan = plan
        self._rows, self._reader, self._encoder = rows, reader, encoder

    def __len__(self) -> int:
        return self.plan.num_packs

    def __getitem__(self, key: PackKey) -> PackedRow:
        if key.pack == EMPTY_PACK:
            return PackedRow(key=key)
        pack = self.plan.epoch(key.epoch).pack(key.pack)
        samples, failures = [], []
        columns = (pack.rows.tolist(), pack.starts.tolist(), pack.tokens.tolist(), pack.firsts.tolist())
        for number, start, tokens, first in zip(*columns, strict=True):
            row = self._rows.row(number)
            try:
                sample = self._encoded(number, row, start, tokens)
                samples.append(sample if sample.first == first else replace(sample, first=first))
            except RecordError as error:
                self._require_root(row)
                failures.append(_left_out(row, error))
            except Exception as error:
                error.add_note(f"while sample {row.id} of pack {key.pack}, epoch {key.epoch}, was encoded")
                raise
        return PackedRow(key=key, samples=tuple(samples), failures=tuple(failures))

    def data_files(self, keys: Iterable[PackKey]) -> list[str]:
        """The data files that packs are read from, as origins call them."""
        numbers = (
            number
            for key in keys
            if key.pack != EMPTY_PACK
            for number in self.plan.epoch(key.epoch).pack(key.pack).rows.tolist()
        )
        return list(dict.fromkeys(self._rows.row(number).origin.rpartition(":")[0] for number in numbers))

    def warm_up(self) -> None:
        """Load what encoding will need, so that processes forked from this one share it instead of loading it each."""
        media = any(self.plan.epoch(0).load(name).any() for name in ("images", "videos"))
        if media and (warm_up := getattr(self._encoder, "warm_up", None)) is not None:
            warm_up()

    def close(self) -> None:
        """Nothing is needed any more."""

    def _encoded(self, number: int, row: SampleRow, start: int, tokens: int) -> EncodedSample:
        expected = Expected(
            tokens=row.tokens,
            patches=row.patches,
            supervised_tokens=row.supervised_tokens,
            images=row.images,
            videos=row.videos,
        )
        store = self._reader.store(row.source)

        def encode() -> EncodedSample:
            with self._reader.opened(number) as record:
                return self._encoder.encode(record, store, row=number, expected=expected, start=start, tokens=tokens)

        return media_read(encode, row.id, row.origin)

    def _require_root(self, row: SampleRow) -> None:
        """One file may be gone for good; a whole folder that is gone is a disk or a mount that comes back."""
        root = self._reader.store(row.source).root
        if not os.path.isdir(root):
            raise DataError(
                f"sample {row.id} ({row.origin})",
                got=f"the folder of its media, {root}, is not there",
                expected="the folder that was there when the data were measured",
                fix="restore it, or check that its disk is mounted, then resume",
            )

    def __getstate__(self) -> dict[str, Any]:
        """A plan in a folder travels as its path and is memory-mapped where it arrives."""
        state = dict(self.__dict__)
        if self.plan.folder is not None:
            state["plan"] = self.plan.folder
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not isinstance(self.plan, PackPlan):
            self.plan = PackPlan.load(self.plan, checked=False)  # by the process that this one comes from


def _left_out(row: SampleRow, error: RecordError) -> LedgerEntry:
    detail = f"{error.stage}: {error.detail}" if error.detail else error.stage
    return LedgerEntry(id=row.id, origin=row.origin, stage=STAGE, reason=error.reason, detail=detail)


def media_read(read: Callable[[], Answer], id: str, origin: str) -> Answer:
    """What is made of a sample's media, after as many attempts to read them as are worth it."""
    try:
        return retried(read, PAUSES)
    except OSError as error:
        raise DataError(
            f"sample {id} ({origin})",
            got=f"{type(error).__name__}: {error}",
            expected=f"media that can be read; {len(PAUSES) + 1} attempts failed",
            fix="check the disk or network of the media, then resume",
        ) from error
