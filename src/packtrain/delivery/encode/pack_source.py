"""Packs by name: a key in, the encoded samples of that pack out, in whatever process asks.

Nothing is encoded before it is asked for, and nothing is kept: a pack is a pure function of its key, so it is the same
in any process, in any order, on any rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from packtrain.core.errors import DataError, RecordError
from packtrain.core.retries import PAUSES, Answer, retry
from packtrain.core.values import LedgerEntry, Record
from packtrain.delivery.encode.encoded_sample import EncodedSample, PackedRow, PackKey
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.schedule import EMPTY_PACK, Schedule

if TYPE_CHECKING:
    from packtrain.delivery.encode.encoded_sample import SampleCounts
    from packtrain.delivery.encode.row_table import RecordReader, RowTable, SampleRow
    from packtrain.records.media import MediaStore
    from packtrain.records.shards.data_files import LocalFiles


STAGE = "deliver"  # of ledger entries of samples that were planned and could not be delivered


class Encoder(Protocol):
    """Encodes single records. It must pickle."""

    def encode(
        self, record: Record, store: MediaStore, *, row: int, expected: SampleCounts | None, start: int, tokens: int
    ) -> EncodedSample:
        """One sample, or a piece of it.

        RecordError: it never can be encoded. DriftError: it is not as long as planned. OSError: it cannot be read now.
        """
        ...


class PackSource:
    """The packs of a plan as a map-style dataset: `source[PackKey(epoch, pack)]` is a PackedRow.

    A sample that can never be decoded is left out, and the row says so. Whatever else goes wrong stops the run.
    """

    def __init__(self, plan: PackPlan, rows: RowTable, reader: RecordReader, encoder: Encoder) -> None:
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
                sample = self._encode_sample(number, row, start, tokens)
                samples.append(sample if sample.first == first else replace(sample, first=first))
            except RecordError as error:
                self._require_root(row)
                failures.append(delivery_failure(row.id, row.origin, error))
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
        """No more packs will be asked for."""

    def _encode_sample(self, number: int, row: SampleRow, start: int, tokens: int) -> EncodedSample:
        store = self._reader.store(row.source)

        def encode() -> EncodedSample:
            with self._reader.open_record(number) as record:
                return self._encoder.encode(record, store, row=number, expected=row, start=start, tokens=tokens)

        return read_media(encode, row.id, row.origin)

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


def delivery_failure(id: str, origin: str, error: RecordError) -> LedgerEntry:
    """A sample that was planned and could not be delivered."""
    detail = f"{error.stage}: {error.detail}" if error.detail else error.stage
    return LedgerEntry(id=id, origin=origin, stage=STAGE, reason=error.reason, detail=detail)


def read_media(read: Callable[[], Answer], id: str, origin: str) -> Answer:
    """Call `read`, with a few more attempts if media cannot be read."""
    try:
        return retry(read)
    except OSError as error:
        raise DataError(
            f"sample {id} ({origin})",
            got=f"{type(error).__name__}: {error}",
            expected=f"media that can be read; {len(PAUSES) + 1} attempts failed",
            fix="check the disk or network of the media, then resume",
        ) from error


class StreamedSource(PackSource):
    """The same packs, read through a cache of data files.

    Each process tells the cache which files its current step and the window after it need. A step may hold packs of two
    windows; both stay until the step is over.
    """

    def __init__(
        self,
        plan: PackPlan,
        rows: RowTable,
        reader: RecordReader,
        encoder: Encoder,
        *,
        files: LocalFiles,
        schedule: Schedule,
    ) -> None:
        super().__init__(plan, rows, reader, encoder)
        self._files = files
        self._order = (schedule.packs_per_step, schedule.seed, schedule.balance)
        self._forget()

    def _forget(self) -> None:
        self._schedule: Schedule | None = None
        self._step: tuple[int, int, int] | None = None  # process, epoch and step of which the files are declared
        self._declared: tuple[int, int, int, int] | None = None  # process, epoch, first and last window

    def __getitem__(self, key: PackKey) -> PackedRow:
        if key.step >= 0 or key.pack != EMPTY_PACK:
            self._declare(key)
        return super().__getitem__(key)

    def close(self) -> None:
        """No more packs will be asked for."""
        self._files.want([])
        self._step = self._declared = None

    def _declare(self, key: PackKey) -> None:
        step = (os.getpid(), key.epoch, key.step)
        if key.step >= 0 and step == self._step:
            return
        self._step = step
        windows = self.plan.epoch(key.epoch).load("window")[self._packs_of_step(key)]
        span = (os.getpid(), key.epoch, int(windows.min()), int(windows.max()))
        if span != self._declared:
            self._declared = span
            self._files.want(self._files_of_windows(*span[1:]))

    def _packs_of_step(self, key: PackKey) -> np.ndarray:
        """All packs of a key's step; the pack alone outside a schedule."""
        if key.step < 0:
            return np.array([key.pack])
        if self._schedule is None:
            size, seed, balance = self._order
            self._schedule = Schedule(self.plan, packs_per_step=size, seed=seed, balance=balance)
        return self._schedule.step(key.epoch, key.step)

    def _files_of_windows(self, epoch: int, first: int, last: int) -> list[str]:
        """The files of these windows, then those of the next."""
        windows = [(epoch, window) for window in range(first, last + 1)]
        if last < int(self.plan.epoch(epoch).load("window").max()):
            windows.append((epoch, last + 1))
        elif epoch + 1 < self.plan.num_epochs and self.plan.epoch(epoch + 1).num_packs:
            windows.append((epoch + 1, 0))
        return list(dict.fromkeys(file for window in windows for file in self._files_of_window(*window)))

    def _files_of_window(self, epoch: int, window: int) -> list[str]:
        """The data files that the packs of one window are read from."""
        content = self.plan.epoch(epoch)
        packs = np.flatnonzero(content.load("window") == window)
        if not len(packs):
            return []
        rows = content.rows[content.offsets[packs[0]] : content.offsets[packs[-1] + 1]]  # a window's packs are adjacent
        numbers = np.unique(self._rows.column("file")[rows])
        return [self._rows.files[number].file for number in numbers.tolist()]

    def __getstate__(self) -> dict[str, Any]:
        """Without the schedule and what this process has declared."""
        own = ("_schedule", "_step", "_declared")
        return {name: value for name, value in super().__getstate__().items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
