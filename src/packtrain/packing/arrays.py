"""Packing as a pure function over arrays: sizes and capacities in, packs out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from packtrain.core.errors import ConfigError, nearest
from packtrain.core.fingerprint import digest
from packtrain.core.seeds import stream
from packtrain.core.user_code import load_function, names_function
from packtrain.packing.greedy import balanced_knapsack, first_fit, next_fit
from packtrain.packing.knapsack import even_packs
from packtrain.packing.multi_resource import binding_resources, lower_bound, pack_multi_resource
from packtrain.packing.sorted_best_fit import group, sorted_best_fit

Effort = Literal["fast", "best"]
STRATEGIES = ("best_fit", "first_fit", "next_fit", "window_N", "knapsack", "none", "wrapped", "module:function")
WRAPPED = "wrapped"  # cuts samples wherever a pack is full, which is no matter of sizes alone
MOST_SAMPLES = 2**31 - 1  # of one call: positions are kept in 32 bits; larger sets are packed in windows
# Above this capacity (attention work, say) one list for each size of gap costs more than samples do, unless they are
# as many. Small windows pay for the lists again and again.
_MOST_GAPS = 1 << 20
_LARGEST = 2**62  # sums of costs stay below, so that 64 bits hold them
Grouped = tuple[np.ndarray, np.ndarray]  # order, offsets


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packing:
    """Which samples share a pack: pack i holds `order[offsets[i]:offsets[i + 1]]`."""

    order: np.ndarray
    offsets: np.ndarray
    dropped: np.ndarray  # samples that no pack can hold

    @property
    def num_packs(self) -> int:
        """How many packs there are; none is empty."""
        return len(self.offsets) - 1

    def pack(self, number: int) -> np.ndarray:
        """The samples of one pack."""
        if not 0 <= number < self.num_packs:
            raise IndexError(f"pack {number} of {self.num_packs}")
        return self.order[self.offsets[number] : self.offsets[number + 1]]

    def loads(self, sizes: np.ndarray) -> np.ndarray:
        """What every pack holds of one resource."""
        return pack_sums(sizes[self.order], self.offsets)


def pack_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sums of consecutive spans, none of them empty.

    >>> pack_sums(np.array([1, 2, 3, 4]), np.array([0, 1, 4]))
    array([1, 9])
    """
    return np.add.reduceat(values, offsets[:-1]) if len(offsets) > 1 else values[:0]


def pack_arrays(
    resources: Mapping[str, np.ndarray | Sequence[int]],
    capacities: Mapping[str, int],
    strategy: str = "best_fit",
    seed: int | None = 0,
    effort: Effort = "fast",
) -> Packing:
    """Put samples into packs so that no capacity is exceeded.

    Every resource is an array with one integer for each sample; those without a capacity are not looked at. The seed
    decides the order in which samples are taken, or the choice between equal ones. None keeps the given order: samples
    are taken in it and keep it inside a pack, and packs are ordered by their first sample. Equal arguments give equal
    packs.

    >>> packing = pack_arrays({"tokens": [6, 5, 4, 3, 2, 99]}, {"tokens": 10})
    >>> packing.num_packs, packing.loads(np.array([6, 5, 4, 3, 2, 99])).tolist(), packing.dropped.tolist()
    (2, [10, 10], [5])
    """
    check_strategy(strategy)
    if strategy == WRAPPED:
        raise ConfigError(
            "packing_strategy",
            got=strategy,
            expected="a strategy that keeps samples whole",
            fix="use packtrain.pack on a cost table, which records where samples can be cut",
        )
    if effort not in get_args(Effort):
        raise ConfigError(
            "effort", got=effort, expected=", ".join(get_args(Effort)), fix=nearest(effort, get_args(Effort))
        )
    sizes, limits = _matrix(resources, capacities)
    fits = (sizes <= limits).all(axis=1)
    kept = np.flatnonzero(fits)
    order, offsets = pack_matrix(sizes if len(kept) == len(sizes) else sizes[kept], limits, strategy, seed, effort)
    return Packing(order=kept[order], offsets=offsets, dropped=np.flatnonzero(~fits))


