"""Samples that no pack can hold: dropped, truncated, split into pieces, or an error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from packtrain.core.errors import DataError
from packtrain.plans.config import SETTING_OF, PackingConfig
from packtrain.plans.resources import Samples

STAGE = "pack"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pieces:
    """What goes into packs: stretches of rows of the cost table. Uncut rows are stretches from 0 to their end."""

    rows: np.ndarray
    starts: np.ndarray
    samples: Samples  # costs of each piece
    dropped: dict[int, str]  # row -> why no pack can hold it
    cut_rows: int = 0
    tokens_lost: int = 0  # of rows that were truncated


def fit_pieces(samples: Samples, tail_tokens: np.ndarray, config: PackingConfig) -> Pieces:
    """Cut or leave out what is too large.

    Only text after the last medium is ever cut, and only the limit of tokens (with it attention) is met by cutting.
    Supervised tokens of a cut piece are an estimate, in proportion to its length: a table of costs does not say where
    they stand. Everything else is exact.
    """
    capacities = config.capacities()
    over = {name: samples[name] > limit for name, limit in capacities.items()}
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
    whole = np.flatnonzero(~unfit)
    if config.overlong in ("drop", "error") or not reasons:
        return Pieces(
            rows=whole,
            starts=np.zeros(len(whole), np.int64),
            samples=samples.take(whole) if reasons else samples,
            dropped=reasons,
        )
    return _cut(samples, tail_tokens, config, over, whole, reasons)


def _cut(
    samples: Samples,
    tail_tokens: np.ndarray,
    config: PackingConfig,
    over: dict[str, np.ndarray],
    whole: np.ndarray,
    reasons: dict[int, str],
) -> Pieces:
    length = config.packing_length
    if config.max_attention_per_pack is not None:  # a piece alone must also stay within the attention limit
        length = min(length, math.isqrt(config.max_attention_per_pack))
    dropped: dict[int, str] = {}
    lost = 0
    rows, starts, lengths = [whole], [np.zeros(len(whole), np.int64)], [samples["tokens"][whole]]
    for row, reason in reasons.items():
        tokens, media_end = int(samples["tokens"][row]), int(samples["tokens"][row] - tail_tokens[row])
        beyond = [name for name, exceeds in over.items() if exceeds[row] and name not in ("tokens", "attention")]
        if beyond or media_end > length:
            dropped[row] = reason if beyond else f"{reason}; its media reach to token {media_end}, so it cannot be cut"
            continue
        cuts = np.arange(0, tokens, length) if config.overlong == "split" else np.zeros(1, np.int64)
        rows.append(np.full(len(cuts), row))
        starts.append(cuts)
        lengths.append(np.minimum(length, tokens - cuts))
        lost += tokens - int(lengths[-1].sum())
    row_of, start_of, length_of = np.concatenate(rows), np.concatenate(starts), np.concatenate(lengths)
    order = np.lexsort((start_of, row_of))  # pieces stand where their row stood
    row_of, start_of, length_of = row_of[order], start_of[order], length_of[order]
    return Pieces(
        rows=row_of,
        starts=start_of,
        samples=_priced(samples, row_of, start_of, length_of),
        dropped=dropped,
        cut_rows=len(reasons) - len(dropped),
        tokens_lost=lost,
    )


def _priced(samples: Samples, rows: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> Samples:
    """The costs of pieces: media belong to the first piece of a row."""
    found = samples.take(rows)
    whole = found["tokens"]
    first = starts == 0
    columns = {
        name: np.where(first, column, 0)
        for name, column in found.columns.items()
        if name not in ("tokens", "samples", "attention", "longest", "supervised_tokens")
    }
    supervised = found["supervised_tokens"] * lengths // whole
    columns |= {"tokens": lengths, "longest": lengths, "attention": lengths * lengths, "samples": found["samples"]}
    columns["supervised_tokens"] = np.where(lengths == whole, found["supervised_tokens"], supervised)
    return Samples({name: columns[name] for name in found.columns})


def _reason(samples: Samples, capacities: dict[str, int], over: dict[str, np.ndarray], row: int) -> str:
    exceeded = [
        f"{samples[name][row]:,} {name} > {SETTING_OF[name]} {capacities[name]:,}" for name in over if over[name][row]
    ]
    return "; ".join(exceeded)
