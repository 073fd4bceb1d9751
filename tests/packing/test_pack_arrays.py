"""Packing arrays: any type and size of numbers, and mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lengths import check_packs, lvis_like, packs_of

from packtrain.core.errors import ConfigError
from packtrain.packing.arrays import Packing, check_strategy, pack_arrays, window_size

NAMES = ("best_fit", "first_fit", "next_fit", "window_5", "knapsack", "none")


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


# ---- mistakes


@pytest.mark.parametrize(
    ("resources", "capacities", "words"),
    [
        ({"tokens": [1, np.nan]}, {"tokens": 4}, "nan"),
        ({"tokens": [1, np.inf]}, {"tokens": 4}, "inf"),
        ({"tokens": [1, 2.5]}, {"tokens": 4}, "whole numbers"),
        ({"tokens": [1, -2]}, {"tokens": 4}, "-2"),
        ({"tokens": [1, 0]}, {"tokens": 4}, "sample 1 has no cost"),
        ({"tokens": [1, 0], "images": [0, 0]}, {"tokens": 4, "images": 1}, "sample 1 has no cost"),
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
    assert window_size(name) is None
    with pytest.raises(ConfigError):
        check_strategy(name)


@pytest.mark.parametrize(
    ("effort", "hint"), [("fast ", "did you mean 'fast'"), ("bst", "did you mean 'best'"), (None, "fast")]
)
def test_unknown_effort_is_refused_with_the_nearest(effort: Any, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint):
        pack_arrays({"tokens": [1]}, {"tokens": 4}, effort=effort)
