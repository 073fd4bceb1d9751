"""`packing_strategy: wrapped`: samples one after the other, cut wherever a pack is full.

    samples    a a a a a | b b b | c c c c c c
    packs      a a a a   | a b b b | c c c c | c c

Pieces are those of `overlong: split`: each is a segment of its own, the first token of a later one carries no loss, and
one in which nothing does is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from packtrain.core.errors import DataError
from packtrain.core.seeds import stream
from packtrain.packing.overlong import UNLABELLED, Dropped, supervised_in
from packtrain.packing.resources import Entries, Samples, Tails


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Filled:
    """Entries in packs: pack i holds entries `offsets[i]` to `offsets[i + 1]`."""

    entries: Entries
    offsets: np.ndarray
    carried: Entries | None  # go on to the next window
    left_out: tuple[Dropped, ...] = ()  # pieces without loss; rows as in the cost table
    cut_rows: int = 0
    supervised_lost: int = 0


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
) -> Filled:
    """Fill packs of this length. `rows` are those of the window, from `start` on; `before` is in the open pack."""
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
    spans = [slice(at[entry], at[entry] + times[entry]) for entry in cut]
    for span, labels in zip(spans, _labels(whole.rows[cut] - start, rows, spans, starts, lengths), strict=True):
        supervised[span] = labels
    kept = (supervised > 0) | (times[of] == 1)
    pieces = _pieces(whole, of, starts, lengths, supervised, kept)
    sizes = np.bincount(pack[kept]) if kept.any() else np.zeros(0, np.int64)
    is_open = not last and len(whole) > 0 and ends[-1] % length != 0 and len(sizes) == pack[-1] + 1
    closed = sizes[:-1] if is_open else sizes
    stop = len(pieces) - (int(sizes[-1]) if is_open else 0)
    lost = zip(whole.rows[of[~kept]].tolist(), starts[~kept].tolist(), lengths[~kept].tolist(), strict=True)
    return Filled(
        entries=pieces.take(np.arange(stop)),
        offsets=np.concatenate([[0], np.cumsum(closed[closed > 0])]),
        carried=pieces.take(np.arange(stop, len(pieces))) if stop < len(pieces) else None,
        left_out=tuple(
            Dropped(row, UNLABELLED, f"tokens {begin:,} to {begin + size:,} carry no loss") for row, begin, size in lost
        ),
        cut_rows=len(cut),
        supervised_lost=int(whole.samples["supervised_tokens"].sum() - supervised.sum()),
    )


def _labels(
    cut: np.ndarray, rows: tuple[Samples, Tails], spans: list[slice], starts: np.ndarray, lengths: np.ndarray
) -> Iterator[np.ndarray]:
    """Labels in the pieces of each row that is cut; what was in the open pack before is never cut again."""
    samples, tails = rows
    wanted = np.unique(cut)
    runs = dict(zip(wanted.tolist(), tails.runs(wanted) if len(wanted) else (), strict=True))
    for row, span in zip(cut.tolist(), spans, strict=True):
        tokens, carrying = int(samples["tokens"][row]), int(samples["supervised_tokens"][row])
        begins, ends = starts[span], starts[span] + lengths[span]
        yield supervised_in(runs[row], tokens, carrying, int(tails.tokens[row]), begins, ends)


def _pieces(
    whole: Entries, of: np.ndarray, starts: np.ndarray, lengths: np.ndarray, supervised: np.ndarray, kept: np.ndarray
) -> Entries:
    """Pieces that are kept; with the first of each entry its sample is counted."""
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
