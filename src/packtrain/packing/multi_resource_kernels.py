"""Kernels for packing under several limits: greedy packing of everything, balanced packing of one pool.

Legend: n samples, r resources, m packs; `slack` is what a pack has left, `excess` what it has too much.
A pool works on float64 copies of integers below 2**51, so that sums and comparisons stay exact.
"""

import math

import numpy as np
from numba import njit

MOST_IN_BLOCK = 200  # packs among which a sample looks for its place at first
MOST_MEMBERS = 24  # of a pack, looked at in one exchange: more would cost without finding better exchanges


@njit(cache=True, nogil=True)
def random_below(state: np.ndarray, bound: int) -> int:
    """An integer in [0, bound) from the xorshift generator held in `state`."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return np.int64(((x >> np.uint64(32)) * np.uint64(bound)) >> np.uint64(32))  # type: ignore[return-value]  # no division


@njit(cache=True, nogil=True)
def next_level(words: np.ndarray, summary: np.ndarray, level: int) -> int:
    """The smallest marked level >= `level`, or -1; 32 levels a word, 32 words a summary word."""
    word = level >> 5
    if word >= len(words):
        return -1
    bits = words[word] & (np.int64(0xFFFFFFFF) << np.int64(level & 31))
    if bits == 0:
        word += 1
        group = word >> 5
        if group >= len(summary):
            return -1
        bits = summary[group] & (np.int64(0xFFFFFFFF) << np.int64(word & 31))
        while bits == 0:
            group += 1
            if group >= len(summary):
                return -1
            bits = summary[group]
        word = (group << 5) + math.frexp(float(bits & -bits))[1] - 1
        bits = words[word]
    return (word << 5) + math.frexp(float(bits & -bits))[1] - 1


@njit(cache=True, nogil=True)
def best_fit(
    sizes: np.ndarray, capacities: np.ndarray, order: np.ndarray, shift: int, tries: int, pack_of: np.ndarray
) -> int:
    """Put each sample of `order` where the least of the first resource stays free; returns the number of packs.

    Packs hang in lists by what they have left of it (in steps of 2**shift); of those with enough, the `tries` fullest
    are asked for room in the other resources.
    """
    main, n, r = 0, len(order), sizes.shape[1]
    levels = (capacities[main] >> shift) + 1
    words = np.zeros((levels >> 5) + 1, np.int64)
    summary = np.zeros((len(words) >> 5) + 1, np.int64)
    first = np.full(levels, -1, np.int32)
    after = np.full(n, -1, np.int32)
    slack = np.empty((1024, r), np.int64)
    packs = 0
    for i in order:
        asked = 0
        chosen, before, at = -1, -1, -1
        level = next_level(words, summary, sizes[i, main] >> shift)
        while level >= 0 and chosen < 0 and asked < tries:
            before, b = -1, first[level]
            while b >= 0 and asked < tries:
                room = True
                for q in range(r):
                    if slack[b, q] < sizes[i, q]:
                        room = False
                        break
                if room:
                    chosen, at = b, level
                    break
                asked += 1
                before, b = b, after[b]
            if chosen < 0:
                level = next_level(words, summary, level + 1)
        if chosen < 0:
            if packs == len(slack):
                wider = np.empty((2 * packs, r), np.int64)
                wider[:packs] = slack
                slack = wider
            chosen = packs
            slack[chosen] = capacities
            packs += 1
        else:
            if before >= 0:
                after[before] = after[chosen]
            else:
                first[at] = after[chosen]
                if first[at] < 0:
                    words[at >> 5] &= ~(np.int64(1) << np.int64(at & 31))
                    if words[at >> 5] == 0:
                        summary[at >> 10] &= ~(np.int64(1) << np.int64((at >> 5) & 31))
        pack_of[i] = chosen
        for q in range(r):
            slack[chosen, q] -= sizes[i, q]
        level = slack[chosen, main] >> shift
        after[chosen] = first[level]
        first[level] = chosen
        words[level >> 5] |= np.int64(1) << np.int64(level & 31)
        summary[level >> 10] |= np.int64(1) << np.int64((level >> 5) & 31)
    return packs


@njit(cache=True, nogil=True)
def spread(sizes: np.ndarray, weights: np.ndarray, order: np.ndarray, loads: np.ndarray, pack_of: np.ndarray) -> None:
    """Put each sample of `order` into the pack whose fullest resource stays emptiest; limits are not asked for.

    sizes (P, r), weights (r,) = 1 / capacity; loads (m, r) and pack_of (P,) are written. Many packs are split into
    blocks that take turns, so that a sample costs the same whatever m.
    """
    m, r = loads.shape
    blocks = max(1, m // MOST_IN_BLOCK)
    filled = np.zeros((r, m))  # transposed: the inner loop runs over packs
    peak = np.empty(m)
    for k in range(len(order)):
        i, block = order[k], k % blocks
        first, last = block * m // blocks, (block + 1) * m // blocks
        peak[first:last] = 0.0
        for q in range(r):
            step = sizes[i, q] * weights[q]
            row = filled[q]
            for b in range(first, last):
                t = row[b] + step
                peak[b] = t if t > peak[b] else peak[b]
        best = first
        for b in range(first + 1, last):
            if peak[b] < peak[best]:
                best = b
        pack_of[i] = best
        for q in range(r):
            filled[q, best] += sizes[i, q] * weights[q]
    loads[:] = 0.0
    for i in range(len(pack_of)):
        for q in range(r):
            loads[pack_of[i], q] += sizes[i, q]


@njit(cache=True, nogil=True)
def remove_samples(
    sizes: np.ndarray, weights: np.ndarray, loads: np.ndarray, pack_of: np.ndarray, amount: float, state: np.ndarray
) -> None:
    """Take random samples out of their packs (pack -1) until `amount` packs' worth of the fullest resource is out."""
    total = np.zeros(len(weights))
    while (total * weights).max() < amount:
        i = random_below(state, len(pack_of))
        if pack_of[i] < 0:
            continue
        for q in range(len(weights)):
            loads[pack_of[i], q] -= sizes[i, q]
            total[q] += sizes[i, q]
        pack_of[i] = -1


