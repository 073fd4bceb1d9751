"""Packs that are alike: the same samples dealt again over the same number of packs.

Sorted best fit reaches the bound with packs that differ: some hold three long samples, others thirty short ones with
thirty images. Here most samples are dealt out by decreasing size, each to the pack that is emptiest so far, and only
the short ones fill the gaps. A few are left over because the gaps that remain are too small for them. Gaps are then
gathered: two packs exchange a sample each whose sizes differ by the gap of one, which adds it to the gap of the other:

    gaps 3 and 40    [ ... 805 ... ]  [ ... 808 ... ]    exchange 805 and 808    gaps 0 and 43

Where everything finds a place, packs have nearly equal work and a step of them nearly the composition of the dataset.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from packtrain.core.seeds import stream
from packtrain.packing.sorted_best_fit import decreasing, file_gap, smallest_gap, take_gap

_VISITS = 6  # pairs of packs looked at while gaps are gathered, for each pack there is
_LOOKS = 96  # packs passed over and pairs of samples compared, for each sample: bounds packs of very many samples


@njit(cache=True)
def _deal(order: np.ndarray, starts: np.ndarray, capacity: int, packs: int, dealt: int) -> np.ndarray:
    """The pack of every sample in decreasing order, -1 for those left over; best fit once `dealt` tokens are placed."""
    gaps = np.zeros((capacity >> 6) + 1, np.uint64)
    words = np.zeros((len(gaps) >> 6) + 1, np.uint64)
    newest = np.full(capacity + 1, -1, np.int32)
    older = np.empty(packs, np.int32)
    for pack in range(packs - 1, -1, -1):
        file_gap(gaps, words, newest, older, capacity, pack)
    packs_of = np.empty(len(order), np.int32)
    emptiest, largest, placed = capacity, len(starts) - 2, 0
    for rank in range(largest + 1):
        size = largest - rank
        for k in range(starts[rank], starts[rank + 1]):
            while emptiest and newest[emptiest] < 0:
                emptiest -= 1
            if emptiest < size:
                packs_of[k] = -1
                continue
            gap = emptiest if placed < dealt else smallest_gap(gaps, words, size)
            pack = take_gap(gaps, words, newest, older, gap)
            file_gap(gaps, words, newest, older, gap - size, pack)
            packs_of[k] = pack
            placed += size
    return packs_of


@njit(cache=True)
def _take_out(sample: int, pack: int, head: np.ndarray, after: np.ndarray) -> None:
    if head[pack] == sample:
        head[pack] = after[sample]
        return
    before = head[pack]
    while after[before] != sample:
        before = after[before]
    after[before] = after[sample]


@njit(cache=True)
def _gather(
    sizes: np.ndarray,
    gap: np.ndarray,
    head: np.ndarray,
    after: np.ndarray,
    pack: int,
    other: int,
    wanted: int,
    looks: int,
) -> int:
    """Exchange one sample of two packs so that the gap of `pack` grows by what `other` can give; the looks it took."""
    most = min(gap[other], wanted)
    best, ours, theirs, looked = 0, -1, -1, 0
    b = head[pack]
    while b >= 0 and best < most and looked < looks:
        a = head[other]
        while a >= 0:
            grows = sizes[b] - sizes[a]
            if best < grows <= most:
                best, ours, theirs = grows, b, a
            looked += 1
            a = after[a]
        b = after[b]
    if ours < 0:
        return looked
    _take_out(ours, pack, head, after)
    _take_out(theirs, other, head, after)
    after[theirs], head[pack] = head[pack], theirs
    after[ours], head[other] = head[other], ours
    gap[pack] += best
    gap[other] -= best
    return looked


@njit(cache=True)
def _place_rest(
    sizes: np.ndarray,
    left_over: np.ndarray,
    gap: np.ndarray,
    head: np.ndarray,
    after: np.ndarray,
    visits: int,
    looks: int,
) -> bool:
    """Find a place for every sample that was left over, or False."""
    packs = len(gap)
    at = 0
    for sample in left_over:
        pack = at
        for k in range(min(64, packs)):
            if gap[(at + k) % packs] > gap[pack]:
                pack = (at + k) % packs
        other = (pack + 1) % packs
        while gap[pack] < sizes[sample]:
            if visits <= 0 or looks <= 0:
                return False
            looks -= 1
            if gap[other] > 0 and other != pack:
                visits -= 1
                looks -= _gather(sizes, gap, head, after, pack, other, sizes[sample] - gap[pack], looks)
            other = (other + 1) % packs
        at = other
        after[sample], head[pack] = head[pack], sample
        gap[pack] -= sizes[sample]
    return True


@njit(cache=True)
def _deal_again(
    sizes: np.ndarray, order: np.ndarray, starts: np.ndarray, capacity: int, packs: int, dealt: int
) -> tuple[bool, np.ndarray, np.ndarray]:
    """Whether every sample found a place, then order and offsets."""
    packs_of = _deal(order, starts, capacity, packs, dealt)
    head, after = np.full(packs, -1, np.int32), np.full(len(sizes), -1, np.int32)
    gap = np.full(packs, capacity, np.int64)
    left_over = np.empty((packs_of < 0).sum(), np.int64)
    lost = 0
    for k in range(len(order)):
        sample, pack = order[k], packs_of[k]
        if pack < 0:
            left_over[lost] = sample
            lost += 1
        else:
            after[sample], head[pack] = head[pack], sample
            gap[pack] -= sizes[sample]
    whole = _place_rest(sizes, left_over, gap, head, after, _VISITS * packs, _LOOKS * len(sizes))
    grouped, offsets = np.empty(len(sizes), np.int64), np.zeros(packs + 1, np.int64)
    k = 0
    for pack in range(packs):
        sample = head[pack]
        while sample >= 0:
            grouped[k] = sample
            k += 1
            sample = after[sample]
        offsets[pack + 1] = k
    return whole, grouped, offsets


def even_packs(
    sizes: np.ndarray, capacity: int, packs: int, seed: int | None, shares: tuple[float, ...]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Order and offsets of exactly `packs` packs that are alike, or None where they cannot be found this way.

    `shares` of all tokens are dealt to the emptiest pack before gaps are filled, the first that works out: the larger
    the share, the more packs are alike and the harder it is to place the rest.
    """
    if packs < 2 or len(sizes) < 2 * packs:
        return None
    state = np.uint64(0) if seed is None else stream(seed, "even").integers(1, 2**63, dtype=np.uint64)
    order, starts = decreasing(sizes, int(sizes.max()), state, seed is not None)
    total = int(sizes.sum())
    for share in shares:
        whole, grouped, offsets = _deal_again(sizes, order, starts, capacity, packs, int(share * total))
        if whole and (np.diff(offsets) > 0).all():
            return grouped, offsets
    return None
