"""Packs that an epoch leaves out because the user wants it: beyond `max_packs`, and those that make no whole step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from packtrain.core.seeds import stream
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.windows import WindowPacks, fill_ratio, loads_of


@dataclass(slots=True)
class Tail:
    """What was left out at the end of an epoch."""

    config: PackingConfig
    rows: list[int] = field(default_factory=list)
    beyond: list[int] = field(default_factory=list)  # of packs after the first `max_packs`

    def __len__(self) -> int:
        """Entries."""
        return len(self.rows) + len(self.beyond)


def kept_packs(windows: Iterator[WindowPacks], tail: Tail, epoch: int) -> Iterator[WindowPacks]:
    """The windows of an epoch with the packs that are trained; `tail` takes the rows of the others."""
    return without_tail(first_packs(windows, tail, epoch), tail)


def first_packs(windows: Iterator[WindowPacks], tail: Tail, epoch: int) -> Iterator[WindowPacks]:
    """The first `max_packs`. Of the window in which they end those drawn by the seed: packs stand by length in it."""
    config, taken = tail.config, 0
    for window in windows:
        packs = _count(window)
        if config.max_packs is None or taken + packs <= config.max_packs:
            taken += packs
            yield window
            continue
        drop = np.ones(packs, bool)
        order = np.arange(packs)
        if config.shuffle:
            order = stream(config.seed, "max_packs", epoch if config.repack_each_epoch else 0).permutation(packs)
        drop[order[: config.max_packs - taken]] = False
        taken = config.max_packs
        yield _left_out(window, drop, tail.beyond)


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
        packs += _count(window)
        # The last window may be left out whole: without it and the first, a step's worth must still be held.
        while sum(map(_count, held[1:-1])) >= config.packs_per_step:
            yield held.pop(0)
    if not held:
        return
    fill = np.concatenate([fill_ratio(window.loads, config.capacities()) for window in held])
    ranked = np.argsort(fill, kind="stable")
    last = np.arange(len(fill)) >= len(fill) - _count(held[-1])
    underfilled = int((last & (fill < config.packing_min_fill_ratio)).sum())
    spare = (packs - underfilled) % config.packs_per_step
    drop = np.zeros(len(fill), bool)
    drop[ranked[last[ranked]][:underfilled]] = True
    remaining = ranked[~drop[ranked]]
    drop[remaining[:spare]] = True
    at = 0
    for window in held:
        part = drop[at : at + _count(window)]
        at += len(part)
        yield _left_out(window, part, tail.rows)


def _count(window: WindowPacks) -> int:
    return len(window.offsets) - 1


def _left_out(window: WindowPacks, drop: np.ndarray, gone_rows: list[int]) -> WindowPacks:
    if not drop.any():
        return window
    lengths = np.diff(window.offsets)
    gone = np.repeat(drop, lengths)
    gone_rows.extend(window.entries.rows[gone].tolist())
    entries = window.entries.take(np.flatnonzero(~gone))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[~drop])])
    return replace(window, entries=entries, offsets=offsets, loads=loads_of(entries.samples, offsets))
