"""Packing under several limits at once: near the bound max over resources of ceil(sum / capacity).

Samples are dealt into pools that are alike. Each pool is spread evenly over about as few packs as the bound allows, limits
ignored, and then repaired by exchanges between packs. Packs still over a limit are dissolved into the next pool, so that
only the last pool pays for them. Best fit and first fit over all samples are tried too; the fewest packs win.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packtrain.core.seeds import stream
from packtrain.plans.greedy import first_fit
from packtrain.plans.several_kernels import best_fit, exchange, shed, spread
from packtrain.plans.sorted_best_fit import group

_Grouped = tuple[np.ndarray, np.ndarray]  # order, offsets
_MOST_EXACT = 1 << 50  # float64 sums of integers stay exact below
_MOST_LEVELS = 1 << 16  # lists of packs by what is left of one resource
_PACKS_PER_POOL = 400
_ROUNDS = 10
_LEFT = 0.005
_REHEARSALS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class _Effort:
    """How hard to search."""

    comparisons: int  # per sample, between two samples that could change places
    heat: float  # excess that an exchange may add at first, as a share of a pack
    tries: int  # numbers of packs tried for the last pool


_EFFORTS = {
    "fast": _Effort(comparisons=1_000, heat=0.0003, tries=6),
    "best": _Effort(comparisons=8_000, heat=0.0003, tries=8),
}


@dataclass(kw_only=True, slots=True)
class _Search:
    """One instance under way: its numbers in the form the kernels want, and the generator's state."""

    sizes: np.ndarray  # (n, r) int64
    capacities: np.ndarray  # (r,) float64
    weights: np.ndarray  # (r,) float64, 1 / capacity
    effort: _Effort
    state: np.ndarray  # (1,) uint64

    def need(self, ids: np.ndarray) -> float:
        """The packs that the samples fill, as a fraction."""
        return float((self.sizes[ids].sum(0) * self.weights).max())


