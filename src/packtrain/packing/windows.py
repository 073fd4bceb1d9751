"""Packing window by window, so that memory stays bounded and sources can be read in order.

At the end of an epoch packs may be left out because the user wants it: those beyond `max_packs`, and with
`packing_drop_last` those that make no whole step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from packtrain.core.seeds import stream
from packtrain.measuring.table import CostTable
from packtrain.packing.arrays import WRAPPED, carry_over, pack_matrix, pack_sums, window_size
from packtrain.packing.cutting import UNLABELLED, Dropped, Filled, fit_pieces, refuse_media, wrap
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import EXTRAS, RESOURCES, Entries, Samples, Tails, samples_of

# Beyond this many rows a window is set even where none was asked for: about 2 GiB of columns.
LARGEST_WINDOW = 1 << 24
MAXIMA = ("longest", "largest_patches")  # of a pack; everything else adds up


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowCounts:
    """What became of the rows of one window; an epoch's counts are their sums."""

    drawn: int  # entries, dropped ones included, those carried over from the window before not
    dropped: int  # of these, in no pack
    unlabelled: int  # of the dropped: pieces in which nothing carries loss
    cut_rows: int  # truncated or split
    tokens_lost: int  # cut off and used nowhere
    supervised_lost: int  # of the rows that were cut
    tokens_drawn: int  # of the rows with their repeats, packed or not


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowPacks:
    """The packs of one window: pack i holds entries `offsets[i]` to `offsets[i + 1]`."""

    entries: Entries
    offsets: np.ndarray
    loads: dict[str, np.ndarray]
    rows: int  # of the cost table, in this window
    counts: WindowCounts
    dropped: tuple[Dropped, ...]  # rows, or pieces of them, that no epoch can pack
    left_out: tuple[Dropped, ...] = ()  # pieces that this epoch alone leaves out, each with its repeats

    @property
    def num_packs(self) -> int:
        """How many packs there are."""
        return len(self.offsets) - 1


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
        self._whole = samples_of(table) if len(table) <= LARGEST_WINDOW else None

    def __len__(self) -> int:
        return len(self._table)

    def read(self, start: int, stop: int) -> tuple[Samples, Tails]:
        if self._whole is None:
            return samples_of(self._table, start, stop)
        samples, tails = self._whole
        if (start, stop) == (0, len(tails)):
            return samples, tails
        return samples.part(start, stop), tails.part(start, stop)


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
        fresh = _repeat(replace(pieces.entries, rows=pieces.entries.rows + start), start, repeats)
        seed = int(stream(config.seed, "pack", epoch, start).integers(2**62)) if config.shuffle else None
        last, before = number == len(starts) - 1, carried
        if strategy == WRAPPED:
            refuse_media(samples, start)
            length = config.packing_length
            filled = wrap(fresh, before, (samples, tails), start=start, length=length, seed=seed, last=last)
        else:
            whole = fresh if before is None else before + fresh
            filled = _pack(whole, config, strategy, seed, 0 if last else size)
        carried = filled.carried
        times = np.ones(len(pieces.dropped), np.int64)
        if repeats is not None:
            times = repeats[np.array([one.row for one in pieces.dropped], np.int64)]
        dropped = int(times.sum()) + len(filled.left_out)
        unlabelled = int(times[[one.reason == UNLABELLED for one in pieces.dropped]].sum()) + len(filled.left_out)
        packed = len(filled.entries) + (len(carried) if carried else 0) - (len(before) if before else 0)
        yield WindowPacks(
            entries=filled.entries,
            offsets=filled.offsets,
            loads=loads_of(filled.entries.samples, filled.offsets),
            rows=stop - start,
            counts=WindowCounts(
                drawn=packed + dropped,
                dropped=dropped,
                unlabelled=unlabelled,
                cut_rows=pieces.cut_rows + filled.cut_rows,
                tokens_lost=pieces.tokens_lost,
                supervised_lost=pieces.supervised_lost + filled.supervised_lost,
                tokens_drawn=int(samples["tokens"].sum() if repeats is None else samples["tokens"] @ repeats),
            ),
            dropped=tuple(replace(one, row=one.row + start) for one in pieces.dropped),
            left_out=filled.left_out,
        )


