"""How often each row of a mixture is used in one epoch, from the repeats and weights of its sources."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from packtrain.core.errors import ConfigError
from packtrain.core.seeds import stream
from packtrain.measuring.table import CostTable, SourceCodes


@dataclass(frozen=True, slots=True, eq=False)
class Draw:
    """How many times the rows of every source are used in one epoch, among those that packs can hold."""

    repeats: Mapping[str, float]
    sources: SourceCodes
    fits: np.ndarray = field(repr=False)

    def counts(self, seed: int, epoch: int) -> np.ndarray:
        """How often each row is used; one that fits no pack counts once, as the ledger has it.

        A fraction of a repeat is a part of the source: each epoch takes the next one, in an order drawn by the seed,
        so that every row is used before any is used again.
        """
        times = np.ones(len(self.sources.codes), np.int64)
        for code, name in enumerate(self.sources.names):
            rows = np.flatnonzero((self.sources.codes == code) & self.fits)
            whole = math.floor(self.repeats[name])
            times[rows] = whole
            part = round((self.repeats[name] - whole) * len(rows))
            if part:
                order = stream(seed, "draw", 0, name).permutation(rows)
                times[order[(epoch * part + np.arange(part)) % len(rows)]] += 1
        return times


def is_mixed(table: CostTable) -> bool:
    """Is some source used other than once?"""
    return any((share.get("repeats") or 1) != 1 or share.get("weight") for share in mixture_of(table).values())


def draw_of(mixture: Mapping[str, Mapping[str, float | None]], sources: SourceCodes, fits: np.ndarray) -> Draw:
    """Repeats as the mixture gives them; a weight is the source's share of all samples that go into packs.

    Sources without a weight keep their rows, times their repeats, and share what the weights leave over. If every
    source has a weight, an epoch has as many samples as there are rows that packs can hold.
    """
    rows = {name: int(((sources.codes == code) & fits).sum()) for code, name in enumerate(sources.names)}
    given = {name: mixture.get(name, {}) for name in rows}
    weights = {name: weight for name, share in given.items() if (weight := share.get("weight")) and rows[name]}
    fixed = {name: given[name].get("repeats") or 1.0 for name in rows if name not in weights}
    kept = [name for name in fixed if rows[name]]  # those of which nothing fits have no share
    check_weights({**weights, **dict.fromkeys(kept)})
    total_weight = math.fsum(weights.values())
    if not kept:
        entries = float(sum(rows.values()))
    else:
        entries = sum(rows[name] * repeats for name, repeats in fixed.items()) / (1 - total_weight)
        total_weight = 1.0
    shares = {name: weight / total_weight * entries / rows[name] for name, weight in weights.items()}
    return Draw(fixed | shares, sources, fits)


def check_weights(given: Mapping[str, float | None]) -> None:
    """Refuse weights of sources that leave nothing for those without one."""
    total, bare = math.fsum(weight for weight in given.values() if weight), [name for name in given if not given[name]]
    if bare and total >= 1:
        raise ConfigError(
            "weight",
            got=f"weights that sum to {total:g}, and sources without one ({', '.join(bare)})",
            expected="a sum below 1: a weight is a share of all samples",
            fix="give every source a weight, or use smaller weights",
        )


def draw_of_table(table: CostTable, fits: np.ndarray) -> Draw:
    """The draw of a whole table."""
    return draw_of(mixture_of(table), table.source_codes(), fits)


def mixture_of(table: CostTable) -> Mapping[str, Mapping[str, float | None]]:
    """The shares of the sources of a table."""
    return table.summary.mixture or {}
