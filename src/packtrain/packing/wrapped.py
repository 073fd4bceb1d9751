"""`packing_strategy: wrapped`: samples one after the other, cut wherever a pack is full.

    samples    a a a a a | b b b | c c c c c c
    packs      a a a a   | a b b b | c c c c | c c

Pieces are those of `overlong: split`: each is a segment of its own, the first token of a later one carries no loss, and
one in which nothing does is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packtrain.core.errors import DataError
from packtrain.core.seeds import stream
from packtrain.packing.overlong import UNLABELLED, Dropped, supervised_in
from packtrain.packing.pack_entries import Entries
from packtrain.packing.resources import Samples, Tails


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Wrapped:
    """The packs of one window; `open` are the entries of the last, which the next window fills."""

    entries: Entries
    offsets: np.ndarray
    open: Entries | None
    left_out: tuple[Dropped, ...]  # pieces without loss; rows as in the cost table
    cut_entries: int
    supervised_lost: int


def refuse_media(samples: Samples, start: int) -> None:
    """Only text can be cut anywhere."""
    media = np.flatnonzero(samples["images"] + samples["videos"])
    if len(media):
        raise DataError(
            "packing_strategy wrapped",
            got=f"{len(media):,} samples with images or videos, the first of them row {start + media[0]}",
            expected="text only: media cannot be cut",
            fix="use best_fit, with overlong: split for samples longer than a pack",
        )


def wrap(
    fresh: Entries,
    before: Entries | None,
    rows: tuple[Samples, Tails],
    *,
    start: int,
    length: int,
    seed: int | None,
    last: bool,
) -> Wrapped:
    """Fill packs of this length. `rows` are those of the window, from `start` on; `before` is what stands open."""
    if seed is not None:
        fresh = fresh.take(stream(seed, "order").permutation(len(fresh)))
    whole = fresh if before is None else before + fresh
    tokens = whole.samples["tokens"]
    ends = np.cumsum(tokens)
    begins = ends - tokens
    first = begins // length
    times = (ends - 1) // length - first + 1
    of = np.repeat(np.arange(len(whole)), times)  # of which entry each piece is
    pack = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(times) - times, times)
    low, high = np.maximum(begins[of], pack * length), np.minimum(ends[of], (pack + 1) * length)
    starts, lengths = whole.starts[of] + low - begins[of], high - low
    supervised = whole.samples["supervised_tokens"][of]
    cut = np.flatnonzero(times > 1)
    at = np.cumsum(times) - times
    for entry, found in zip(cut, _supervised(whole, cut, rows, start, starts, lengths, at, times), strict=True):
        supervised[at[entry] : at[entry] + times[entry]] = found
    kept = (supervised > 0) | (times[of] == 1)
    pieces = _pieces(whole, of, starts, lengths, supervised, kept)
    sizes = np.bincount(pack[kept]) if kept.any() else np.zeros(0, np.int64)
    is_open = not last and len(whole) > 0 and ends[-1] % length != 0 and len(sizes) == pack[-1] + 1
    behind = int(sizes[-1]) if is_open else 0
    closed = sizes[:-1] if is_open else sizes
    return Wrapped(
        entries=pieces.take(np.arange(len(pieces) - behind)),
        offsets=np.concatenate([[0], np.cumsum(closed[closed > 0])]),
        open=pieces.take(np.arange(len(pieces) - behind, len(pieces))) if behind else None,
        left_out=tuple(
            Dropped(int(whole.rows[of[one]]), UNLABELLED, f"tokens {begin:,} to {begin + size:,} carry no loss")
            for one, begin, size in zip(
                np.flatnonzero(~kept).tolist(), starts[~kept].tolist(), lengths[~kept].tolist(), strict=True
            )
        ),
        cut_entries=len(cut),
        supervised_lost=int(whole.samples["supervised_tokens"].sum() - supervised.sum()),
    )


def _supervised(
    whole: Entries,
    cut: np.ndarray,
    rows: tuple[Samples, Tails],
    start: int,
    starts: np.ndarray,
    lengths: np.ndarray,
    at: np.ndarray,
    times: np.ndarray,
) -> list[np.ndarray]:
    """Labels in the pieces of each entry that is cut; what stood open before is never cut again."""
    samples, tails = rows
    local = whole.rows[cut] - start
    wanted = np.unique(local)
    runs = dict(zip(wanted.tolist(), tails.runs(wanted) if len(wanted) else (), strict=True))
    found = []
    for entry, row in zip(cut.tolist(), local.tolist(), strict=True):
        part = slice(at[entry], at[entry] + times[entry])
        tokens, carrying = int(samples["tokens"][row]), int(samples["supervised_tokens"][row])
        begins = starts[part]
        found.append(supervised_in(runs[row], tokens, carrying, int(tails.tokens[row]), begins, begins + lengths[part]))
    return found


def _pieces(
    whole: Entries, of: np.ndarray, starts: np.ndarray, lengths: np.ndarray, supervised: np.ndarray, kept: np.ndarray
) -> Entries:
    """Those that are kept; the first of each entry stands for its sample."""
    taken = whole.take(of[kept])
    leads = np.ones(int(kept.sum()), bool)
    leads[1:] = of[kept][1:] != of[kept][:-1]
    size = lengths[kept]
    columns = {"tokens": size, "longest": size, "attention": size * size, "supervised_tokens": supervised[kept]}
    return Entries(
        rows=taken.rows,
        starts=starts[kept],
        firsts=taken.firsts & leads,
        samples=Samples({**taken.samples.columns, **columns}),
    )
