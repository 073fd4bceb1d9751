"""The rows that a study packs again and again: all of a table, or a random part of a very large one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from packtrain.core.seeds import stream
from packtrain.measuring.table import CostTable, SourceCodes
from packtrain.packing.draw import draw_of, is_mixed, mixture_of
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import Samples, Tails, samples_of, tail_runs
from packtrain.packing.windows import rows_that_fit

MOST_ROWS = 2_000_000  # simulated on; of a larger table a random part of this size
_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostRows:
    """Costs by row, how much of each row's end may be cut, and which source it is of."""

    samples: Samples
    tails: Tails
    sources: SourceCodes | None  # None: every row is used once
    mixture: Mapping[str, Mapping[str, float | None]]
    scale: float = 1.0  # rows of the table for each row here

    def __len__(self) -> int:
        return len(self.tails)

    def read(self, start: int, stop: int) -> tuple[Samples, Tails]:
        """Costs and tails of a span of rows."""
        if (start, stop) == (0, len(self)):
            return self.samples, self.tails
        columns = {name: column[start:stop] for name, column in self.samples.columns.items()}
        return Samples(columns), self.tails.part(start, stop)

    def counts(self, config: PackingConfig) -> np.ndarray | None:
        """How often each row is used in an epoch of packs of this kind; None: every row once."""
        if self.sources is None:
            return None
        return draw_of(self.mixture, self.sources, rows_that_fit(self, config)).counts(config.seed, 0)

    def part(self, most: int, seed: int) -> CostRows:
        """At most so many of the rows, drawn by the seed, where a look at some is enough."""
        if len(self) <= most:
            return self
        chosen = np.sort(stream(seed, "part").choice(len(self), most, replace=False))
        return replace(self.take(chosen), scale=self.scale * len(self) / most)

    def take(self, chosen: np.ndarray) -> CostRows:
        """Some of the rows and no others, in increasing order."""
        return replace(
            self,
            samples=self.samples.take(chosen),
            tails=self.tails.take(chosen),
            sources=self.sources and SourceCodes(self.sources.names, self.sources.codes[chosen]),
        )


def read_rows(table: CostTable, seed: int, most: int = MOST_ROWS) -> CostRows:
    """All rows, or `most` of them drawn by the seed."""
    sources, mixture = table.source_codes() if is_mixed(table) else None, mixture_of(table)
    if len(table) <= most:
        samples, tails = samples_of(table)
        return CostRows(samples=samples, tails=tails, sources=sources, mixture=mixture)
    chosen = np.sort(stream(seed, "study").choice(len(table), most, replace=False))
    parts = []
    for start in range(0, len(table), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(table))
        samples, tails = samples_of(table, start, stop)
        here = chosen[np.searchsorted(chosen, start) : np.searchsorted(chosen, stop)] - start
        parts.append((samples.take(here), tails.tokens[here]))
    columns = {name: np.concatenate([part[name] for part, _ in parts]) for name in parts[0][0].columns}
    return CostRows(
        samples=Samples(columns),
        tails=Tails(np.concatenate([tails for _, tails in parts]), lambda some: tail_runs(table, chosen[some])),
        sources=sources and SourceCodes(sources.names, sources.codes[chosen]),
        mixture=mixture,
        scale=len(table) / most,
    )