@njit(cache=True, nogil=True)
def take_members(
    pack: int,
    head: np.ndarray,
    after: np.ndarray,
    sizes: np.ndarray,
    rows: np.ndarray,
    ids: np.ndarray,
    state: np.ndarray,
) -> int:
    """Copy a pack's members (a random choice of many) into `rows` (k, r) and `ids`, "nothing" last; returns k."""
    k, seen, j = 0, 0, head[pack]
    while j >= 0:
        if k < MOST_MEMBERS:
            ids[k] = j
            k += 1
        else:
            at = random_below(state, seen + 1)
            if at < MOST_MEMBERS:
                ids[at] = j
        seen += 1
        j = after[j]
    for x in range(k):
        for q in range(rows.shape[1]):
            rows[x, q] = sizes[ids[x], q]
    rows[k] = 0.0
    ids[k] = -1
    return k + 1


@njit(cache=True, nogil=True)
def move(i: int, source: int, target: int, head: np.ndarray, after: np.ndarray, before: np.ndarray) -> None:
    """Take sample `i` out of one pack's list and put it at the head of another's; source -1: it was in none."""
    if source >= 0:
        if before[i] >= 0:
            after[before[i]] = after[i]
        else:
            head[source] = after[i]
        if after[i] >= 0:
            before[after[i]] = before[i]
    before[i] = -1
    after[i] = head[target]
    if head[target] >= 0:
        before[head[target]] = i
    head[target] = i


@njit(cache=True, nogil=True)
def is_over(loads: np.ndarray, capacities: np.ndarray, pack: int) -> bool:
    """Whether a pack exceeds a limit."""
    over = False
    for q in range(len(capacities)):
        over |= loads[pack, q] > capacities[q]
    return over


@njit(cache=True, nogil=True, inline="always")
def price(excess: float, weight: float, bent: bool) -> float:
    """What an excess costs: its square spreads it over many packs, its root (`bent`) gathers it in few."""
    share = excess * weight
    if share <= 0.0:
        return 0.0
    return math.sqrt(share) if bent else share * share


@njit(cache=True, nogil=True)
def best_exchange(
    rows_a: np.ndarray,
    rows_b: np.ndarray,
    ka: int,
    kb: int,
    excess: np.ndarray,
    weights: np.ndarray,
    limit: float,
    bent: bool,
) -> tuple[int, int]:
    """The exchange of one member (or nothing) each that costs least, and less than `limit`; -1: there is none.

    In the resource that a has too much of, only a narrow range of differences can help; the rest is passed over.
    """
    r = len(weights)
    main = 0
    for q in range(1, r):
        if excess[0, q] * weights[q] > excess[0, main] * weights[main]:
            main = q
    reach = (limit * limit if bent else math.sqrt(limit)) / weights[main]
    least, most = excess[0, main] - reach, reach - excess[1, main]
    best, best_x, best_y = limit, -1, -1
    for x in range(ka):
        low, high = rows_a[x, main] - most, rows_a[x, main] - least
        for y in range(kb if x < ka - 1 else kb - 1):
            if rows_b[y, main] <= low or rows_b[y, main] >= high:
                continue
            cost = 0.0
            for q in range(r):
                step = rows_a[x, q] - rows_b[y, q]
                cost += price(excess[0, q] - step, weights[q], bent) + price(excess[1, q] + step, weights[q], bent)
                if cost >= best:
                    break
            if cost < best:
                best, best_x, best_y = cost, x, y
    return best_x, best_y


