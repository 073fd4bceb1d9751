"""The packs that do not make a whole step, where the user wants them left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from packtrain.plans.config import PackingConfig
from packtrain.plans.windows import WindowPacks, fill_ratio, loads_of


@dataclass(slots=True)
class Tail:
    """What was left out at the end of an epoch."""

    config: PackingConfig
    rows: list[int] = field(default_factory=list)


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
        yield _left_out(window, part, tail)


def _count(window: WindowPacks) -> int:
    return len(window.offsets) - 1


def _left_out(window: WindowPacks, drop: np.ndarray, tail: Tail) -> WindowPacks:
    if not drop.any():
        return window
    lengths = np.diff(window.offsets)
    gone = np.repeat(drop, lengths)
    tail.rows.extend(window.entries.rows[gone].tolist())
    entries = window.entries.take(np.flatnonzero(~gone))
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[~drop])])
    return replace(window, entries=entries, offsets=offsets, loads=loads_of(entries.samples, offsets))
