"""The simple packers: next fit, first fit, balanced knapsack. They take samples in the order given, any resources."""

from __future__ import annotations

import numpy as np
from numba import njit

# A pack that several resources make hard to judge from afar is closed after this many samples did not fit into it.
_PATIENCE = 256


@njit(cache=True)
def next_fit(sizes: np.ndarray, order: np.ndarray, capacities: np.ndarray) -> tuple[np.ndarray, int]:
    """One open pack; a sample that does not fit closes it."""
    packs_of = np.empty(len(order), np.int32)
    left = np.zeros_like(capacities)
    packs = 0
    for k in range(len(order)):
        fits = packs > 0
        for r in range(len(capacities)):
            fits = fits and sizes[order[k], r] <= left[r]
        if not fits:
            packs += 1
            left[:] = capacities
        left -= sizes[order[k]]
        packs_of[k] = packs - 1
    return packs_of, packs


@njit(cache=True)
def _raise_tree(tree: np.ndarray, leaf: int) -> None:
    """Bring the maxima above a changed leaf up to date."""
    node = leaf >> 1
    while node:
        for r in range(tree.shape[1]):
            tree[node, r] = max(tree[2 * node, r], tree[2 * node + 1, r])
        node >>= 1


@njit(cache=True)
def _grown(tree: np.ndarray) -> np.ndarray:
    """The tree with room for twice as many packs."""
    leaves = len(tree) // 2
    grown = np.full((4 * leaves, tree.shape[1]), -1, np.int64)
    grown[2 * leaves : 3 * leaves] = tree[leaves:]
    for node in range(2 * leaves - 1, 0, -1):
        for r in range(tree.shape[1]):
            grown[node, r] = max(grown[2 * node, r], grown[2 * node + 1, r])
    return grown


@njit(cache=True)
def _holds(left: np.ndarray, size: np.ndarray) -> bool:
    fits = True
    for r in range(len(size)):
        fits = fits and left[r] >= size[r]
    return fits


@njit(cache=True)
def first_fit(sizes: np.ndarray, order: np.ndarray, capacities: np.ndarray) -> tuple[np.ndarray, int]:
    """Each sample into the first pack that holds it, found by descending a tree of what is left at most.

    With one resource this is first fit exactly. With several a subtree can promise room that no single pack has; a pack
    that was visited in vain too often is closed, which bounds the work.
    """
    resources = len(capacities)
    tree = np.full(
        (2 * 1024, resources), -1, np.int64
    )  # node 1 is the root; pack p is leaf leaves + p; -1: no pack yet
    missed = np.zeros(1024, np.int32)
    packs_of = np.empty(len(order), np.int32)
    packs = 0
    for k in range(len(order)):
        size = sizes[order[k]]
        leaves = len(tree) // 2
        node, chosen = 1, -1
        # Depth first, left before right: down where a subtree promises room, else on to the next one to the right.
        while node:
            if _holds(tree[node], size):
                if node < leaves:
                    node = 2 * node
                    continue
                chosen = node - leaves
                break
            if node >= leaves and node - leaves < packs and resources > 1:
                missed[node - leaves] += 1
                if missed[node - leaves] >= _PATIENCE:
                    tree[node, :] = -1
                    _raise_tree(tree, node)
            while node & 1:
                node >>= 1
            if node:
                node += 1
        if chosen < 0:
            if packs == leaves:
                tree = _grown(tree)
                more = np.zeros(2 * leaves, np.int32)
                more[:leaves] = missed
                missed, leaves = more, 2 * leaves
            chosen = packs
            packs += 1
            tree[leaves + chosen] = capacities
        tree[leaves + chosen] -= size
        _raise_tree(tree, leaves + chosen)
        packs_of[k] = chosen
    return packs_of, packs


@njit(cache=True)
def _sift_down(heap: np.ndarray, loads: np.ndarray, count: int) -> None:
    """Restore the heap of packs by load after its top became heavier."""
    at = 0
    while True:
        child = 2 * at + 1
        if child >= count:
            return
        if child + 1 < count and loads[heap[child + 1]] < loads[heap[child]]:
            child += 1
        if loads[heap[at]] <= loads[heap[child]]:
            return
        heap[at], heap[child] = heap[child], heap[at]
        at = child


@njit(cache=True)
def _to_top(heap: np.ndarray, at: int) -> None:
    """Bring the lightest pack of all from the end of the heap to its top."""
    while at:
        above = (at - 1) >> 1
        heap[at], heap[above] = heap[above], heap[at]
        at = above


@njit(cache=True)
def balanced_knapsack(
    sizes: np.ndarray, order: np.ndarray, capacities: np.ndarray, expected: int
) -> tuple[np.ndarray, int]:
    """Each sample into the pack with the least load of `expected` ones; where it does not fit, a further pack opens."""
    resources = len(capacities)
    left = np.empty((expected + len(order), resources), np.int64)
    left[:expected] = capacities
    loads = np.zeros(expected + len(order))
    heap = np.empty(expected + len(order), np.int32)
    for pack in range(expected):
        heap[pack] = pack
    packs = expected
    packs_of = np.empty(len(order), np.int32)
    for k in range(len(order)):
        size = sizes[order[k]]
        if not _holds(left[heap[0]], size):
            heap[packs] = packs
            left[packs] = capacities
            _to_top(heap, packs)
            packs += 1
        pack = heap[0]
        for r in range(resources):
            left[pack, r] -= size[r]
            loads[pack] = max(loads[pack], 1.0 - left[pack, r] / capacities[r])
        packs_of[k] = pack
        _sift_down(heap, loads, packs)
    return packs_of, packs
