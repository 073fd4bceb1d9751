"""Packs that are alike: exactly as many as asked for, or none at all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import check_packs, lvis_like, packs_of

from packtrain.packing.knapsack import even_packs
from packtrain.packing.sorted_best_fit import sorted_best_fit


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=2, max_size=80),
    room=st.integers(0, 40),
    packs=st.integers(1, 30),
    more=st.integers(0, 6),
    seed=st.one_of(st.none(), st.integers(0, 2**40)),
    share=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
)
def test_as_many_packs_as_asked_for_or_none(
    sizes: list[int], room: int, packs: int, more: int, seed: int | None, share: float
) -> None:
    found_sizes, capacity = np.array(sizes), max(sizes) + room
    if packs % 2:  # a number that can work out: as many as best fit needs, or some more
        packs = len(sorted_best_fit(found_sizes, capacity, None)[1]) - 1 + more
    found = even_packs(found_sizes, capacity, packs, seed, (share,))
    if packs < -(-sum(sizes) // capacity) or packs < 2 or len(sizes) < 2 * packs:
        assert found is None
    if found is not None:
        check_packs(*found, found_sizes[:, None], np.array([capacity]))
        assert len(found[1]) - 1 == packs
        again = even_packs(found_sizes, capacity, packs, seed, (share,))
        assert again is not None
        assert packs_of(*again) == packs_of(*found)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("capacity", "share", "over"), [(20_000, 0.3, 1.005), (32_768, 0.9, 1.002)])
def test_usual_lengths_find_their_place_near_the_bound(capacity: int, share: float, over: float, seed: int) -> None:
    sizes = lvis_like(5_000, seed)["tokens"]
    packs = int(np.ceil(sizes.sum() / capacity * over))
    found = even_packs(sizes, capacity, packs, seed, (share,))
    assert found is not None
    check_packs(*found, sizes[:, None], np.array([capacity]))


def test_samples_left_over_are_placed_by_gathering_gaps() -> None:
    # At the bound there is hardly a gap, so that dealing alone leaves samples over nearly always.
    found = 0
    for seed in range(40):
        sizes = np.random.default_rng(seed).integers(1, 40, 200)
        capacity = 100
        packs = -(-int(sizes.sum()) // capacity)
        grouped = even_packs(sizes, capacity, packs, seed, (1.0,))
        if grouped is not None:
            check_packs(*grouped, sizes[:, None], np.array([capacity]))
            found += 1
    assert found >= 35


def test_the_first_share_that_works_out_is_taken() -> None:
    sizes = lvis_like(2_000)["tokens"]
    packs = int(np.ceil(sizes.sum() / 20_000 * 1.02))
    alone, first = (even_packs(sizes, 20_000, packs, 0, shares) for shares in ((0.6,), (0.6, 0.1)))
    assert alone is not None
    assert first is not None
    assert packs_of(*alone) == packs_of(*first)


def test_seeds_decide_between_equal_samples() -> None:
    sizes = lvis_like(2_000)["tokens"] // 50 + 1
    packs = int(np.ceil(sizes.sum() / 420 * 1.02))
    found = [even_packs(sizes, 420, packs, seed, (0.5,)) for seed in (0, 1)]
    assert None not in found
    first, second = (packs_of(*one) for one in found if one is not None)
    assert first != second


@pytest.mark.parametrize("packs", [0, 1, 4, 10])
def test_too_few_samples_for_the_packs(packs: int) -> None:
    assert even_packs(np.array([3] * 7), 100, packs, 0, (0.5,)) is None


def test_equal_samples_that_cannot_fit_are_given_up_soon() -> None:
    # 20,000 samples of 3 in 3 packs of 20,000: gaps of 2 that no exchange of equal samples can gather. Comparing every
    # pair of samples of two packs would be 44 million comparisons a pair of packs.
    assert even_packs(np.full(300_000, 3), 20_000, 45, 0, (0.9, 0.5, 0.3)) is None


def test_few_gaps_among_many_full_packs_are_given_up_soon() -> None:
    # Only packs of a 7 and a 4 have a gap, of 1, and nothing fits there; walking past full packs must be paid for too.
    sizes = np.concatenate([np.full(40, 7), np.full(300_000, 4)])
    assert even_packs(sizes, 12, 100_020, 0, (0.9,)) is None
