"""Samples cut into pieces: those that no pack can hold, and with `packing_strategy: wrapped` wherever a pack is full.

Wrapped packs take samples one after the other:

    samples    a a a a a | b b b | c c c c c c
    packs      a a a a   | a b b b | c c c c | c c

Each piece is a segment of its own: the first token of a later one carries no loss, and one in which nothing does is
left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from packtrain.core.errors import DataError
from packtrain.core.seeds import stream
from packtrain.packing.arrays import WRAPPED
from packtrain.packing.packing_config import SETTING_OF, PackingConfig
from packtrain.packing.resources import Entries, Samples, Tails

STAGE = "pack"
_NO_LIMIT = 2**62 - 1
UNFIT, UNLABELLED = "fits no pack", "truncated to a part without supervised tokens"


@dataclass(frozen=True, slots=True)
class Dropped:
    """A row that is in no pack, or a piece of one."""

    row: int
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """What goes into packs: spans of rows of the cost table. Uncut rows are spans from 0 to their end."""

    entries: Entries
    dropped: tuple[Dropped, ...]
    cut_rows: int = 0  # of which something is packed
    tokens_lost: int = 0  # of rows that were truncated
    supervised_lost: int = 0  # of rows that were cut: after the cut, or the first token of a piece


def fit_pieces(samples: Samples, tails: Tails, config: PackingConfig) -> Pieces:
    """Cut or leave out what is too large.

    Only text after the last medium is ever cut, and only limits of tokens (with them attention) are met by cutting.
    A piece's first token is predicted from nothing, so it carries no loss; a piece in which nothing does is dropped.
    """
    if config.packing_strategy == WRAPPED:  # nothing is too long for it
        config = replace(config, packing_strategy="next_fit", packing_length=_NO_LIMIT)
    capacities = config.capacities()
    over = _over(samples, config)
    unfit = np.logical_or.reduce(list(over.values()))
    reasons = {int(row): _reason(samples, capacities, over, int(row)) for row in np.flatnonzero(unfit)}
    if config.overlong == "error" and reasons:
        row, reason = next(iter(reasons.items()))
        raise DataError(
            f"{len(reasons):,} samples fit no pack",
            got=f"row {row}: {reason}",
            expected="samples within the limits",
            fix="raise the limits, or choose overlong: drop, truncate or split",
        )
    if config.cutoff_len is not None:
        unfit |= samples["tokens"] > config.cutoff_len
    whole = np.flatnonzero(~unfit)
    if not config.cuts or not unfit.any():
        entries = Entries(
            rows=whole,
            starts=np.zeros(len(whole), np.int64),
            firsts=np.ones(len(whole), bool),
            samples=samples.take(whole) if reasons else samples,
        )
        return Pieces(entries=entries, dropped=tuple(Dropped(row, UNFIT, reason) for row, reason in reasons.items()))
    return _cut(samples, tails, config, over, whole, reasons)


def _over(samples: Samples, config: PackingConfig) -> dict[str, np.ndarray]:
    """Which limits of a pack each sample exceeds, once it is cut to `cutoff_len`."""
    over = {}
    for name, limit in config.capacities().items():
        column = samples[name]
        if name == "tokens" and config.cutoff_len is None:
            column = config.aligned(column)
        if config.cutoff_len is not None and name in ("tokens", "attention"):
            cut = np.minimum(samples["tokens"], config.cutoff_len)
            column = config.aligned(cut) if name == "tokens" else cut * cut
        over[name] = column > limit
    return over


def _span(tokens: int, length: int, config: PackingConfig) -> tuple[np.ndarray, np.ndarray]:
    """Begins and ends of the pieces that are kept of a sample, each of at most this length."""
    kept = min(tokens, config.cutoff_len or tokens)
    if config.overlong != "split":
        kept = min(kept, length)
    first = tokens - kept if config.truncate_side == "left" else 0
    begins = np.arange(first, first + kept, length)
    return begins, np.minimum(begins + length, first + kept)


def _uncuttable(media_end: int, begins: np.ndarray, ends: np.ndarray) -> str:
    """Why these pieces cannot be made: media stay whole, and in the first of them."""
    if media_end > ends[0]:
        return f"its media extend to token {media_end}, so it cannot be truncated"
    return "its beginning has media, so it cannot be truncated on the left" if media_end and begins[0] else ""


def _cut(
    samples: Samples,
    tails: Tails,
    config: PackingConfig,
    over: dict[str, np.ndarray],
    whole: np.ndarray,
    reasons: dict[int, str],
) -> Pieces:
    length = config.packing_length // config.pack_alignment * config.pack_alignment
    if config.max_attention_per_pack is not None:  # a piece alone must also stay within the attention limit
        length = min(length, math.isqrt(config.max_attention_per_pack))
    dropped: list[Dropped] = []
    cut: list[int] = []
    by_cutting = ("tokens", "attention") if config.overlong in ("truncate", "split") else ()
    for row in np.setdiff1d(np.arange(len(samples["tokens"])), whole, assume_unique=True).tolist():
        tokens = int(samples["tokens"][row])
        reason = reasons.get(row) or f"{tokens:,} tokens > cutoff_len {config.cutoff_len:,}"
        beyond = [name for name, exceeds in over.items() if exceeds[row] and name not in by_cutting]
        why = _uncuttable(tokens - int(tails.tokens[row]), *_span(tokens, length, config))
        if beyond or why:
            dropped.append(Dropped(row, UNFIT, reason if beyond else f"{reason}; {why}"))
        else:
            cut.append(row)
    rows, starts, firsts = [whole], [np.zeros(len(whole), np.int64)], [np.ones(len(whole), bool)]
    lengths, supervised = [samples["tokens"][whole]], [samples["supervised_tokens"][whole]]
    cut_rows = tokens_lost = supervised_lost = 0
    for row, runs in zip(cut, tails.runs(np.array(cut, np.int64)) if cut else (), strict=True):
        tokens, carrying = int(samples["tokens"][row]), int(samples["supervised_tokens"][row])
        begins, ends = _span(tokens, length, config)
        labels = supervised_in(runs, tokens, carrying, int(tails.tokens[row]), begins, ends)
        kept = labels > 0
        for begin, end in zip(begins[~kept].tolist(), ends[~kept].tolist(), strict=True):
            dropped.append(Dropped(row, UNLABELLED, f"tokens {begin:,} to {end:,} of {tokens:,} carry no loss"))
        if not kept.any():
            continue
        rows.append(np.full(kept.sum(), row))
        starts.append(begins[kept])
        firsts.append(np.arange(kept.sum()) == 0)
        lengths.append((ends - begins)[kept])
        supervised.append(labels[kept])
        cut_rows += 1
        tokens_lost += tokens - int((ends - begins).sum())
        supervised_lost += carrying - int(labels.sum())
    columns = [np.concatenate(parts) for parts in (rows, starts, firsts, lengths, supervised)]
    order = np.lexsort((columns[1], columns[0]))  # pieces take the place of their row
    row_of, start_of, first_of, length_of, supervised_of = (column[order] for column in columns)
    costs = _piece_costs(samples, row_of, start_of, length_of, supervised_of)
    return Pieces(
        entries=Entries(rows=row_of, starts=start_of, firsts=first_of, samples=costs),
        dropped=tuple(sorted(dropped, key=lambda one: one.row)),
        cut_rows=cut_rows,
        tokens_lost=tokens_lost,
        supervised_lost=supervised_lost,
    )


def supervised_in(
    runs: str, tokens: int, supervised: int, tail: int, begins: np.ndarray, ends: np.ndarray
) -> np.ndarray:
    """Tokens with loss in each piece, by the runs of the tail.

    >>> supervised_in("4,6", 10, 6, 10, np.array([0, 5]), np.array([5, 10]))
    array([1, 4])
    """
    lengths = np.array(runs.split(",") if runs else [0], np.int64)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    carried = np.concatenate([[0], np.cumsum(np.where(np.arange(len(lengths)) % 2, lengths, 0))])
    if edges[-1] != tail or carried[-1] > supervised:
        raise DataError(
            "cost table", got=f"tail_runs {runs}", expected=f"runs of {tail} tokens", fix="measure the data again"
        )
    before = supervised - carried[-1]  # of the media's end, where nothing is cut

    def up_to(at: np.ndarray) -> np.ndarray:
        return np.interp(at - (tokens - tail), edges, carried).astype(np.int64)

    later = begins > 0  # the first token of these is predicted from nothing
    lost = np.where(later, up_to(begins + 1) - up_to(begins), 0)
    return np.asarray(up_to(ends) - up_to(begins) - lost + np.where(later, 0, before))


def _piece_costs(
    samples: Samples, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray, supervised: np.ndarray
) -> Samples:
    """The costs of pieces: media belong to the first piece of a row."""
    first = starts == 0
    own = {"tokens": lengths, "longest": lengths, "attention": lengths * lengths, "supervised_tokens": supervised}
    return Samples(
        {
            name: own[name] if name in own else column if name == "samples" else np.where(first, column, 0)
            for name, column in samples.take(rows).columns.items()
        }
    )


def _reason(samples: Samples, capacities: dict[str, int], over: dict[str, np.ndarray], row: int) -> str:
    exceeded = [
        f"{samples[name][row]:,} {name} > {SETTING_OF[name]} {capacities[name]:,}" for name in over if over[name][row]
    ]
    return "; ".join(exceeded)


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
