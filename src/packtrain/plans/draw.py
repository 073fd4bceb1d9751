"""How often each row of a mixture is used in one epoch, from the repeats and weights of its sources."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from packtrain.core.errors import ConfigError
from packtrain.core.seeds import stream
from packtrain.costs.table import CostTable, SourceCodes


@dataclass(frozen=True, slots=True)
class Draw:
    """How many times every source is used in one epoch."""

    repeats: Mapping[str, float]

    @property
    def plain(self) -> bool:
        """Is every row used exactly once?"""
        return all(value == 1 for value in self.repeats.values())

    def counts(self, sources: SourceCodes, seed: int, epoch: int) -> np.ndarray:
        """How often each row is used. A fraction of a repeat is a random part of the source, new in each epoch."""
        found = np.ones(len(sources.codes), np.int64)
        for code, name in enumerate(sources.names):
            rows = np.flatnonzero(sources.codes == code)
            whole = math.floor(self.repeats[name])
            found[rows] = whole
            part = round((self.repeats[name] - whole) * len(rows))
            found[stream(seed, "draw", epoch, name).permutation(rows)[:part]] += 1
        return found


def draw_of(table: CostTable) -> Draw:
    """Repeats as the mixture gives them; a weight is the source's share of all entries.

    Sources without a weight keep their rows, times their repeats, and share what the weights leave over. If every
    source has a weight, an epoch has as many entries as the table has rows.
    """
    mixture = table.summary.get("mixture") or {}
    given = {name: share for name, share in mixture.items() if share.get("repeats") or share.get("weight")}
    if not given:
        return Draw(dict.fromkeys(mixture, 1.0))
    sources = table.source_codes()
    rows = {name: int((sources.codes == code).sum()) for code, name in enumerate(sources.names)}
    weights = {name: share["weight"] for name, share in given.items() if share.get("weight") and rows.get(name)}
    fixed = {name: (given.get(name, {}).get("repeats") or 1.0) for name in rows if name not in weights}
    total_weight = math.fsum(weights.values())
    if not fixed:
        entries = float(sum(rows.values()))
    elif total_weight < 1:
        entries = sum(rows[name] * repeats for name, repeats in fixed.items()) / (1 - total_weight)
        total_weight = 1.0
    else:
        raise ConfigError(
            "weight",
            got=f"weights that add up to {total_weight:g} beside sources without one ({', '.join(fixed)})",
            expected="less than 1, since a weight is a share of all entries",
            fix="give every source a weight, or make the weights smaller",
        )
    return Draw(fixed | {name: weight / total_weight * entries / rows[name] for name, weight in weights.items()})
