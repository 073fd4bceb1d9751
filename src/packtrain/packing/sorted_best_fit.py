"""Best fit in decreasing order for one resource: at the bound on real lengths, and several million samples a second.

Packs are filed by the capacity they have left. A two-level bitmap of the sizes of gap that exist answers "the smallest
gap that holds this sample" in a handful of instructions, so a sample costs the same whatever the number of packs.

    left     0 1 2 3 4 5 6 ...      gaps that exist: one bit each, 64 to a word
    word     0 0 1 0 0 1 0 ...      words that are not empty: one bit each
"""

from __future__ import annotations

import numpy as np
from numba import njit

from packtrain.core.seeds import stream

_ONES = np.uint64(0xFFFFFFFFFFFFFFFF)
_FEW_SAMPLES = 1 << 16  # with more, equal sizes are many
_BLURS = (0.3, 0.1, 0.03, 0.01)


@njit(cache=True, inline="always")
def _lowest_bit(word: np.uint64) -> int:
    """Position of the lowest set bit; the word is not 0."""
    word = word & (~word + np.uint64(1))
    position = 0
    if word & np.uint64(0xFFFFFFFF00000000):
        position += 32
    if word & np.uint64(0xFFFF0000FFFF0000):
        position += 16
    if word & np.uint64(0xFF00FF00FF00FF00):
        position += 8
    if word & np.uint64(0xF0F0F0F0F0F0F0F0):
        position += 4
    if word & np.uint64(0xCCCCCCCCCCCCCCCC):
        position += 2
    if word & np.uint64(0xAAAAAAAAAAAAAAAA):
        position += 1
    return position


@njit(cache=True, inline="always")
def _from(position: int) -> np.uint64:
    """A word with all bits from `position` on."""
    return _ONES << np.uint64(position)


@njit(cache=True, inline="always")
def smallest_gap(gaps: np.ndarray, words: np.ndarray, size: int) -> int:
    """The smallest gap that holds `size`, or -1."""
    at = size >> 6
    word = gaps[at] & _from(size & 63)
    if word:
        return (at << 6) + _lowest_bit(word)
    at += 1
    upper = at >> 6
    if upper >= len(words):
        return -1
    word = words[upper] & _from(at & 63)
    while not word:
        upper += 1
        if upper >= len(words):
            return -1
        word = words[upper]
    at = (upper << 6) + _lowest_bit(word)
    return (at << 6) + _lowest_bit(gaps[at])


@njit(cache=True)
def take_gap(gaps: np.ndarray, words: np.ndarray, newest: np.ndarray, older: np.ndarray, gap: int) -> int:
    """A pack with a gap of this size, which is then no longer filed."""
    pack = newest[gap]
    newest[gap] = older[pack]
    if newest[gap] < 0:
        gaps[gap >> 6] &= ~(np.uint64(1) << np.uint64(gap & 63))
        if not gaps[gap >> 6]:
            words[gap >> 12] &= ~(np.uint64(1) << np.uint64((gap >> 6) & 63))
    return pack


@njit(cache=True)
def file_gap(gaps: np.ndarray, words: np.ndarray, newest: np.ndarray, older: np.ndarray, gap: int, pack: int) -> None:
    """File a pack under the size of its gap."""
    if newest[gap] < 0:
        gaps[gap >> 6] |= np.uint64(1) << np.uint64(gap & 63)
        words[gap >> 12] |= np.uint64(1) << np.uint64((gap >> 6) & 63)
    older[pack] = newest[gap]
    newest[gap] = pack


@njit(cache=True)
def decreasing(sizes: np.ndarray, largest: int, state: np.uint64, shuffle: bool) -> tuple[np.ndarray, np.ndarray]:
    """Positions by decreasing size, equal sizes in random order with `shuffle`, and where each size begins."""
    starts = np.zeros(largest + 2, np.int64)
    for size in sizes:
        starts[largest - size + 1] += 1
    for rank in range(1, largest + 2):
        starts[rank] += starts[rank - 1]
    order = np.empty(len(sizes), np.uint32)
    at = starts.copy()
    for position in range(len(sizes)):
        rank = largest - sizes[position]
        order[at[rank]] = position
        at[rank] += 1
    if shuffle:
        for rank in range(largest + 1):
            first = starts[rank]
            for last in range(starts[rank + 1] - 1, first, -1):
                state ^= state << np.uint64(13)
                state ^= state >> np.uint64(7)
                state ^= state << np.uint64(17)
                # the high half times the range, shifted down: a fair choice without a division
                pick = first + np.int64(((state >> np.uint64(32)) * np.uint64(last - first + 1)) >> np.uint64(32))
                order[last], order[pick] = order[pick], order[last]
    return order, starts