def pack_matrix(sizes: np.ndarray, capacities: np.ndarray, strategy: str, seed: int | None, effort: Effort) -> Grouped:
    """Order and offsets for checked sizes (samples, resources), each of which fits alone."""
    if not len(sizes):
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    if len(sizes) > MOST_SAMPLES:
        raise ConfigError("samples", got=f"{len(sizes):,}", expected=f"at most {MOST_SAMPLES:,}", fix="pack in windows")
    if len(sizes) * int(capacities.max()) >= _LARGEST and (sizes.sum(axis=0, dtype=np.float64) >= _LARGEST).any():
        raise ConfigError("resources", got="costs that add up to 2^62 or more", expected="sums below 2^62")
    window = window_size(strategy)
    if window is not None:
        return _in_windows(sizes, capacities, window, seed, effort)
    if names_function(strategy):
        order, offsets = _user_packs(sizes, capacities, strategy, seed)
    else:
        order, offsets = _PACKERS[strategy](sizes, capacities, seed, effort)
    return (order, offsets) if seed is not None else _in_given_order(order, offsets)


def carry_over(
    sizes: np.ndarray, capacities: np.ndarray, packs: Grouped, strategy: str, *, window: int, ratio: float = 0.0
) -> tuple[Grouped, np.ndarray]:
    """The packs that a window keeps, and the samples of the others, which are packed again with the next window.

    The emptiest pack goes on, unless it is full, and with it those emptier than `ratio`, up to half a window of
    samples. Of next fit it is the open pack alone, so that windows change nothing about its order.
    """
    order, offsets = packs
    if strategy == "none" or len(offsets) < 2:
        return packs, order[:0]
    fill = (pack_sums(sizes[order], offsets) / capacities).max(axis=1)
    lengths = np.diff(offsets)
    emptiest = np.array([len(fill) - 1]) if strategy == "next_fit" else np.argsort(fill, kind="stable")
    goes_on = (fill[emptiest] < ratio) & (np.cumsum(lengths[emptiest]) <= window // 2)
    goes_on[0] = True
    keep = np.ones(len(fill), bool)
    keep[emptiest[goes_on]] = fill[emptiest[goes_on]] >= 1
    kept = np.repeat(keep, lengths)
    return (order[kept], np.concatenate([[0], np.cumsum(lengths[keep])])), np.sort(order[~kept])


def check_strategy(name: str) -> None:
    """Refuse a strategy that does not exist, with the nearest that does."""
    known = (*_PACKERS, WRAPPED)
    if isinstance(name, str) and (name in known or window_size(name) is not None or names_function(name)):
        return
    raise ConfigError(
        "packing_strategy",
        got=name,
        expected=", ".join(STRATEGIES) + " (N samples in a window, such as window_1000)",
        fix=nearest(name, [*known, "window_1000"]),
    )


def window_size(strategy: str) -> int | None:
    """The N of `window_N`."""
    match = re.fullmatch(r"window_(\d+)", strategy)
    return int(match.group(1)) if match and int(match.group(1)) > 0 else None


# ---- strategies


def _best_fit(sizes: np.ndarray, capacities: np.ndarray, seed: int | None, effort: Effort) -> Grouped:
    """At the bound with one resource that binds, near it with several."""
    binding = binding_resources(sizes, capacities)
    if len(binding) > 1:
        several = np.ascontiguousarray(sizes[:, binding])
        return pack_multi_resource(several, capacities[binding], seed=seed or 0, effort=effort)
    (only,) = binding
    column = np.ascontiguousarray(sizes[:, only])
    if _gaps_can_be_listed(capacities[only], len(sizes)):
        return sorted_best_fit(column, int(capacities[only]), seed)
    shuffled = _sampling_order(len(sizes), seed)
    order = shuffled[np.argsort(-column[shuffled], kind="stable")]
    return group(order, *first_fit(sizes[:, [only]], order, capacities[[only]]))


def _first_fit(sizes: np.ndarray, capacities: np.ndarray, seed: int | None, effort: Effort) -> Grouped:
    order = _sampling_order(len(sizes), seed)
    return group(order, *first_fit(sizes, order, capacities))


def _next_fit(sizes: np.ndarray, capacities: np.ndarray, seed: int | None, effort: Effort) -> Grouped:
    order = _sampling_order(len(sizes), seed)
    return group(order, *next_fit(sizes, order, capacities))


def _knapsack(sizes: np.ndarray, capacities: np.ndarray, seed: int | None, effort: Effort) -> Grouped:
    """Packs as alike as possible: nearly all samples go to the emptiest pack. Needs about as many as best fit.

    Where several limits bind it never needs more: if dealing samples out does, the packs are those of best fit.
    """
    binding = binding_resources(sizes, capacities)
    if len(binding) == 1 and _gaps_can_be_listed(capacities[binding[0]], len(sizes)):
        column, bound = np.ascontiguousarray(sizes[:, binding[0]]), lower_bound(sizes, capacities)
        for more in (0.0, 0.0002, 0.0005, 0.001, 0.002):
            packs = bound + math.ceil(more * bound)
            grouped = even_packs(column, int(capacities[binding[0]]), packs, seed, (0.9,))
            if grouped is not None:
                return grouped
    fewest = _best_fit(sizes, capacities, seed, effort) if len(binding) > 1 else None
    expected = lower_bound(sizes, capacities) if fewest is None else len(fewest[1]) - 1
    shuffled = _sampling_order(len(sizes), seed)
    weight = (sizes / capacities).max(axis=1)
    order = shuffled[np.argsort(-weight[shuffled], kind="stable")]
    packs_of, packs = balanced_knapsack(sizes, order, capacities, expected)
    return group(order, packs_of, packs) if fewest is None or packs <= expected else fewest


def _none(sizes: np.ndarray, capacities: np.ndarray, seed: int | None, effort: Effort) -> Grouped:
    return _sampling_order(len(sizes), seed), np.arange(len(sizes) + 1, dtype=np.int64)


def _in_windows(sizes: np.ndarray, capacities: np.ndarray, window: int, seed: int | None, effort: Effort) -> Grouped:
    """Best fit within each span of `window` consecutive samples, and what the one before left over."""
    orders, lengths = [], []
    back = np.empty(0, np.int64)
    for start in range(0, len(sizes), window):
        stop = min(start + window, len(sizes))
        here = np.concatenate([back, np.arange(start, stop)])
        part = np.ascontiguousarray(sizes[here])
        packs = pack_matrix(part, capacities, "best_fit", None if seed is None else seed + start, effort)
        if stop < len(sizes):
            packs, left = carry_over(part, capacities, packs, "best_fit", window=window)
            back = here[left]
        orders.append(here[packs[0]])
        lengths.append(np.diff(packs[1]))
    return np.concatenate(orders), np.concatenate([[0], np.cumsum(np.concatenate(lengths))])


_PACKERS: Mapping[str, Callable[[np.ndarray, np.ndarray, int | None, Effort], Grouped]] = {
    "best_fit": _best_fit,
    "first_fit": _first_fit,
    "next_fit": _next_fit,
    "knapsack": _knapsack,
    "none": _none,
}


# ---- what strategies share


def _sampling_order(count: int, seed: int | None) -> np.ndarray:
    """The order in which samples are taken."""
    if seed is None:
        return np.arange(count, dtype=np.int64)
    return stream(seed, "order").permutation(count)


def _in_given_order(order: np.ndarray, offsets: np.ndarray) -> Grouped:
    """The same packs by their first sample, and the samples of each in the order in which they were given."""
    lengths = np.diff(offsets)
    by_first = np.argsort(np.minimum.reduceat(order, offsets[:-1]), kind="stable")
    rank = np.empty(len(lengths), np.int64)
    rank[by_first] = np.arange(len(lengths))
    sorted_order = order[np.lexsort((order, np.repeat(rank, lengths)))]
    return sorted_order, np.concatenate([[0], np.cumsum(lengths[by_first])])


def _gaps_can_be_listed(capacity: int, count: int) -> bool:
    return bool(capacity <= max(_MOST_GAPS, 16 * count))


def _matrix(
    resources: Mapping[str, np.ndarray | Sequence[int]], capacities: Mapping[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Checked sizes (samples, resources) and capacities, in the order of `capacities`."""
    if not capacities:
        raise ConfigError("capacities", got="none", expected="a capacity for at least one resource")
    for name, capacity in capacities.items():
        if name not in resources:
            raise ConfigError(
                f"capacities[{name!r}]", got=name, expected=", ".join(resources), fix=nearest(name, resources)
            )
        if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or not 0 < capacity < _LARGEST:
            raise ConfigError(f"capacities[{name!r}]", got=repr(capacity), expected="a positive integer")
    columns = [_column(name, resources[name]) for name in capacities]
    if len({len(column) for column in columns}) > 1:
        lengths = ", ".join(f"{name}: {len(column):,}" for name, column in zip(capacities, columns, strict=True))
        raise ConfigError("resources", got=lengths, expected="the same number of samples for each")
    sizes = columns[0][:, None] if len(columns) == 1 else np.stack(columns, axis=1)
    empty = np.flatnonzero(~sizes.any(axis=1))
    if len(empty):
        raise ConfigError("resources", got=f"sample {empty[0]} has no cost", expected="a positive cost per sample")
    return sizes, np.array(list(capacities.values()), np.int64)


def _column(name: str, values: np.ndarray | Sequence[int]) -> np.ndarray:
    column = np.asarray(values)
    where = f"resources[{name!r}]"
    if column.ndim != 1:
        raise ConfigError(where, got=f"an array of shape {column.shape}", expected="one number per sample")
    if column.dtype.kind not in "iu" and len(column):
        if column.dtype.kind == "f" and not np.isfinite(column).all():
            raise ConfigError(where, got=f"{column[~np.isfinite(column)][0]}", expected="whole numbers")
        if column.dtype.kind != "f" or (column != np.floor(column)).any():
            raise ConfigError(where, got=f"values of type {column.dtype}", expected="whole numbers")
    if len(column) and column.max() >= _LARGEST:
        raise ConfigError(where, got=int(column.max()), expected="numbers below 2^62")
    column = np.ascontiguousarray(column, dtype=np.int64)
    if (column < 0).any():
        raise ConfigError(where, got=int(column.min()), expected="costs of at least 0")
    return column


# ---- packers of the user


def packer_source(strategy: str) -> str | None:
    """A hash of the source of a user-defined packer; None for the others."""
    return digest(_load_packer(strategy)[1]) if names_function(strategy) else None


def _user_packs(sizes: np.ndarray, capacities: np.ndarray, strategy: str, seed: int | None) -> Grouped:
    """Order and offsets of the packs that `packing_strategy: module:function` makes, checked.

        def pack(sizes, capacities, seed): return [[0, 2], [1]]

    `sizes` (samples, limits) and `capacities` (limits,) are whole numbers: tokens first, then the other limits that are
    set, in the order of the documented table. `seed` is None where the order of the dataset is to be kept. What comes
    back is the samples of each pack: every sample once, every pack within the limits.
    """
    function, _ = _load_packer(strategy)
    try:
        packs = [_positions(pack) for pack in function(sizes.copy(), capacities.copy(), seed)]
    except Exception as error:  # the user's code can fail in any way
        raise _wrong_packs(strategy, f"it raised {type(error).__name__}: {error}") from error
    order = np.concatenate([np.empty(0, np.int64), *packs])
    lengths = np.array([len(pack) for pack in packs], np.int64)
    for pack in np.flatnonzero(lengths == 0)[:1]:
        raise _wrong_packs(strategy, f"pack {pack} is empty")
    for sample in order[(order < 0) | (order >= len(sizes))][:1]:
        raise _wrong_packs(strategy, f"sample {sample} of {len(sizes):,}")
    times = np.bincount(order, minlength=len(sizes))
    for sample in np.flatnonzero(times != 1)[:1]:
        raise _wrong_packs(strategy, f"sample {sample} in {times[sample] or 'no'} packs")
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    loads = np.add.reduceat(sizes[order], offsets[:-1]) if len(packs) else sizes[:0]
    for pack, limit in np.argwhere(loads > capacities)[:1]:
        raise _wrong_packs(strategy, f"pack {pack} holds {loads[pack, limit]:,}, the limit is {capacities[limit]:,}")
    return order, offsets


def _positions(pack: Iterable[int]) -> np.ndarray:
    positions = np.array(list(pack))
    if positions.size and positions.dtype.kind not in "iu":
        raise TypeError(f"a pack of {positions.dtype}, not of integers")
    return positions.astype(np.int64)


def _load_packer(strategy: str) -> tuple[Callable[..., Any], str]:
    return load_function(strategy, where=f"packing_strategy {strategy}", example="my_packer:pack")


def _wrong_packs(strategy: str, got: str) -> ConfigError:
    return ConfigError(
        f"packing_strategy {strategy}",
        got=got,
        expected="lists of samples: each sample in exactly one pack, each pack within the limits",
        fix="see docs/guides/packing.md for the arguments and return value of the function",
    )
