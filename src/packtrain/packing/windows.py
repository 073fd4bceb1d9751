"""Packing window by window, so that memory stays bounded and sources can be read in order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from packtrain.core.seeds import stream
from packtrain.measuring.table import CostTable
from packtrain.packing.arrays import WRAPPED, carry_over, pack_matrix, pack_sums, window_size
from packtrain.packing.overlong import UNLABELLED, Dropped, fit_pieces
from packtrain.packing.pack_entries import Entries
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import EXTRAS, RESOURCES, Samples, Tails, samples_of
from packtrain.packing.wrapped import refuse_media, wrap

# Beyond this many rows a window is set even where none was asked for: about 2 GiB of columns.
LARGEST_WINDOW = 1 << 24
MAXIMA = ("longest", "largest_patches")  # of a pack; everything else adds up


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowPacks:
    """The packs of one window: pack i holds entries `offsets[i]` to `offsets[i + 1]`."""

    entries: Entries
    offsets: np.ndarray
    loads: dict[str, np.ndarray]
    dropped: tuple[Dropped, ...]  # rows, or pieces of them, that are in no pack
    dropped_entries: int  # the same with their repeats
    unlabelled: int  # of them: pieces in which nothing carries loss
    drawn: int  # entries of this window, dropped ones included, those carried over not
    rows: int  # of the cost table, in this window
    cut_rows: int  # rows that were truncated or split
    tokens_lost: int  # cut off and used nowhere
    supervised_lost: int  # of the rows that were cut
    tokens_drawn: int  # of its rows with their repeats, packed or not
    left_out: tuple[Dropped, ...] = ()  # pieces that this epoch alone leaves out, each with its repeats


class RowSource(Protocol):
    """Rows of a cost table, read by range."""

    def __len__(self) -> int: ...

    def read(self, start: int, stop: int) -> tuple[Samples, Tails]:
        """Costs and tails of rows `start` to `stop`."""
        ...


class TableRows:
    """The rows of a cost table; a table that fits one window is read once and kept."""

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._whole = self._load(0, len(table)) if len(table) <= LARGEST_WINDOW else None

    def __len__(self) -> int:
        return len(self._table)

    def read(self, start: int, stop: int) -> tuple[Samples, Tails]:
        if self._whole is None:
            return self._load(start, stop)
        samples, tails = self._whole
        if (start, stop) == (0, len(tails)):
            return samples, tails
        return Samples({name: column[start:stop] for name, column in samples.columns.items()}), tails.part(start, stop)

    def _load(self, start: int, stop: int) -> tuple[Samples, Tails]:
        return samples_of(self._table, start, stop)


def pack_windows(
    source: RowSource, config: PackingConfig, epoch: int, counts: np.ndarray | None
) -> Iterator[WindowPacks]:
    """The packs of one epoch, window by window, in the order in which windows are to be read."""
    epoch = epoch if config.repack_each_epoch else 0
    size = window_size(config.packing_strategy) or config.packing_window or LARGEST_WINDOW
    strategy = "best_fit" if window_size(config.packing_strategy) else config.packing_strategy
    starts = np.arange(0, len(source), size)
    if config.shuffle:
        starts = stream(config.seed, "windows", epoch).permutation(starts)
    carried: Entries | None = None
    for number, start in enumerate(starts.tolist()):
        stop = min(start + size, len(source))
        samples, tails = source.read(start, stop)
        pieces = fit_pieces(samples, tails, config)
        repeats = counts[start:stop] if counts is not None else None
        fresh = _repeated(
            Entries(rows=pieces.rows + start, starts=pieces.starts, firsts=pieces.firsts, samples=pieces.samples),
            start,
            repeats,
        )
        dropped = np.array([one.row for one in pieces.dropped], np.int64)
        weights = np.ones(len(dropped), np.int64) if repeats is None else repeats[dropped]
        times = int(weights.sum())
        seed = int(stream(config.seed, "pack", epoch, start).integers(2**62)) if config.shuffle else None
        last = number == len(starts) - 1
        open_before = 0 if carried is None else len(carried)
        wrapped = None
        if strategy == WRAPPED:
            refuse_media(samples, start)
            length = config.packing_length
            wrapped = wrap(fresh, carried, (samples, tails), start=start, length=length, seed=seed, last=last)
            entries, offsets, carried = wrapped.entries, wrapped.offsets, wrapped.open
        else:
            entries = fresh if carried is None else carried + fresh
            order, offsets, back = _packed(entries, config, strategy, seed, 0 if last else size)
            carried = entries.take(back) if len(back) else None
            entries = entries.take(order)
        left_out = () if wrapped is None else wrapped.left_out
        made = len(entries) + (0 if carried is None else len(carried)) - open_before  # from the rows of this window
        yield WindowPacks(
            entries=entries,
            offsets=offsets,
            loads=loads_of(entries.samples, offsets),
            dropped=tuple(replace(one, row=one.row + start) for one in pieces.dropped),
            dropped_entries=times + len(left_out),
            unlabelled=int(weights[[one.reason == UNLABELLED for one in pieces.dropped]].sum()) + len(left_out),
            drawn=made + times + len(left_out),
            rows=stop - start,
            cut_rows=pieces.cut_rows + (0 if wrapped is None else wrapped.cut_entries),
            tokens_lost=pieces.tokens_lost,
            supervised_lost=pieces.supervised_lost + (0 if wrapped is None else wrapped.supervised_lost),
            tokens_drawn=int(samples["tokens"].sum() if repeats is None else samples["tokens"] @ repeats),
            left_out=left_out,
        )


def rows_that_fit(source: RowSource, config: PackingConfig) -> np.ndarray:
    """Of which rows something goes into packs."""
    fits = np.zeros(len(source), bool)
    for start in range(0, len(source), LARGEST_WINDOW):
        samples, tails = source.read(start, min(start + LARGEST_WINDOW, len(source)))
        fits[fit_pieces(samples, tails, config).rows + start] = True
    return fits


def loads_of(samples: Samples, offsets: np.ndarray) -> dict[str, np.ndarray]:
    """What every pack holds."""
    if len(offsets) < 2:
        return {name: np.zeros(0, np.int64) for name in (*RESOURCES, *EXTRAS)}
    return {
        name: np.maximum.reduceat(samples[name], offsets[:-1]) if name in MAXIMA else pack_sums(samples[name], offsets)
        for name in (*RESOURCES, *EXTRAS)
    }


def fill_ratio(loads: dict[str, np.ndarray], capacities: dict[str, int]) -> np.ndarray:
    """How full packs are: the share of the limit that is used most."""
    return np.max([loads[name] / limit for name, limit in capacities.items()], axis=0)


def _packed(
    entries: Entries, config: PackingConfig, strategy: str, seed: int | None, window: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Order and offsets of the packs, and what is left over for the next window; 0: there is none."""
    capacities = config.capacities()
    sizes = entries.samples.matrix(tuple(capacities))
    sizes[:, 0] = config.aligned(sizes[:, 0])  # tokens come first
    limits = np.array(list(capacities.values()), np.int64)
    packs, back = pack_matrix(sizes, limits, strategy, seed, config.effort), np.zeros(0, np.int64)
    if window:
        ratio = config.packing_min_fill_ratio
        packs, back = carry_over(sizes, limits, packs, strategy, window=window, ratio=ratio)
    return *packs, back


def _repeated(entries: Entries, start: int, repeats: np.ndarray | None) -> Entries:
    """The entries as often as their rows are used."""
    if repeats is None:
        return entries
    return entries.take(np.repeat(np.arange(len(entries)), repeats[entries.rows - start]))
