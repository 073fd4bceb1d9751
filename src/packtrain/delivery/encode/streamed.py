"""Packs read through a cache of data files, window by window: what a step and the next window need is kept there."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from packtrain.delivery.encode.encoded_sample import EMPTY_PACK, PackedRow, PackKey
from packtrain.delivery.encode.pack_source import Encoder, PackSource, Reader
from packtrain.delivery.encode.row_table import RowTable
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.schedule import Schedule


class Wanted(Protocol):
    """Where data files are read from. It must pickle, and a forked process begins with nothing declared."""

    def want(self, files: Sequence[str]) -> None:
        """Declare what this process needs now and next, in order; what was declared before and is left out is done."""
        ...


class StreamedSource(PackSource):
    """The same packs. Each process says which data files its current step and the window after it need.

    A step may hold packs of two windows; both stay until the step is over.
    """

    def __init__(
        self, plan: PackPlan, rows: RowTable, reader: Reader, encoder: Encoder, *, files: Wanted, schedule: Schedule
    ) -> None:
        super().__init__(plan, rows, reader, encoder)
        self._table, self._files = rows, files
        self._order = (schedule.packs_per_step, schedule.seed, schedule.balance)
        self._forget()

    def _forget(self) -> None:
        self._schedule: Schedule | None = None
        self._windows: tuple[int, np.ndarray] = (-1, np.zeros(0))  # of the packs of one epoch
        self._step: tuple[int, int, int] | None = None  # process, epoch and step of which the files are declared
        self._declared: tuple[int, int, int, int] | None = None  # process, epoch, first and last window

    def __getitem__(self, key: PackKey) -> PackedRow:
        self._declare(key)
        return super().__getitem__(key)

    def close(self) -> None:
        """Nothing is needed any more."""
        self._files.want([])
        self._step = self._declared = None

    def _declare(self, key: PackKey) -> None:
        if key.step < 0 and key.pack == EMPTY_PACK:
            return
        at = (os.getpid(), key.epoch, key.step)
        if key.step >= 0 and at == self._step:
            return
        self._step = at
        windows = self._windows_of(key.epoch)
        mine = windows[self._packs_of(key)]
        span = (os.getpid(), key.epoch, int(mine.min()), int(mine.max()))
        if span != self._declared:
            self._declared = span
            self._files.want(self._needed(*span[1:]))

    def _packs_of(self, key: PackKey) -> np.ndarray:
        """The packs of the step that a key stands in; the pack alone outside a schedule."""
        if key.step < 0:
            return np.array([key.pack])
        if self._schedule is None:
            size, seed, balance = self._order
            self._schedule = Schedule(self.plan, packs_per_step=size, seed=seed, balance=balance)
        return self._schedule.step(key.epoch, key.step)

    def _needed(self, epoch: int, first: int, last: int) -> list[str]:
        """The files of these windows, then those of the next."""
        found = [file for window in range(first, last + 1) for file in self._files_of(epoch, window)]
        if last < int(self._windows_of(epoch).max()):
            found += self._files_of(epoch, last + 1)
        elif epoch + 1 < self.plan.num_epochs and self.plan.epoch(epoch + 1).num_packs:
            found += self._files_of(epoch + 1, 0)
        return list(dict.fromkeys(found))

    def _files_of(self, epoch: int, window: int) -> list[str]:
        """The data files that the packs of one window are read from."""
        packs = np.flatnonzero(self.plan.epoch(epoch).load("window") == window)
        if not len(packs):
            return []
        content = self.plan.epoch(epoch)  # packs of a window stand side by side
        rows = content.rows[content.offsets[packs[0]] : content.offsets[packs[-1] + 1]]
        numbers = np.unique(self._table.column("file")[rows])
        return [self._table.files[number].file for number in numbers.tolist()]

    def _windows_of(self, epoch: int) -> np.ndarray:
        if self._windows[0] != epoch:
            self._windows = (epoch, self.plan.epoch(epoch).load("window"))
        return self._windows[1]

    def __getstate__(self) -> dict[str, Any]:
        """What was worked out stays behind."""
        kept = super().__getstate__()
        for name in ("_schedule", "_windows", "_step", "_declared"):
            del kept[name]
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