@njit(cache=True)
def _place(starts: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The pack of every sample in decreasing order. Sizes follow from `starts`, so nothing is read at random.

    Here the time goes for many samples: `take_gap` and `file_gap` are written out, as calls they halve the speed.
    """
    gaps = np.zeros((capacity >> 6) + 1, np.uint64)
    words = np.zeros((len(gaps) >> 6) + 1, np.uint64)
    newest = np.full(capacity + 1, -1, np.int32)  # of the packs with a gap of this size
    older = np.empty(1024, np.int32)  # the pack with the same gap that was filed before
    largest = len(starts) - 2
    packs_of = np.empty(starts[-1], np.int32)
    packs = 0
    for rank in range(largest + 1):
        size = largest - rank
        for k in range(starts[rank], starts[rank + 1]):
            gap = smallest_gap(gaps, words, size)
            if gap < 0:
                pack, gap = packs, capacity
                packs += 1
                if packs > len(older):
                    grown = np.empty(2 * len(older), np.int32)
                    grown[: len(older)] = older
                    older = grown
            else:
                pack = newest[gap]
                newest[gap] = older[pack]
                if newest[gap] < 0:
                    gaps[gap >> 6] &= ~(np.uint64(1) << np.uint64(gap & 63))
                    if not gaps[gap >> 6]:
                        words[gap >> 12] &= ~(np.uint64(1) << np.uint64((gap >> 6) & 63))
            left = gap - size
            if newest[left] < 0:
                gaps[left >> 6] |= np.uint64(1) << np.uint64(left & 63)
                words[left >> 12] |= np.uint64(1) << np.uint64((left >> 6) & 63)
            older[pack] = newest[left]
            newest[left] = pack
            packs_of[k] = pack
    return packs_of, packs


@njit(cache=True)
def _place_in_order(sizes: np.ndarray, order: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """The same for any order, a little slower."""
    gaps = np.zeros((capacity >> 6) + 1, np.uint64)
    words = np.zeros((len(gaps) >> 6) + 1, np.uint64)
    newest = np.full(capacity + 1, -1, np.int32)
    older = np.empty(len(order), np.int32)
    packs_of = np.empty(len(order), np.int32)
    packs = 0
    for k in range(len(order)):
        size = sizes[order[k]]
        gap = smallest_gap(gaps, words, size)
        if gap < 0:
            pack, gap = packs, capacity
            packs += 1
        else:
            pack = take_gap(gaps, words, newest, older, gap)
        file_gap(gaps, words, newest, older, gap - size, pack)
        packs_of[k] = pack
    return packs_of, packs


@njit(cache=True)
def group(order: np.ndarray, packs_of: np.ndarray, packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples listed pack by pack and where each pack begins; `packs_of[k]` is the pack of sample `order[k]`."""
    offsets = np.zeros(packs + 1, np.int64)
    for pack in packs_of:
        offsets[pack + 1] += 1
    for pack in range(packs):
        offsets[pack + 1] += offsets[pack]
    at = offsets[:-1].copy()
    grouped = np.empty(len(order), np.int64)
    for k in range(len(order)):
        pack = packs_of[k]
        grouped[at[pack]] = order[k]
        at[pack] += 1
    return grouped, offsets


def sorted_best_fit(sizes: np.ndarray, capacity: int, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Order and offsets of the packs; every size is from 0 to the capacity. `seed` decides between equal sizes.

    Where few samples are of equal size, that would be nearly the same packs for every seed. So in small sets the order
    by size is blurred, as much as costs no pack.
    """
    largest = int(sizes.max(initial=0))
    random = None if seed is None else stream(seed, "equal sizes")
    state = np.uint64(0) if random is None else random.integers(1, 2**63, dtype=np.uint64)
    order, starts = decreasing(sizes, largest, state, random is not None)
    packs_of, packs = _place(starts, capacity)
    if random is not None and len(sizes) <= _FEW_SAMPLES:
        for blur in _BLURS:
            blurred = np.argsort(-sizes * (1 + blur * random.random(len(sizes))), kind="stable")
            other, count = _place_in_order(sizes, blurred, capacity)
            if count <= packs:
                return group(blurred, other, count)
    return group(order, packs_of, packs)
