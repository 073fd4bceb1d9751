"""Every strategy partitions the samples into packs within the limits, and does what its name says."""

from __future__ import annotations

import os
import subprocess
import sys
from operator import le
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lengths import KINDS, check_packs, digest_of, lvis_like, packed, packs_of

from packtrain.core.errors import ConfigError
from packtrain.plans.arrays import (
    Packing,
    binding_resources,
    check_strategy,
    lower_bound,
    pack_arrays,
    window_of,
)

NAMES = ("best_fit", "first_fit", "next_fit", "window_5", "knapsack", "none")
WITH_ALIKE = (*NAMES, "alike")  # best fit that also makes packs similar
seeds = st.one_of(st.none(), st.integers(0, 2**40))


@st.composite
def instances(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Sizes (samples, resources), each of which fits alone, none of which needs nothing; and capacities."""
    resources = draw(st.integers(1, 3))
    capacities = [draw(st.integers(1, 60)) for _ in range(resources)]
    count = draw(st.integers(0, 40))
    few = draw(st.booleans())  # few different sizes make ties
    column = [st.sampled_from([0, 1, c // 2, c]) if few else st.integers(0, c) for c in capacities]
    rows = draw(st.lists(st.tuples(*column), min_size=count, max_size=count))
    rows = [row if any(row) else (capacities[0], *row[1:]) for row in rows]
    return np.array(rows, np.int64).reshape(count, resources), np.array(capacities, np.int64)


@pytest.mark.parametrize("kind", WITH_ALIKE)
@settings(max_examples=40, deadline=None)
@given(instance=instances(), seed=seeds)
@example(instance=(np.zeros((0, 1), np.int64), np.array([4])), seed=0)
@example(instance=(np.array([[4]]), np.array([4])), seed=0)
@example(instance=(np.full((30, 1), 4), np.array([4])), seed=1)  # as large as the capacity
@example(instance=(np.full((30, 2), 3), np.array([4, 7])), seed=1)  # all equal
@example(instance=(np.ones((40, 1), np.int64), np.array([60])), seed=None)  # everything in one pack
def test_packs_partition_the_samples_within_the_limits(
    kind: str, instance: tuple[np.ndarray, np.ndarray], seed: int | None
) -> None:
    sizes, capacities = instance
    before = sizes.copy()
    order, offsets = packed(kind, sizes, capacities, seed)
    check_packs(order, offsets, sizes, capacities)
    assert (sizes == before).all()
    again = packed(kind, sizes, capacities, seed)
    assert (again[0] == order).all()
    assert (again[1] == offsets).all()


@pytest.mark.parametrize("strategy", NAMES)
@settings(max_examples=20, deadline=None)
@given(instance=instances(), data=st.data())
def test_what_is_larger_than_a_pack_is_dropped_and_nothing_else(
    strategy: str, instance: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    sizes, capacities = instance
    too_large = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    which = data.draw(st.integers(0, len(capacities) - 1))
    sizes = sizes.copy()
    sizes[np.flatnonzero(too_large), which] = capacities[which] + 1
    names = [f"r{n}" for n in range(len(capacities))]
    found = pack_arrays(
        dict(zip(names, sizes.T, strict=True)), dict(zip(names, capacities.tolist(), strict=True)), strategy
    )
    assert found.dropped.tolist() == np.flatnonzero(too_large).tolist()
    kept = np.flatnonzero(~np.array(too_large, bool)) if len(sizes) else np.zeros(0, int)
    assert sorted(found.order.tolist()) == kept.tolist()
    position = np.searchsorted(kept, found.order)
    check_packs(position, found.offsets, sizes[kept], capacities)
    for column in sizes.T:
        assert found.loads(column).tolist() == [
            sum(column[pack].tolist()) for pack in map(found.pack, range(found.num_packs))
        ]


@pytest.mark.parametrize("kind", WITH_ALIKE)
@pytest.mark.parametrize("resources", [1, 2])
def test_thousands_of_samples(kind: str, resources: int) -> None:
    columns = lvis_like(3_000)
    sizes = np.stack([columns["tokens"], columns["patches"]][:resources], axis=1)
    capacities = np.array([20_000, 16_000][:resources])
    assert len(binding_resources(sizes, capacities)) == resources, "the second limit is to bind"
    order, offsets = packed("window_500" if kind == "window_5" else kind, sizes, capacities, 3)
    check_packs(order, offsets, sizes, capacities)
    assert len(offsets) - 1 >= lower_bound(sizes, capacities)


@pytest.mark.parametrize("kind", [kind for kind in WITH_ALIKE if kind != "none"])
@pytest.mark.parametrize("limits", [1, 2])
def test_seeds_change_the_packs(kind: str, limits: int) -> None:
    columns = lvis_like(400)
    sizes = np.stack([columns["tokens"] // 8 + 1, columns["patches"] // 64][:limits], axis=1)
    capacities = np.array([2_600, 260][:limits])
    assert len(binding_resources(sizes, capacities)) == limits, "the second limit is to bind"
    found = {tuple(map(tuple, packs_of(*packed(kind, sizes, capacities, seed)))) for seed in range(6)}
    assert len(found) == 6


def test_another_process_finds_the_same_packs() -> None:
    program = "from lengths import *; print([digest_of(kind, r, 11) for kind in KINDS for r in (1, 2)])"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTHONHASHSEED": "1"}
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert child.stdout.strip() == str([digest_of(kind, r, 11) for kind in KINDS for r in (1, 2)])


# ---- what single strategies promise


def next_fit_reference(sizes: np.ndarray, capacities: np.ndarray) -> list[list[int]]:
    """One open pack; a sample that does not fit closes it."""
    packs: list[list[int]] = []
    for sample, size in enumerate(sizes):
        if packs and (sizes[packs[-1]].sum(axis=0) + size <= capacities).all():
            packs[-1].append(sample)
        else:
            packs.append([sample])
    return packs


def first_fit_reference(sizes: np.ndarray, capacities: np.ndarray, order: np.ndarray) -> list[list[int]]:
    """Each sample into the first pack that holds it."""
    packs: list[list[int]] = []
    left: list[list[int]] = []
    for sample in order.tolist():
        size = sizes[sample].tolist()
        at = next((n for n, room in enumerate(left) if all(map(le, size, room))), len(left))
        if at == len(left):
            packs.append([])
            left.append(capacities.tolist())
        packs[at].append(sample)
        left[at] = [room - used for room, used in zip(left[at], size, strict=True)]
    return packs


@settings(max_examples=60, deadline=None)
@given(instance=instances())
def test_next_fit_in_the_given_order_is_next_fit(instance: tuple[np.ndarray, np.ndarray]) -> None:
    sizes, capacities = instance
    assert packs_of(*packed("next_fit", sizes, capacities, None)) == next_fit_reference(sizes, capacities)


@settings(max_examples=60, deadline=None)
@given(instance=instances())
def test_first_fit_in_the_given_order_is_first_fit(instance: tuple[np.ndarray, np.ndarray]) -> None:
    # Fewer samples than a pack of several resources is asked before it is closed, so this is exact for several too.
    sizes, capacities = instance
    expected = first_fit_reference(sizes, capacities, np.arange(len(sizes)))
    assert packs_of(*packed("first_fit", sizes, capacities, None)) == expected


def test_first_fit_stays_exact_when_its_tree_grows() -> None:
    sizes = np.minimum(np.random.default_rng(5).integers(1, 100, (2_000, 1)), 60)
    expected = first_fit_reference(sizes, np.array([60]), np.arange(len(sizes)))
    assert len(expected) > 1024, "the tree starts with room for 1,024 packs"
    assert packs_of(*packed("first_fit", sizes, np.array([60]), None)) == expected


def test_first_fit_with_several_limits_closes_packs_that_were_asked_in_vain() -> None:
    # Tokens and images exclude each other: all packs promise room for either, and few have room for both.
    random = np.random.default_rng(2)
    sizes = np.where(random.random((2_000, 1)) < 0.5, [[60, 1]], [[1, 60]]) + random.integers(0, 30, (2_000, 2))
    capacities = np.array([100, 100])
    order, offsets = packed("first_fit", sizes, capacities, 0)
    check_packs(order, offsets, sizes, capacities)
    assert len(offsets) - 1 <= 1.05 * len(first_fit_reference(sizes[:600], capacities, np.arange(600))) / 600 * 2_000


@settings(max_examples=80, deadline=None)
@given(instance=instances(), seed=seeds)
def test_best_fit_is_not_worse_than_its_bounds(instance: tuple[np.ndarray, np.ndarray], seed: int | None) -> None:
    sizes, capacities = instance
    column, limit = sizes[:, :1], capacities[:1]
    column = np.maximum(column, 1)
    packs = len(packed("best_fit", column, limit, seed)[1]) - 1
    decreasing = np.argsort(-column[:, 0], kind="stable")
    least = lower_bound(column, limit)
    # Best fit decreasing can lose against first fit decreasing on instances made for it, never by more than this.
    reference = len(first_fit_reference(column, limit, decreasing))
    assert least <= packs <= max(reference, least + least * 2 // 9 + 1)
    assert len(packed("alike", column, limit, seed)[1]) - 1 == packs


@pytest.mark.parametrize("seed", [0, 1])
def test_best_fit_is_not_worse_than_first_fit_decreasing_on_usual_lengths(seed: int) -> None:
    sizes, capacity = lvis_like(2_000, seed)["tokens"][:, None], np.array([20_000])
    decreasing = np.argsort(-sizes[:, 0], kind="stable")
    reference = len(first_fit_reference(sizes, capacity, decreasing))
    assert len(packed("best_fit", sizes, capacity, seed)[1]) - 1 <= reference
    assert len(packed("next_fit", sizes, capacity, seed)[1]) - 1 > reference, "too easy to tell packers apart"


def best_fit_decreasing_reference(sizes: list[int], capacity: int) -> list[int]:
    """What each pack holds at the end, sorted: it does not depend on which of two equal gaps is taken."""
    left: list[int] = []
    for size in sorted(sizes, reverse=True):
        room = [gap for gap in left if gap >= size]
        if room:
            left.remove(min(room))
            left.append(min(room) - size)
        else:
            left.append(capacity - size)
    return sorted(capacity - gap for gap in left)


@pytest.mark.parametrize("capacity", [1, 63, 64, 65, 127, 128, 129, 4_095, 4_096, 4_097, 9_000])
@pytest.mark.parametrize("seed", [0, None])
def test_best_fit_is_best_fit_decreasing_across_words_of_its_bitmap(capacity: int, seed: int | None) -> None:
    sizes = np.random.default_rng(capacity).integers(1, capacity + 1, 400)
    found = pack_arrays({"tokens": sizes}, {"tokens": capacity}, "best_fit", seed)
    assert sorted(found.loads(sizes).tolist()) == best_fit_decreasing_reference(sizes.tolist(), capacity)


@settings(max_examples=60, deadline=None)
@given(instance=instances(), window=st.integers(1, 50), seed=seeds)
def test_windows_hold_consecutive_samples(
    instance: tuple[np.ndarray, np.ndarray], window: int, seed: int | None
) -> None:
    sizes, capacities = instance
    packs = packs_of(*packed(f"window_{window}", sizes, capacities, seed))
    assert all(len({sample // window for sample in pack}) == 1 for pack in packs)
    stretches = [pack[0] // window for pack in packs]
    assert stretches == sorted(stretches)
    for start in range(0, len(sizes), window):
        alone = len(packed("best_fit", sizes[start : start + window], capacities, None)[1]) - 1
        if len(binding_resources(sizes[start : start + window], capacities)) == 1:
            assert stretches.count(start // window) == alone


def test_a_window_larger_than_the_set_is_best_fit_of_all() -> None:
    sizes, capacity = lvis_like(200)["tokens"][:, None], np.array([20_000])
    for window in ("window_200", "window_99999999999999999999999"):
        assert packs_of(*packed(window, sizes, capacity, 4)) == packs_of(*packed("best_fit", sizes, capacity, 4))


def test_none_is_one_sample_to_a_pack() -> None:
    found = pack_arrays({"tokens": [3, 1, 2]}, {"tokens": 10}, "none", seed=None)
    assert packs_of(found.order, found.offsets) == [[0], [1], [2]]
    shuffled = pack_arrays({"tokens": range(1, 101)}, {"tokens": 100}, "none", seed=0)
    assert shuffled.order.tolist() != list(range(100))


def test_without_a_seed_equal_samples_keep_their_order() -> None:
    found = pack_arrays({"tokens": [4] * 12}, {"tokens": 8}, "best_fit", seed=None)
    assert found.order.tolist() == list(range(12))
    for kind in ("first_fit", "next_fit"):
        assert pack_arrays({"tokens": [4] * 12}, {"tokens": 8}, kind, seed=None).order.tolist() == list(range(12))


@pytest.mark.parametrize("kind", ["knapsack", "alike"])
def test_packs_made_alike_differ_less_in_attention(kind: str) -> None:
    sizes, capacities = lvis_like(3_000)["tokens"][:, None], np.array([20_000])

    def spread(kind: str) -> tuple[float, int]:
        order, offsets = packed(kind, sizes, capacities, 0)
        squares = np.add.reduceat(sizes[order, 0].astype(float) ** 2, offsets[:-1])
        return float(squares.std()), len(offsets) - 1

    (even, packs), (uneven, fewest) = spread(kind), spread("best_fit")
    assert even < 0.9 * uneven
    assert packs <= 1.01 * fewest


def test_knapsack_with_several_limits_stays_near_the_bound() -> None:
    columns = lvis_like(3_000)
    sizes, capacities = np.stack([columns["tokens"], columns["patches"]], axis=1), np.array([20_000, 24_000])
    assert len(packed("knapsack", sizes, capacities, 0)[1]) - 1 <= 1.08 * lower_bound(sizes, capacities)


@pytest.mark.parametrize("kind", WITH_ALIKE)
def test_samples_of_one_size_do_not_take_for_ever(kind: str) -> None:
    # Thousands of equal samples in one pack: whatever compares pairs of samples of two packs must give up.
    sizes, capacities = np.full((200_000, 1), 3), np.array([20_000])
    order, offsets = packed("window_100000" if kind == "window_5" else kind, sizes, capacities, 0)
    assert np.bincount(order, minlength=len(sizes)).tolist() == [1] * len(sizes)
    assert np.diff(offsets).max() <= 20_000 // 3


# ---- sizes far apart


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("capacity", [2**24, 2**24 + 1, 2**40, 2**61])
def test_huge_capacities(strategy: str, capacity: int) -> None:
    random = np.random.default_rng(3)
    sizes = random.integers(1, min(capacity, 2**50), 60)
    sizes[:3] = min(capacity, 2**50)
    found = pack_arrays({"attention": sizes}, {"attention": capacity}, strategy)
    check_packs(found.order, found.offsets, sizes[:, None], np.array([capacity]))


@pytest.mark.parametrize("strategy", NAMES)
def test_attention_beside_tokens(strategy: str) -> None:
    tokens = lvis_like(500)["tokens"]
    found = pack_arrays(
        {"tokens": tokens, "attention": tokens**2}, {"tokens": 32_768, "attention": 20_000**2}, strategy
    )
    sizes = np.stack([tokens, tokens**2], axis=1)
    check_packs(found.order, found.offsets, sizes, np.array([32_768, 20_000**2]))


@pytest.mark.parametrize("strategy", NAMES)
def test_sums_that_64_bits_do_not_hold_are_refused(strategy: str) -> None:
    with pytest.raises(ConfigError, match="2\\^62"):
        pack_arrays({"tokens": [2**61] * 8}, {"tokens": 2**61 + 5}, strategy)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.uint8, np.uint16, np.uint64, np.float32, np.float64])
@pytest.mark.parametrize("strategy", NAMES)
def test_types_of_numbers_do_not_matter(strategy: str, dtype: Any) -> None:
    sizes = np.random.default_rng(0).integers(1, 100, 80)
    plain = pack_arrays({"tokens": sizes}, {"tokens": 120}, strategy)
    other = pack_arrays({"tokens": sizes.astype(dtype)}, {"tokens": np.int32(120)}, strategy)
    listed = pack_arrays({"tokens": sizes.tolist()}, {"tokens": 120}, strategy)
    strided = pack_arrays({"tokens": np.repeat(sizes, 2)[::2]}, {"tokens": 120}, strategy)
    for found in (other, listed, strided):
        assert packs_of(found.order, found.offsets) == packs_of(plain.order, plain.offsets)


def test_loads_of_small_types_do_not_overflow() -> None:
    packing = Packing(order=np.arange(4), offsets=np.array([0, 4]), dropped=np.zeros(0, int))
    assert packing.loads(np.full(4, 200, np.uint8)).tolist() == [800]
    assert packing.loads(np.full(4, 2**31 - 1, np.int32)).tolist() == [4 * (2**31 - 1)]


@pytest.mark.parametrize("strategy", NAMES)
def test_nothing_to_pack(strategy: str) -> None:
    found = pack_arrays({"tokens": []}, {"tokens": 10}, strategy)
    assert (found.num_packs, len(found.order), len(found.dropped)) == (0, 0, 0)
    assert found.loads(np.zeros(0, np.int64)).tolist() == []
    dropped = pack_arrays({"tokens": [11, 12]}, {"tokens": 10}, strategy)
    assert (dropped.num_packs, dropped.dropped.tolist()) == (0, [0, 1])
    with pytest.raises(IndexError):
        dropped.pack(0)


def test_packs_are_counted_from_zero() -> None:
    found = pack_arrays({"tokens": [10, 10, 10]}, {"tokens": 10})
    assert sorted(found.pack(number).item() for number in range(3)) == [0, 1, 2]
    for number in (-1, 3):
        with pytest.raises(IndexError, match="of 3"):
            found.pack(number)


# ---- limits that cannot bind


@settings(max_examples=80, deadline=None)
@given(instance=instances())
def test_limits_left_out_cannot_stop_a_pack(instance: tuple[np.ndarray, np.ndarray]) -> None:
    sizes, capacities = instance
    if not len(sizes):
        return
    binding = binding_resources(sizes, capacities)
    assert binding
    for resource in set(range(len(capacities))) - set(binding):
        share = sizes[:, resource] / capacities[resource]
        assert any((share <= sizes[:, other] / capacities[other] + 1e-12).all() for other in binding)


def test_limits_are_compared_exactly() -> None:
    # In floating point both shares are equal; in whole numbers the second is a little larger for one sample.
    capacities = np.array([2**60, 2**60])
    sizes = np.array([[2**59, 2**59 + 1], [2**59 + 1, 2**59]])
    assert binding_resources(sizes, capacities) == [0, 1]
    assert binding_resources(sizes[:1], capacities) == [1]
    assert binding_resources(np.full((3, 2), 5), np.array([10, 10])) in ([0], [1])


# ---- mistakes


@pytest.mark.parametrize(
    ("resources", "capacities", "words"),
    [
        ({"tokens": [1, np.nan]}, {"tokens": 4}, "nan"),
        ({"tokens": [1, np.inf]}, {"tokens": 4}, "inf"),
        ({"tokens": [1, 2.5]}, {"tokens": 4}, "whole numbers"),
        ({"tokens": [1, -2]}, {"tokens": 4}, "-2"),
        ({"tokens": [1, 0]}, {"tokens": 4}, "sample 1 needs nothing"),
        ({"tokens": [1, 0], "images": [0, 0]}, {"tokens": 4, "images": 1}, "sample 1 needs nothing"),
        ({"tokens": [True, False]}, {"tokens": 4}, "bool"),
        ({"tokens": ["1", "2"]}, {"tokens": 4}, "whole numbers"),
        ({"tokens": [1, 2**70]}, {"tokens": 4}, "whole numbers"),
        ({"tokens": [1.0, 1e19]}, {"tokens": 4}, "2\\^62"),
        ({"tokens": np.array([1, 2**63], np.uint64)}, {"tokens": 4}, "2\\^62"),
        ({"tokens": [[1, 2]]}, {"tokens": 4}, "shape \\(1, 2\\)"),
        ({"tokens": 3}, {"tokens": 4}, "shape"),
        ({"tokens": [1, 2], "images": [1]}, {"tokens": 4, "images": 1}, "tokens: 2, images: 1"),
        ({"tokens": [1]}, {"token": 4}, "did you mean 'tokens'"),
        ({"tokens": [1]}, {}, "at least one resource"),
        ({"tokens": [1]}, {"tokens": 0}, "positive"),
        ({"tokens": [1]}, {"tokens": -3}, "positive"),
        ({"tokens": [1]}, {"tokens": True}, "positive"),
        ({"tokens": [1]}, {"tokens": 4.0}, "positive"),
        ({"tokens": [1]}, {"tokens": 2**62}, "positive"),
        ({"tokens": [1]}, {"tokens": None}, "positive"),
    ],
)
def test_bad_input_is_refused_with_a_reason(resources: Any, capacities: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        pack_arrays(resources, capacities)


def test_resources_without_a_capacity_are_not_looked_at() -> None:
    assert pack_arrays({"tokens": [1, 2], "images": [-1]}, {"tokens": 3}).num_packs == 1


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("bestfit", "best_fit"),
        ("windows_100", "window_1000"),
        ("knapsak", "knapsack"),
        ("window_0", "window_"),
        (None, "best_fit"),
    ],
)
def test_unknown_strategies_are_refused_with_the_nearest(name: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as error:
        pack_arrays({"tokens": [1]}, {"tokens": 4}, name)
    assert error.value.where == "packing_strategy"


@pytest.mark.parametrize("name", ["window_-1", "window_1.5", "window_", "window_N", " window_3", "window_3\n"])
def test_windows_need_a_whole_number(name: str) -> None:
    assert window_of(name) is None
    with pytest.raises(ConfigError):
        check_strategy(name)


@pytest.mark.parametrize(
    ("effort", "hint"), [("fast ", "did you mean 'fast'"), ("bst", "did you mean 'best'"), (None, "fast")]
)
def test_unknown_effort_is_refused_with_the_nearest(effort: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        pack_arrays({"tokens": [1]}, {"tokens": 4}, effort=effort)
