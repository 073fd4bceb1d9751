"""Packing under several limits at once: near the bound, max over resources of ceil(sum / capacity).

The fewest packs of four ways win: best fit by the scarcest resource (at the bound where one limit dominates), a search
in pools (near the bound where several limits bind), best fit by the sum of all shares (where large samples block each
other) and first fit in random order (what the others never fall behind).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from packtrain.core.seeds import stream
from packtrain.packing.greedy import first_fit
from packtrain.packing.several_kernels import best_fit, best_fit_by_sum
from packtrain.packing.several_pools import EFFORTS, pack_in_pools
from packtrain.packing.sorted_best_fit import group

_Grouped = tuple[np.ndarray, np.ndarray]  # order, offsets
_MOST_EXACT = 1 << 50  # sums of integers in float64 are exact up to here
_MOST_LEVELS = 1 << 16  # lists of packs by what they have left of one resource
_FEW_SAMPLES = 20_000  # up to here first fit is tried in several orders, because chance matters
_FIRST_FIT_SAMPLES = 50_000  # first fit over many more samples takes longer than its packs are worth
_BY_SUM_SAMPLES = 6_000  # best fit by sum is quadratic


def pack_several(
    sizes: np.ndarray, capacities: np.ndarray, *, seed: int, effort: str = "fast"
) -> tuple[np.ndarray, np.ndarray]:
    """Order and offsets of the packs: pack i is order[offsets[i]:offsets[i + 1]], none is empty.

    sizes: int64 (n, r), every row fits `capacities` (r,) alone. The same arguments give the same packs.
    """
    num = len(sizes)
    sizes, capacities = _binding(sizes, capacities)
    if sizes.shape[1] == 0:
        return np.arange(num, dtype=np.int64), np.array([0, num] if num else [0], np.int64)
    bound = int((-(-sizes.sum(0) // capacities)).max())
    best = _best_fit(sizes, capacities, stream(seed, "several limits", "best fit"))
    for name in ("fast",) if effort == "fast" else ("fast", effort):  # more effort shall never end behind less
        if _count(best) > bound and capacities.max() < _MOST_EXACT:
            rng = stream(seed, "several limits", name)
            state = rng.integers(1, 2**63, 1, dtype=np.uint64)
            best = min(best, pack_in_pools(sizes, capacities, EFFORTS[name], bound, rng, state), key=_count)
    if _count(best) > bound:
        rng = stream(seed, "several limits", "by sum")
        best = min(best, _best_fit_by_sum(sizes, capacities, _count(best), rng), key=_count)
    rng = stream(seed, "several limits", "first fit")
    for _ in range(4 if num <= _FEW_SAMPLES else 1):
        if _count(best) > bound:
            best = min(best, _first_fit_in_random_order(sizes, capacities, _count(best), rng), key=_count)
    return best


def _count(grouped: _Grouped) -> int:
    """The number of packs."""
    return len(grouped[1]) - 1


def _binding(sizes: np.ndarray, capacities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The resources that can bind, scarcest first: more of it than one pack holds, and no other always fuller."""
    sums = sizes.sum(0)
    needed: list[int] = []
    for q in np.argsort(-sums / capacities, kind="stable"):
        if sums[q] > capacities[q] and not any(_always_fuller(sizes, capacities, p, int(q)) for p in needed):
            needed.append(int(q))
    if needed == list(range(len(capacities))):
        return sizes, capacities
    return np.ascontiguousarray(sizes[:, needed]), capacities[needed]


def _always_fuller(sizes: np.ndarray, capacities: np.ndarray, p: int, q: int) -> bool:
    """Whether every sample takes at least as large a share of resource p as of q, so that q never is the tighter."""
    if max(int(capacities[p]), int(capacities[q])) >= 1 << 31:  # the products would not fit
        return False
    return bool((sizes[:, q] * capacities[p] <= sizes[:, p] * capacities[q]).all())


def _best_fit(sizes: np.ndarray, capacities: np.ndarray, rng: np.random.Generator) -> _Grouped:
    """Best fit by the scarcest resource in decreasing order, equal ones at random, other limits respected."""
    order = rng.permutation(len(sizes))
    order = order[np.argsort(-sizes[order, 0], kind="stable")]
    shift = max(0, int(capacities[0]).bit_length() - _MOST_LEVELS.bit_length() + 1)
    packs_of = np.empty(len(sizes), np.int32)
    packs = best_fit(sizes, capacities, order, shift, 64, packs_of)
    return group(order, packs_of[order], packs)


def _first_fit_in_random_order(
    sizes: np.ndarray, capacities: np.ndarray, fewest: int, rng: np.random.Generator
) -> _Grouped:
    """First fit over spans of a random order, while it can still end below `fewest` packs."""

    def pack(span: np.ndarray) -> _Grouped:
        return group(span, *first_fit(sizes, span, capacities))

    return _in_spans(rng.permutation(len(sizes)), _FIRST_FIT_SAMPLES, fewest, pack)


def _best_fit_by_sum(sizes: np.ndarray, capacities: np.ndarray, fewest: int, rng: np.random.Generator) -> _Grouped:
    """Best fit by decreasing sum of shares, over spans of a random order, while it can still win."""
    weight = (sizes / capacities).sum(axis=1)

    def pack(span: np.ndarray) -> _Grouped:
        order = span[np.argsort(-weight[span], kind="stable")]
        return group(order, *best_fit_by_sum(sizes, capacities, order))

    return _in_spans(rng.permutation(len(sizes)), _BY_SUM_SAMPLES, fewest, pack)


def _in_spans(order: np.ndarray, samples: int, fewest: int, pack: Callable[[np.ndarray], _Grouped]) -> _Grouped:
    """Pack spans of an order one by one; gives up, with a pack for each sample, once `fewest` is out of reach."""
    spans = max(1, round(len(order) / samples))
    done: list[np.ndarray] = []
    offsets = [np.zeros(1, np.int64)]
    packs = 0
    for number, span in enumerate(np.array_split(order, spans)):
        grouped, ends = pack(span)
        done.append(grouped)
        offsets.append(ends[1:] + offsets[-1][-1])
        packs += len(ends) - 1
        if packs * spans > 1.004 * fewest * (number + 1):
            return order, np.arange(len(order) + 1)
    return np.concatenate(done), np.concatenate(offsets)
