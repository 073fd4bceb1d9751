"""Packing under several limits at once: near the bound, max over resources of ceil(sum / capacity).

The fewest packs of four ways win: best fit by the scarcest resource (at the bound where one limit dominates), a search
in pools (near the bound where several limits bind), best fit by the sum of all shares (where large samples block each
other) and first fit in random order (so that the result is never worse than that).

The search in pools deals samples into pools that are alike. Each pool is spread evenly over about as few packs as its
sums allow, limits ignored, and then repaired by exchanges between packs. Packs that stay over a limit are dissolved
into the next pool, so that only the last one pays for them:

    pool 1 -> spread -> exchange -> packs within the limits are done
                                 -> the rest, with fresh samples, is pool 2 -> ...

How many packs to try is learned from pool to pool, because the bound may be out of reach: samples that fill the images
of a pack leave its tokens unused, whatever the order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from packtrain.core.seeds import stream
from packtrain.packing.greedy import first_fit
from packtrain.packing.multi_resource_kernels import best_fit, best_fit_by_sum, exchange, remove_samples, spread
from packtrain.packing.sorted_best_fit import group

Grouped = tuple[np.ndarray, np.ndarray]  # order, offsets
_MOST_EXACT = 1 << 50  # sums of integers in float64 are exact up to here
_MOST_LEVELS = 1 << 16  # lists of packs by what they have left of one resource
_FEW_SAMPLES = 20_000  # up to here first fit is tried in several orders, because chance matters
_FIRST_FIT_SAMPLES = 50_000  # first fit over many more samples takes longer than its packs are worth
_BY_SUM_SAMPLES = 6_000  # best fit by sum is quadratic
_FEWEST_PACKS, _MOST_PACKS = 1_600, 3_200  # of a pool: larger ones pass less on, but the last one costs more
_POOLS = 8  # where there is a choice
_ROUNDS = 10  # of exchanges, after each of which the course is looked at
_LEFT = 0.005  # share of a pool's packs whose worth may be left over
_OVER = 0.02  # share of a pool's packs that may be passed on
_REHEARSALS = 6  # of the first pool, to learn how many packs to try


def pack_multi_resource(sizes: np.ndarray, capacities: np.ndarray, *, seed: int, effort: str = "fast") -> Grouped:
    """Order and offsets of the packs: pack i is order[offsets[i]:offsets[i + 1]], none is empty.

    sizes: int64 (n, r), every row fits `capacities` (r,) alone. The same arguments give the same packs.
    """
    num = len(sizes)
    sums = sizes.sum(0)
    scarcest = np.argsort(-sums / capacities, kind="stable")
    binding = set(binding_resources(sizes, capacities)) if num else set()
    needed = [int(q) for q in scarcest if q in binding and sums[q] > capacities[q]]
    if not needed:
        return np.arange(num, dtype=np.int64), np.array([0, num] if num else [0], np.int64)
    if needed != list(range(len(capacities))):
        sizes, capacities = np.ascontiguousarray(sizes[:, needed]), capacities[needed]
    bound = lower_bound(sizes, capacities)
    best = _best_fit(sizes, capacities, stream(seed, "several limits", "best fit"))
    for name in ("fast",) if effort == "fast" else ("fast", effort):  # more effort is never worse than less
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


def _count(grouped: Grouped) -> int:
    """The number of packs."""
    return len(grouped[1]) - 1


def lower_bound(sizes: np.ndarray, capacities: np.ndarray) -> int:
    """No packing has fewer packs: every resource needs room for its sum."""
    return int(max(-(-sizes.sum(axis=0) // capacities), default=0))


def binding_resources(sizes: np.ndarray, capacities: np.ndarray) -> list[int]:
    """The resources that can stop a sample at all; at least one.

    A limit never binds where another one is used up at least as fast by every single sample:

    >>> binding_resources(np.array([[100, 1], [300, 2]]), np.array([1000, 20]))
    [0]
    """
    kept = list(range(len(capacities)))
    for resource in sorted(kept, key=lambda r: int(sizes[:, r].sum()) / int(capacities[r])):
        for other in kept:
            if other != resource and _dominated(
                sizes[:, resource], capacities[resource], sizes[:, other], capacities[other]
            ):
                kept.remove(resource)
                break
    return kept


def _dominated(size: np.ndarray, capacity: int, by: np.ndarray, by_capacity: int) -> bool:
    """size / capacity <= by / by_capacity for every sample, in whole numbers where they are exact."""
    if int(size.max()) * int(by_capacity) < 2**62 and int(by.max()) * int(capacity) < 2**62:
        return bool((size * by_capacity <= by * capacity).all())
    return bool((size.astype(object) * int(by_capacity) <= by.astype(object) * int(capacity)).all())


def _best_fit(sizes: np.ndarray, capacities: np.ndarray, rng: np.random.Generator) -> Grouped:
    """Best fit by the scarcest resource in decreasing order, equal ones at random, other limits respected."""
    order = rng.permutation(len(sizes))
    order = order[np.argsort(-sizes[order, 0], kind="stable")]
    shift = max(0, int(capacities[0]).bit_length() - _MOST_LEVELS.bit_length() + 1)
    packs_of = np.empty(len(sizes), np.int32)
    packs = best_fit(sizes, capacities, order, shift, 64, packs_of)
    return group(order, packs_of[order], packs)


def _first_fit_in_random_order(
    sizes: np.ndarray, capacities: np.ndarray, fewest: int, rng: np.random.Generator
) -> Grouped:
    """First fit over spans of a random order, while it can still end below `fewest` packs."""

    def pack(span: np.ndarray) -> Grouped:
        return group(span, *first_fit(sizes, span, capacities))

    return _in_spans(rng.permutation(len(sizes)), _FIRST_FIT_SAMPLES, fewest, pack)


def _best_fit_by_sum(sizes: np.ndarray, capacities: np.ndarray, fewest: int, rng: np.random.Generator) -> Grouped:
    """Best fit by decreasing sum of shares, over spans of a random order, while it can still win."""
    weight = (sizes / capacities).sum(axis=1)

    def pack(span: np.ndarray) -> Grouped:
        order = span[np.argsort(-weight[span], kind="stable")]
        return group(order, *best_fit_by_sum(sizes, capacities, order))

    return _in_spans(rng.permutation(len(sizes)), _BY_SUM_SAMPLES, fewest, pack)


def _in_spans(order: np.ndarray, samples: int, fewest: int, pack: Callable[[np.ndarray], Grouped]) -> Grouped:
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


# ---- the search in pools


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchLimits:
    """How hard to search."""

    comparisons: int  # for each sample, of pairs of samples that could change places
    heat: float  # squared excess that an exchange may add at first
    tries: int  # numbers of packs tried for the last pool


EFFORTS = {
    "fast": SearchLimits(comparisons=500, heat=3e-4, tries=6),
    "best": SearchLimits(comparisons=3_500, heat=3e-4, tries=10),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Instance:
    """What is to be packed, in the form the kernels want."""

    sizes: np.ndarray  # (n, r) int64
    capacities: np.ndarray  # (r,) float64
    weights: np.ndarray  # (r,) float64, 1 / capacity
    effort: SearchLimits
    state: np.ndarray  # (1,) uint64 of the generator, moves on with every use

    def need(self, ids: np.ndarray) -> float:
        """The packs that the samples fill, as a fraction: their own bound before rounding."""
        return float((self.sizes[ids].sum(0) * self.weights).max())

    def excess(self, loads: np.ndarray) -> float:
        """How many packs' worth is over the limits."""
        return float((np.maximum(loads - self.capacities, 0.0).sum(0) * self.weights).max())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """One pool after the exchanges."""

    packs_of: np.ndarray  # (P,) the pack of every sample, -1: none
    loads: np.ndarray  # (m, r)
    used: float  # share of the rounds

    @property
    def over(self) -> np.ndarray:
        """(P,) whether a sample has no pack."""
        return self.packs_of < 0


