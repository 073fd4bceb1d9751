"""The rows that a study packs again and again: all of a table, or a random part of a very large one."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packtrain.core.seeds import stream
from packtrain.costs.table import CostTable
from packtrain.plans.draw import draw_of
from packtrain.plans.resources import Samples, samples_of

MOST_ROWS = 2_000_000  # simulated on; of a larger table a random part of this size
_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """Costs by row, how much of each row's end may be cut, and how often each row is used in an epoch."""

    samples: Samples
    tails: np.ndarray
    counts: np.ndarray | None  # None: every row once
    total_tokens: int  # of an epoch over the whole table
    scale: float = 1.0  # rows of the table for each row here

    def __len__(self) -> int:
        return len(self.tails)

    def read(self, start: int, stop: int) -> tuple[Samples, np.ndarray]:
        """Costs and tail tokens of a stretch of rows."""
        if (start, stop) == (0, len(self)):
            return self.samples, self.tails
        columns = {name: column[start:stop] for name, column in self.samples.columns.items()}
        return Samples(columns), self.tails[start:stop]

    def drawn(self, name: str) -> int:
        """The total of one resource over an epoch."""
        column = self.samples[name]
        return int(column.sum() if self.counts is None else column @ self.counts)

    def part(self, most: int, seed: int) -> Rows:
        """At most so many of the rows, drawn by the seed, where a look at some is enough."""
        if len(self) <= most:
            return self
        chosen = np.sort(stream(seed, "part").choice(len(self), most, replace=False))
        return Rows(
            samples=self.samples.take(chosen),
            tails=self.tails[chosen],
            counts=None if self.counts is None else self.counts[chosen],
            total_tokens=self.total_tokens,
            scale=self.scale * len(self) / most,
        )

    @property
    def entries(self) -> int:
        """Samples of an epoch, repeats counted."""
        return len(self) if self.counts is None else int(self.counts.sum())


def read_rows(table: CostTable, seed: int, most: int = MOST_ROWS) -> Rows:
    """All rows, or `most` of them drawn by the seed."""
    draw = draw_of(table)
    counts = None if draw.plain else draw.counts(table.source_codes(), seed, 0)
    tokens = table.column("tokens")
    total = int(tokens.sum() if counts is None else tokens @ counts)
    if len(table) <= most:
        samples, tails = samples_of(table)
        return Rows(samples=samples, tails=tails, counts=counts, total_tokens=total)
    chosen = np.sort(stream(seed, "study").choice(len(table), most, replace=False))
    parts = []
    for start in range(0, len(table), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(table))
        samples, tails = samples_of(table, start, stop)
        here = chosen[np.searchsorted(chosen, start) : np.searchsorted(chosen, stop)] - start
        parts.append((samples.take(here), tails[here]))
    columns = {name: np.concatenate([part[name] for part, _ in parts]) for name in parts[0][0].columns}
    return Rows(
        samples=Samples(columns),
        tails=np.concatenate([tails for _, tails in parts]),
        counts=None if counts is None else counts[chosen],
        total_tokens=total,
        scale=len(table) / most,
    )
