"""What a sample uses of each resource that a pack can run out of, as columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from packtrain.core.errors import DataError
from packtrain.core.modality import VISION_TOKENS
from packtrain.measuring.table import CostTable

RESOURCES = ("tokens", "vision_tokens", "patches", "images", "videos", "frames", "samples", "attention")
# Kept for every pack beside the resources: what memory and time follow from.
EXTRAS = ("supervised_tokens", "squared_patches", "largest_patches", "longest")

_READ = (
    *("tokens", *VISION_TOKENS, "images", "videos", "frames", "patches"),
    *("max_patches_per_image", "supervised_tokens", "tail_tokens"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Columns of samples, all of one length; a sample is a row of the cost table, or a piece of one."""

    columns: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.columns["tokens"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def take(self, rows: np.ndarray) -> Samples:
        """Some of the samples, in another order, perhaps repeated."""
        return Samples({name: column[rows] for name, column in self.columns.items()})

    def part(self, start: int, stop: int) -> Samples:
        """A span of samples."""
        return Samples({name: column[start:stop] for name, column in self.columns.items()})

    def matrix(self, resources: tuple[str, ...]) -> np.ndarray:
        """The sizes of several resources, one row for each sample."""
        return np.stack([self.columns[name] for name in resources], axis=1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entries:
    """What packs are made of: rows of a cost table, or pieces of rows, with their costs."""

    rows: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray  # is it the first piece of its row that goes into a pack: with it the sample is counted
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


def _no_runs(_: np.ndarray) -> Sequence[str]:
    raise AssertionError("rows that were not measured cannot be cut")


@dataclass(frozen=True, slots=True, eq=False)
class Tails:
    """How much of each sample may be cut from its end, and where loss is taken in it."""

    tokens: np.ndarray
    runs: Callable[[np.ndarray], Sequence[str]] = field(default=_no_runs)  # `tail_runs` of some, read when they are cut

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: np.ndarray) -> Tails:
        """Those of some of the samples, in increasing order."""
        return Tails(self.tokens[rows], lambda some: self.runs(rows[some]))

    def part(self, start: int, stop: int) -> Tails:
        """Those of a span of samples."""
        return Tails(self.tokens[start:stop], lambda some: self.runs(some + start))


def samples_of(table: CostTable, start: int = 0, stop: int | None = None) -> tuple[Samples, Tails]:
    """Rows `start` to `stop` of a cost table as samples, and how much of each may be cut from its end.

    Squared patches are those of a sample whose images are all as large as its largest: exact for one image, for tiles
    and for video, an upper bound for images of different sizes.
    """
    if not len(table):
        raise DataError(str(table.folder), got="a cost table without rows", expected="at least one measured record")
    read = table.rows(_READ, np.arange(start, len(table) if stop is None else stop))
    costs = {name: column.astype(np.int64, copy=False) for name, column in read.items()}
    _check(table, costs, start)
    tokens, largest = costs["tokens"], costs["max_patches_per_image"]
    columns = {
        "tokens": tokens,
        "vision_tokens": np.add.reduce([costs[name] for name in VISION_TOKENS]),
        "samples": np.ones(len(tokens), np.int64),
        "attention": tokens * tokens,
        **{name: costs[name] for name in ("patches", "images", "videos", "frames", "supervised_tokens")},
        "largest_patches": largest,
        "squared_patches": costs["patches"] * largest,
        "longest": tokens,
    }
    return Samples(columns), Tails(costs["tail_tokens"], lambda some: tail_runs(table, some + start))


def tail_runs(table: CostTable, rows: np.ndarray) -> Sequence[str]:
    """Where loss is taken in the tails of some rows, in increasing order."""
    return list(table.rows(("tail_runs",), rows)["tail_runs"])


def _check(table: CostTable, costs: dict[str, np.ndarray], start: int) -> None:
    for name, column in costs.items():
        least = 1 if name == "tokens" else 0
        bad = np.flatnonzero(column < least)
        if len(bad):
            raise DataError(
                f"{table.folder}: row {start + bad[0]}",
                got=f"{name} {column[bad[0]]}",
                expected=f"at least {least}",
                fix="measure again",
            )