@dataclass(kw_only=True, slots=True)
class _Aim:
    """How many packs to try for the next pool, as a factor on what it fills; learned from the pools before."""

    growth: float = 1.0
    failed: float = 1.0  # the last factor that was too small

    def learn(self, instance: _Instance, ids: np.ndarray, outcome: _Outcome) -> bool:
        """Adjust to how a pool went; True where the factor was about right."""
        num_packs = len(outcome.loads)
        excess = instance.excess(outcome.loads) / num_packs
        growth = num_packs / max(1e-9, instance.need(ids[~outcome.over]))
        if outcome.over.any() or excess > 2 * _LEFT:
            self.failed = num_packs / instance.need(ids)
            step = growth * (1 + excess / 2) - self.growth
            self.growth += step if step > 0.02 else step / 2  # one pool of many may have been a difficult one
            return False
        if outcome.used > 0.3:
            # Packs over a limit hold the difficult samples: passing on many of them makes the next pools worse.
            over = float(((outcome.loads - instance.capacities).max(axis=1) > 0).mean())
            self.growth = max(1.0, growth + 0.05 * (over - _OVER) - (0.0005 if excess < _LEFT / 2 else 0.0))
            return True
        # It was easy: aim lower, by half of what the packs have left in their fullest resource, but above what failed.
        slack = float((1 - (outcome.loads * instance.weights).max(1)).clip(0, 1).mean())
        self.failed -= 0.1 * (growth - self.failed) + 0.001
        self.growth = max(1.0, growth - 0.5 * slack - 0.0005, (growth + self.failed) / 2)
        return self.growth > growth - 0.002