def pack_several(
    sizes: np.ndarray, capacities: np.ndarray, *, seed: int, effort: str = "fast"
) -> tuple[np.ndarray, np.ndarray]:
    """Order and offsets of the packs: pack i is order[offsets[i]:offsets[i + 1]].

    sizes: int64 (n, r), every row fits `capacities` (r,) alone. The same arguments give the same packs.
    """
    num = len(sizes)
    sizes, capacities = _binding(sizes, capacities)
    if sizes.shape[1] == 0:
        return np.arange(num, dtype=np.int64), np.array([0, num] if num else [0], np.int64)
    bound = int((-(-sizes.sum(0) // capacities)).max())
    rng = stream(seed, "several limits")
    best = _best_fit(sizes, capacities)
    if _count(best) > bound and capacities.max() < _MOST_EXACT:
        search = _Search(
            sizes=sizes,
            capacities=capacities.astype(np.float64),
            weights=1.0 / capacities,
            effort=_EFFORTS[effort],
            state=rng.integers(1, 2**63, 1, dtype=np.uint64),
        )
        best = min(best, _in_pools(search, bound, rng), key=_count)
    if _count(best) > bound:
        best = min(best, _first_fit(sizes, capacities, rng.permutation(num)), key=_count)
    return best


def _count(grouped: _Grouped) -> int:
    """The number of packs."""
    return len(grouped[1]) - 1


def _binding(sizes: np.ndarray, capacities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The resources that can bind: their sum exceeds a pack, and no other resource is always the fuller one."""
    sums = sizes.sum(0)
    kept = [q for q in np.argsort(-sums / capacities, kind="stable") if sums[q] > capacities[q]]
    needed: list[int] = []
    for q in kept:
        share = sizes[:, q] / capacities[q]
        if not any(bool((share <= sizes[:, p] / capacities[p]).all()) for p in needed):
            needed.append(int(q))
    return np.ascontiguousarray(sizes[:, needed]), capacities[needed]


def _best_fit(sizes: np.ndarray, capacities: np.ndarray) -> _Grouped:
    """Best fit of the scarcest resource in decreasing order, other limits respected."""
    order = np.argsort(-sizes[:, 0], kind="stable")
    shift = max(0, int(capacities[0]).bit_length() - _MOST_LEVELS.bit_length() + 1)
    packs_of = np.empty(len(sizes), np.int32)
    packs = best_fit(sizes, capacities, order, 0, shift, 32, packs_of)
    return group(order, packs_of[order], packs)


def _first_fit(sizes: np.ndarray, capacities: np.ndarray, order: np.ndarray) -> _Grouped:
    """First fit in the order given."""
    packs_of, packs = first_fit(sizes, order, capacities)
    return group(order, packs_of, packs)


def _in_pools(search: _Search, bound: int, rng: np.random.Generator) -> _Grouped:
    """All samples, pool by pool; what a pool could not place well goes on to the next one."""
    pools = _deal(search, max(1, round(bound / _PACKS_PER_POOL)), rng)
    done: list[np.ndarray] = []
    lengths: list[np.ndarray] = []
    aim = _Aim()
    ids = rng.permutation(pools[0])
    for _ in range(_REHEARSALS if len(pools) > 1 else 0):
        kept, num_packs = _whole_packs(search, ids, aim.growth)
        packs_of, loads, used = _balance(search, ids[:kept], num_packs)
        if aim.learn(search, loads, search.need(ids[:kept]), search.need(ids[:kept][packs_of >= 0]), used):
            break
    carried = pools[0][:0]
    for fresh in pools[:-1]:
        ids = rng.permutation(np.concatenate([carried, fresh]))
        kept, num_packs = _whole_packs(search, ids, aim.growth)
        packs_of, loads, used = _balance(search, ids[:kept], num_packs)
        placed = ids[:kept][packs_of >= 0]
        aim.learn(search, loads, search.need(ids[:kept]), search.need(placed), used)
        closed = _good(loads / search.capacities)
        carried = np.concatenate([ids[:kept][packs_of < 0], placed[~closed[packs_of[packs_of >= 0]]], ids[kept:]])
        ids, packs_of = placed, packs_of[packs_of >= 0]
        kept = len(ids)
        _close(ids[:kept], packs_of, closed, done, lengths)
    ids = rng.permutation(np.concatenate([carried, pools[-1]]))
    order, offsets = _last(search, ids, aim.growth)
    done.append(ids[order])
    lengths.append(np.diff(offsets))
    return np.concatenate(done), np.concatenate([[0], np.cumsum(np.concatenate(lengths))])


@dataclass(kw_only=True, slots=True)
class _Aim:
    """How many packs to try for the next pool, as a factor on what it fills; learned from the pools before."""

    growth: float = 1.0
    failed: float = 1.0  # the largest factor that was too small lately

    def learn(self, search: _Search, loads: np.ndarray, tried: float, need: float, used: float) -> bool:
        """Take in how a pool went; says whether the factor was about right."""
        excess = _excess(search, loads) / len(loads)
        growth = len(loads) / need
        slack = float((1 - (loads / search.capacities).max(1)).clip(0, 1).mean())
        if need < tried or excess > 2 * _LEFT:
            self.failed = len(loads) / tried
            self.growth = growth * (1 + excess / 2)
            return False
        if used > 0.3:
            self.growth = max(1.0, growth - (0.0005 if excess < _LEFT / 2 else 0.0))
            return True
        self.failed -= 0.1 * (growth - self.failed)
        self.growth = max(1.0, growth - 0.5 * slack - 0.0005, (growth + self.failed) / 2)
        return self.growth > growth - 0.002


def _last(search: _Search, ids: np.ndarray, growth: float) -> _Grouped:
    """All samples of the last pool: what is left over is tried again beside the emptiest packs, in one pack more each time."""
    capacities = search.capacities.astype(np.int64)
    sizes = search.sizes[ids]
    best = _first_fit(sizes, capacities, np.arange(len(ids)))
    need = int(np.ceil(search.need(ids) - 1e-9))
    for step in range(search.effort.tries):
        num_packs = max(need, int(need * (growth + 0.002 * (step - 1))))
        if num_packs >= _count(best):
            break
        packs_of, loads, used = _balance(search, ids, num_packs)
        found = _repaired(sizes, capacities, packs_of, (loads > search.capacities).any(1))
        best = min(best, found, key=_count)
    return best


def _repaired(sizes: np.ndarray, capacities: np.ndarray, packs_of: np.ndarray, over: np.ndarray) -> _Grouped:
    """First fit that meets the packs within limits first: the others' samples go where there is room, or to further packs."""
    late = over[packs_of] | (packs_of < 0)
    order = np.lexsort((-(sizes / capacities).sum(1), np.where(late, 0, packs_of), late))
    return _first_fit(sizes, capacities, order) if late.any() else group(order, packs_of[order].astype(np.int32), len(over))


def _good(fills: np.ndarray) -> np.ndarray:
    """Packs to keep: none over a limit, and not the few that are full in no resource."""
    fullest = fills.max(1)
    lowest = np.sort(fullest)[len(fullest) // 20]
    return (fullest <= 1.0) & (fullest >= min(0.97, lowest))


def _deal(search: _Search, num_pools: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Pools with nearly the same mixture: samples sorted by kind, each stretch dealt one to a pool."""
    num = len(search.sizes)
    if num_pools == 1:
        return [np.arange(num)]
    order = rng.permutation(num)
    shares = search.sizes * search.weights
    key = shares.argmax(1) * (len(search.weights) + 1.0) + shares.sum(1)
    order = order[np.argsort(key[order], kind="stable")]
    pool_of = np.empty(num, np.int64)
    for first in range(0, num, num_pools):
        pool_of[first : first + num_pools] = rng.permutation(num_pools)[: num - first]
    by_pool = np.argsort(pool_of, kind="stable")
    return np.split(order[by_pool], np.cumsum(np.bincount(pool_of, minlength=num_pools))[:-1])


def _whole_packs(search: _Search, ids: np.ndarray, growth: float) -> tuple[int, int]:
    """How many of the samples fill a whole number of packs, and that number."""
    need = (search.sizes[ids].cumsum(0) * search.weights).max(1) * growth
    num_packs = max(1, int(need[-1]))
    return max(1, int(np.searchsorted(need, num_packs, side="right"))), num_packs


def _balance(search: _Search, ids: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray, float]:
    """The pack of every sample and what each pack holds: most within the limits, what is too much in few of them."""
    sizes = search.sizes[ids].astype(np.float64)
    packs_of = np.empty(len(ids), np.int64)
    loads = np.empty((num_packs, sizes.shape[1]))
    order = np.argsort(-(sizes @ search.weights), kind="stable")
    spread(sizes, search.weights, order, loads, packs_of)
    budget = search.effort.comparisons * len(ids) // _ROUNDS
    before, bent = np.inf, 0
    for at in range(_ROUNDS):
        heat = 0.0 if bent else search.effort.heat * (1 - at / _ROUNDS) ** 2
        over = exchange(
            sizes, search.capacities, search.weights, loads, packs_of, budget, heat, bent > 0, search.state
        )
        if over == 0 or bent > 3:
            break
        excess = _excess(search, loads)
        projected = excess * min(1.0, excess / before) ** max(1, _ROUNDS - at)
        before = excess
        if bent or at > 6:
            bent += 1
        elif at > 0 and projected > 0.05 * len(loads):
            loads = np.empty((len(loads) + int(projected), sizes.shape[1]))
            spread(sizes, search.weights, order, loads, packs_of)
            before = np.inf
        elif at > 0 and projected > _LEFT * len(loads):
            shed(sizes, search.weights, loads, packs_of, projected, search.state)
            before = np.inf
        elif at > 0 and projected > 0.5:
            bent = 1
    return packs_of, loads, (at + 1) / _ROUNDS


def _excess(search: _Search, loads: np.ndarray) -> float:
    """How many packs' worth is over the limits."""
    return float((np.maximum(loads - search.capacities, 0.0).sum(0) * search.weights).max())


def _close(
    ids: np.ndarray, packs_of: np.ndarray, keep: np.ndarray, done: list[np.ndarray], lengths: list[np.ndarray]
) -> None:
    """Add the packs marked in `keep` to the finished ones; empty ones vanish."""
    kept = keep[packs_of]
    counts = np.bincount(packs_of[kept], minlength=len(keep))
    done.append(ids[kept][np.argsort(packs_of[kept], kind="stable")])
    lengths.append(counts[counts > 0])


