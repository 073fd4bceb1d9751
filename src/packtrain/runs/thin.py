"""Long runs as few points: every step counts, and what is drawn says how far it spread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BUCKETS = 140  # as many as a page is wide enough to show


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Thinned:
    """Steps put together bucket by bucket: mean, smallest and largest. Buckets without a number are left out."""

    bucket: np.ndarray  # number of each bucket that has something
    x: np.ndarray  # mean place of the steps in it
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    steps: np.ndarray  # how many there are

    @property
    def spread(self) -> bool:
        """Does any bucket hold several steps?"""
        return bool((self.steps > 1).any())


def edges_for(end: float, buckets: int = BUCKETS) -> np.ndarray:
    """Equally wide buckets from 0 to the end."""
    return np.linspace(0.0, max(end, 1e-9), buckets + 1)


def thin(x: np.ndarray, y: np.ndarray, edges: np.ndarray) -> Thinned:
    """Put steps into buckets. Numbers that are not finite are left out, and so is what lies beyond the last edge.

    >>> thinned = thin(np.array([1.0, 2.0, 9.0]), np.array([4.0, 6.0, 1.0]), np.array([0.0, 5.0, 10.0]))
    >>> thinned.mean.tolist(), thinned.low.tolist(), thinned.high.tolist(), thinned.steps.tolist()
    ([5.0, 1.0], [4.0, 1.0], [6.0, 1.0], [2, 1])
    """
    good = np.isfinite(x) & np.isfinite(y) & (x <= edges[-1])
    x, y = x[good], y[good]
    at = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(edges) - 2)
    order = np.argsort(at, kind="stable")
    x, y, at = x[order], y[order], at[order]
    buckets, first, counts = np.unique(at, return_index=True, return_counts=True)
    if not len(buckets):
        empty = np.zeros(0)
        return Thinned(bucket=buckets, x=empty, mean=empty, low=empty, high=empty, steps=counts)
    return Thinned(
        bucket=buckets,
        x=np.add.reduceat(x, first) / counts,
        mean=np.add.reduceat(y, first) / counts,
        low=np.minimum.reduceat(y, first),
        high=np.maximum.reduceat(y, first),
        steps=counts,
    )


def trailing_mean(x: np.ndarray, y: np.ndarray, weights: np.ndarray, width: float) -> np.ndarray:
    """The weighted mean over the last `width` along x, at each step; numbers that are not finite are left out.

    >>> trailing_mean(np.array([1.0, 2, 3]), np.array([3.0, 1, 2]), np.ones(3), 2.0).tolist()
    [3.0, 2.0, 1.5]
    """
    good = np.isfinite(y) & np.isfinite(weights) & (weights > 0)
    weight = np.where(good, weights, 0.0)
    sums = np.concatenate([[0.0], np.cumsum(weight * np.where(good, y, 0.0))])
    totals = np.concatenate([[0.0], np.cumsum(weight)])
    start = np.searchsorted(x, x - width * (1 - 1e-12), side="right")
    stop = np.arange(1, len(x) + 1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((sums[stop] - sums[start]) / (totals[stop] - totals[start]))
