"""What packs are made of: rows of a cost table, or pieces of rows, with their costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packtrain.packing.resources import Samples


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entries:
    """Pieces of rows, with their costs."""

    rows: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray  # the first of its row in a pack: with it the sample is counted
    samples: Samples

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, positions: np.ndarray) -> Entries:
        """Some of the entries, in another order."""
        return Entries(
            rows=self.rows[positions],
            starts=self.starts[positions],
            firsts=self.firsts[positions],
            samples=self.samples.take(positions),
        )

    def __add__(self, other: Entries) -> Entries:
        columns = {name: np.concatenate([column, other.samples[name]]) for name, column in self.samples.columns.items()}
        return Entries(
            rows=np.concatenate([self.rows, other.rows]),
            starts=np.concatenate([self.starts, other.starts]),
            firsts=np.concatenate([self.firsts, other.firsts]),
            samples=Samples(columns),
        )