@njit(cache=True, nogil=True)
def exchange(
    sizes: np.ndarray,
    capacities: np.ndarray,
    weights: np.ndarray,
    loads: np.ndarray,
    pack_of: np.ndarray,
    budget: int,
    heat: float,
    bent: bool,
    state: np.ndarray,
) -> int:
    """Exchange members of a pack over a limit with those of random packs until none is over; returns how many are.

    An exchange may raise the excess by up to `heat`, which falls to zero as the budget (in comparisons) is used.
    """
    m, r = loads.shape
    head = np.full(m, -1, np.int32)
    after = np.full(len(pack_of), -1, np.int32)
    before = np.full(len(pack_of), -1, np.int32)
    for i in range(len(pack_of)):
        if pack_of[i] >= 0:
            move(i, -1, pack_of[i], head, after, before)
    over = np.empty(m, np.int64)
    place = np.full(m, -1, np.int64)
    num_over = 0
    for b in range(m):
        if is_over(loads, capacities, b):
            over[num_over], place[b] = b, num_over
            num_over += 1
    rows_a, rows_b = np.empty((MOST_MEMBERS + 1, r)), np.empty((MOST_MEMBERS + 1, r))
    ids_a, ids_b = np.empty(MOST_MEMBERS + 1, np.int64), np.empty(MOST_MEMBERS + 1, np.int64)
    excess = np.empty((2, r))
    used = 0
    while num_over > 0 and used < budget and m > 1:
        a = over[random_below(state, num_over)]
        b = random_below(state, m - 1)
        b += b >= a
        ka = take_members(a, head, after, sizes, rows_a, ids_a, state)
        kb = take_members(b, head, after, sizes, rows_b, ids_b, state)
        now = 0.0
        for q in range(r):
            excess[0, q], excess[1, q] = loads[a, q] - capacities[q], loads[b, q] - capacities[q]
            now += price(excess[0, q], weights[q], bent) + price(excess[1, q], weights[q], bent)
        left = 1.0 - used / budget
        used += ka * kb + 2 * (ka + kb) + 8
        x, y = best_exchange(rows_a, rows_b, ka, kb, excess, weights, now + heat * left * left, bent)
        if x < 0:
            continue
        for q in range(r):
            step = rows_a[x, q] - rows_b[y, q]
            loads[a, q] -= step
            loads[b, q] += step
        if ids_a[x] >= 0:
            move(ids_a[x], a, b, head, after, before)
            pack_of[ids_a[x]] = b
        if ids_b[y] >= 0:
            move(ids_b[y], b, a, head, after, before)
            pack_of[ids_b[y]] = a
        for c in (a, b):
            late = is_over(loads, capacities, c)
            if late and place[c] < 0:
                over[num_over], place[c] = c, num_over
                num_over += 1
            elif not late and place[c] >= 0:
                num_over -= 1
                last = over[num_over]
                over[place[c]], place[last] = last, place[c]
                place[c] = -1
    return num_over


@njit(cache=True)
def best_fit_by_sum(sizes: np.ndarray, capacities: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, int]:
    """Packs of samples in `order`, each to the pack that it leaves the least room in, all resources summed as shares.

    As textbooks have it: quadratic, so for some thousand samples at a time.
    """
    resources = len(capacities)
    left = np.empty((len(order), resources), np.int64)
    room = np.empty(len(order))
    packs_of = np.empty(len(order), np.int32)
    packs = 0
    for k in range(len(order)):
        size = sizes[order[k]]
        chosen, least = -1, np.inf
        for pack in range(packs):
            if room[pack] >= least:
                continue
            fits = True
            for q in range(resources):
                fits = fits and left[pack, q] >= size[q]
            if fits:
                chosen, least = pack, room[pack]
        if chosen < 0:
            chosen = packs
            left[chosen] = capacities
            room[chosen] = resources
            packs += 1
        for q in range(resources):
            left[chosen, q] -= size[q]
            room[chosen] -= size[q] / capacities[q]
        packs_of[k] = chosen
    return packs_of, packs