@dataclass(kw_only=True, slots=True)
class _Done:
    """Packs that are finished."""

    orders: list[np.ndarray]
    lengths: list[np.ndarray]

    def add(self, ids: np.ndarray, packs_of: np.ndarray) -> None:
        """Add packs; numbers without samples vanish."""
        counts = np.bincount(packs_of)
        self.orders.append(ids[np.argsort(packs_of, kind="stable")])
        self.lengths.append(counts[counts > 0])

    def grouped(self) -> Grouped:
        """All of them."""
        return np.concatenate(self.orders).astype(np.int64), np.concatenate(
            [[0], np.cumsum(np.concatenate(self.lengths))]
        )


def pack_in_pools(
    sizes: np.ndarray,
    capacities: np.ndarray,
    effort: SearchLimits,
    bound: int,
    rng: np.random.Generator,
    state: np.ndarray,
) -> Grouped:
    """All samples, pool by pool; what a pool could not place well goes on to the next one."""
    weights = 1.0 / capacities
    instance = _Instance(
        sizes=sizes, capacities=capacities.astype(np.float64), weights=weights, effort=effort, state=state
    )
    packs_per_pool = min(_MOST_PACKS, max(_FEWEST_PACKS, bound // _POOLS))
    pools = _deal(instance, max(1, round(bound / packs_per_pool)), rng)
    aim, done = _Aim(), _Done(orders=[], lengths=[])
    if len(pools) > 1:
        _rehearse(instance, rng.permutation(pools[0]), aim)
    carried = pools[0][:0]
    for fresh in pools[:-1]:
        ids = rng.permutation(np.concatenate([carried, fresh]))
        kept, num_packs = _whole_packs(instance, ids, aim.growth)
        carried, ids = ids[kept:], ids[:kept]
        outcome = _balance(instance, ids, num_packs)
        aim.learn(instance, ids, outcome)
        closed = _worth_closing(instance, outcome.loads)[outcome.packs_of] & ~outcome.over
        carried = np.concatenate([carried, ids[~closed]])
        done.add(ids[closed], outcome.packs_of[closed])
    _finish(instance, rng.permutation(np.concatenate([carried, pools[-1]])), aim, done)
    return done.grouped()


def _deal(instance: _Instance, num_pools: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Pools with nearly the same mixture: samples sorted by kind, each span dealt one to a pool."""
    num = len(instance.sizes)
    if num_pools == 1:
        return [np.arange(num)]
    order = rng.permutation(num).astype(np.int32)
    total, fullest, kind = (np.zeros(num, np.float32) for _ in range(3))
    for q, weight in enumerate(instance.weights):  # one column at a time: a copy of all would double the memory
        share = (instance.sizes[:, q] * weight).astype(np.float32)
        total += share
        kind[share > fullest] = q * (len(instance.weights) + 1.0)
        np.maximum(fullest, share, out=fullest)
    kind += total
    order = order[np.argsort(kind[order], kind="stable")]
    turns = np.tile(np.arange(num_pools, dtype=np.int32), (-(-num // num_pools), 1))
    pool_of = rng.permuted(turns, axis=1, out=turns).ravel()[:num]
    by_pool = np.argsort(pool_of, kind="stable")
    return np.split(order[by_pool], np.cumsum(np.bincount(pool_of, minlength=num_pools))[:-1])


def _rehearse(instance: _Instance, ids: np.ndarray, aim: _Aim) -> None:
    """Learn from one pool, without keeping its packs, how many packs to try."""
    for _ in range(_REHEARSALS):
        kept, num_packs = _whole_packs(instance, ids, aim.growth)
        if aim.learn(instance, ids[:kept], _balance(instance, ids[:kept], num_packs)):
            break


def _whole_packs(instance: _Instance, ids: np.ndarray, growth: float) -> tuple[int, int]:
    """How many of the samples fill a whole number of packs, and that number: no pack is spent on a fraction."""
    need = (instance.sizes[ids].cumsum(0) * instance.weights).max(1) * growth
    num_packs = max(1, int(need[-1]))
    return max(1, int(np.searchsorted(need, num_packs, side="right"))), num_packs


def _balance(instance: _Instance, ids: np.ndarray, num_packs: int) -> _Outcome:
    """Spread samples over packs and exchange until no pack is over a limit, or what is too much sits in few of them."""
    sizes, weights = instance.sizes[ids].astype(np.float64), instance.weights
    packs_of = np.empty(len(ids), np.int64)
    loads = np.empty((num_packs, len(weights)))
    spread(sizes, weights, np.argsort(-(sizes @ weights), kind="stable"), loads, packs_of)
    budget = instance.effort.comparisons * len(ids) // _ROUNDS
    before, gathering = np.inf, 0
    for at in range(_ROUNDS):
        heat = 0.0 if gathering else instance.effort.heat * (1 - at / _ROUNDS) ** 2
        over = exchange(
            sizes, instance.capacities, weights, loads, packs_of, budget, heat, gathering > 0, instance.state
        )
        if over == 0 or gathering > 3:
            break
        excess = instance.excess(loads)
        expected = excess * min(1.0, excess / before) ** (_ROUNDS - at)  # after the last round, at this pace
        before = excess
        if gathering or at > 6:
            gathering += 1
        elif at > 0 and expected > _LEFT * num_packs:
            # Far too much: random samples go, because the choice of exchanges would be the difficult ones.
            remove_samples(sizes, weights, loads, packs_of, expected, instance.state)
            before = np.inf
        elif at > 0 and expected > 0.5:
            gathering = 1
    return _Outcome(packs_of=packs_of, loads=loads, used=(at + 1) / _ROUNDS)


def _worth_closing(instance: _Instance, loads: np.ndarray) -> np.ndarray:
    """Packs to keep: within the limits, and not one of the few that are full in no resource."""
    fullest = (loads * instance.weights).max(1)
    lowest = np.sort(fullest)[len(fullest) // 20]
    return (loads <= instance.capacities).all(1) & (fullest >= min(0.97, lowest))


def _finish(instance: _Instance, ids: np.ndarray, aim: _Aim, done: _Done) -> None:
    """Pack the last samples, all of them, in the fewest packs that some tries find."""
    sizes, capacities = instance.sizes[ids], instance.capacities.astype(np.int64)
    need = instance.need(ids)
    least = int(np.ceil(need - 1e-9))
    best, fewest = first_fit(sizes, np.arange(len(ids)), capacities)
    for _ in range(instance.effort.tries):
        num_packs = min(fewest - 1, max(least, int(need * aim.growth)))
        if num_packs < least:
            break
        outcome = _balance(instance, ids, num_packs)
        packs_of, packs = _repaired(sizes, capacities, outcome)
        if packs < fewest:
            best, fewest = packs_of, packs
        aim.learn(instance, ids, outcome)
    done.add(ids, best)


def _repaired(sizes: np.ndarray, capacities: np.ndarray, outcome: _Outcome) -> tuple[np.ndarray, int]:
    """The pack of every sample: those of packs over a limit go where there is room, largest first, or to new packs."""
    within = (outcome.loads - capacities).max(axis=1) <= 0
    late = np.logical_or(~within[outcome.packs_of], outcome.over)
    order = np.lexsort((-(sizes / capacities).sum(1), np.where(late, 0, outcome.packs_of), late))
    packs_of = np.empty(len(order), np.int64)
    packs_of[order], packs = first_fit(sizes, order, capacities)
    return packs_of, packs