def rows_that_fit(source: RowSource, config: PackingConfig) -> np.ndarray:
    """Of which rows something goes into packs."""
    fits = np.zeros(len(source), bool)
    for start in range(0, len(source), LARGEST_WINDOW):
        samples, tails = source.read(start, min(start + LARGEST_WINDOW, len(source)))
        fits[fit_pieces(samples, tails, config).entries.rows + start] = True
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


def _pack(entries: Entries, config: PackingConfig, strategy: str, seed: int | None, window: int) -> Filled:
    """Pack whole entries; without a next `window` (0) nothing is carried over."""
    capacities = config.capacities()
    sizes = entries.samples.matrix(tuple(capacities))
    sizes[:, 0] = config.aligned(sizes[:, 0])  # tokens come first
    limits = np.array(list(capacities.values()), np.int64)
    (order, offsets), back = pack_matrix(sizes, limits, strategy, seed, config.effort), np.zeros(0, np.int64)
    if window:
        ratio = config.packing_min_fill_ratio
        (order, offsets), back = carry_over(sizes, limits, (order, offsets), strategy, window=window, ratio=ratio)
    carried = entries.take(back) if len(back) else None
    return Filled(entries=entries.take(order), offsets=offsets, carried=carried)


def _repeat(entries: Entries, start: int, repeats: np.ndarray | None) -> Entries:
    """The entries as often as their rows are used."""
    if repeats is None:
        return entries
    return entries.take(np.repeat(np.arange(len(entries)), repeats[entries.rows - start]))


# ---- the end of an epoch


@dataclass(slots=True)
class Tail:
    """What was left out at the end of an epoch."""

    config: PackingConfig
    rows: list[int] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)  # of packs after the first `max_packs`

    def __len__(self) -> int:
        """Entries."""
        return len(self.rows) + len(self.beyond)


def first_packs(windows: Iterator[WindowPacks], tail: Tail, epoch: int) -> Iterator[WindowPacks]:
    """The first `max_packs`; of the window in which they end a random draw, since its packs are sorted by length."""
    config, taken = tail.config, 0
    for window in windows:
        if config.max_packs is None or taken + window.num_packs <= config.max_packs:
            taken += window.num_packs
            yield window
            continue
        drop = np.ones(window.num_packs, bool)
        order = np.arange(window.num_packs)
        if config.shuffle:
            order = stream(config.seed, "max_packs", epoch if config.repack_each_epoch else 0).permutation(order)
        drop[order[: config.max_packs - taken]] = False
        taken = config.max_packs
        yield _without(window, drop, tail.beyond)


def without_tail(windows: Iterator[WindowPacks], tail: Tail) -> Iterator[WindowPacks]:
    """The windows of an epoch; with `packing_drop_last` the emptiest packs of the last ones go to the tail.

    Left out are the packs below `packing_min_fill_ratio` of the last window, then as many as do not make a whole step.
    """
    config = tail.config
    if not config.packing_drop_last:
        yield from windows
        return
    held: list[WindowPacks] = []
    packs = 0
    for window in windows:
        held.append(window)
        packs += window.num_packs
        # The last window may be left out whole: without it and the first, a step's worth must still be held.
        while sum(one.num_packs for one in held[1:-1]) >= config.packs_per_step:
            yield held.pop(0)
    if not held:
        return
    fill = np.concatenate([fill_ratio(window.loads, config.capacities()) for window in held])
    ranked = np.argsort(fill, kind="stable")
    last = np.arange(len(fill)) >= len(fill) - held[-1].num_packs
    underfilled = int((last & (fill < config.packing_min_fill_ratio)).sum())
    spare = (packs - underfilled) % config.packs_per_step
    drop = np.zeros(len(fill), bool)
    drop[ranked[last[ranked]][:underfilled]] = True
    remaining = ranked[~drop[ranked]]
    drop[remaining[:spare]] = True
    at = 0
    for window in held:
        part = drop[at : at + window.num_packs]
        at += len(part)
        yield _without(window, part, tail.rows)


def _without(window: WindowPacks, drop: np.ndarray, gone_rows: list[int]) -> WindowPacks:
    """The window without some of its packs, whose rows go to `gone_rows`."""
    if not drop.any():
        return window
    lengths = np.diff(window.offsets)
    gone = np.repeat(drop, lengths)
    gone_rows.extend(window.entries.rows[gone].tolist())
    entries = window.entries.take(np.flatnonzero(~gone))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[~drop])])
    return replace(window, entries=entries, offsets=offsets, loads=loads_of(entries.samples, offsets))
