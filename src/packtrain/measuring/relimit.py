"""Costs under other media limits, from what the headers said when the dataset was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from packtrain.core.errors import ArtifactError, ConfigError, PacktrainError, RecordError
from packtrain.core.fingerprint import differences
from packtrain.core.modality import VISION, VISION_TOKENS
from packtrain.core.values import MediaHeader, MediaLimits, PartLimits
from packtrain.families.encoder import RecordEncoder
from packtrain.families.family import Rule
from packtrain.families.part_limits import MediaRules
from packtrain.families.registry import load_rule
from packtrain.measuring.request import settings_state

if TYPE_CHECKING:
    from packtrain.measuring.table import CostTable

_SHAPE = ("kind", "width", "height", "frames", "fps", "seconds", "limits")
_CHANGED = ("tokens", "text_tokens", *VISION_TOKENS, "frames", "patches", "supervised_tokens")

_SAMPLING = frozenset(("num_frames", "fps", "max_frames"))
# Why records were left out that other limits might let in, and which limits these are.
_REFUSED_BY_LIMITS: Mapping[str, frozenset[str]] = {
    "family: video with too few frames to sample": _SAMPLING,
    "family: sampling reads past the last frame": _SAMPLING,
    "family: only videos of equal sampled length go into one sample": _SAMPLING,
    "family: image too thin for the processor": frozenset(("max_img_size",)),
}


@dataclass(frozen=True, slots=True)
class _MediaCost:
    """What one medium costs under one set of limits."""

    tokens: int  # of its whole expansion
    media_tokens: int
    patches: int
    max_patches: int
    frames: int


def relimit(table: CostTable, limits: MediaLimits) -> tuple[dict[str, np.ndarray], np.ndarray, Mapping[int, str]]:
    """New columns, the rows kept, and the rows (by index) that the new limits make impossible.

    Only differences are applied: the text around a medium is the same under both limits, so the change in tokens is
    the change of its expansion alone. Equal shapes are computed once. `tail_tokens` stays as measured: what a
    family writes after the last run of a medium is the same for every size and under all limits.
    """
    summary = table.summary
    if summary.counts.reasons.get("filter: longer than max_sample_length"):
        raise ConfigError(
            "with_limits", got="a table from which max_sample_length dropped records", fix="measure again"
        )
    for reason, names in _REFUSED_BY_LIMITS.items():
        if names & limits.given().keys() and (left_out := summary.counts.reasons.get(reason)):
            raise ConfigError(
                "with_limits",
                got=f"a table from which its own limits dropped records ({left_out} x {reason})",
                fix="measure again",
            )
    before = summary.limits
    after = limits.over(before)
    index = table.column("index")
    media = _media_of(table, index)
    shapes, shape_of = _shapes(media, len(index))
    pricer = _Pricer(table, before, after)
    costs = [pricer.costs(header, images) for header, images in shapes]

    columns = {name: table.column(name).copy() for name in _CHANGED}
    rows, keep = media["row"], np.ones(len(index), bool)
    refused: dict[int, str] = {}
    for at, cost in enumerate(costs):
        if isinstance(cost, RecordError):
            for row in rows[shape_of == at].tolist():
                keep[row] = False
                refused[row] = str(cost)
    for row, error in pricer.refused_samples(shapes, shape_of, rows):
        keep[row] = False
        refused.setdefault(row, str(error))
    deltas = np.array([_delta(header.kind, cost) for (header, _), cost in zip(shapes, costs, strict=True)], np.int64)
    if len(shapes):
        for name, change in zip(_CHANGED, deltas[shape_of].T, strict=True):
            change = change * media["supervised"] if name == "supervised_tokens" else change
            np.add.at(columns[name], rows, change.astype(columns[name].dtype))
    largest = np.zeros(len(index), np.int64)
    most = np.array([0 if isinstance(cost, RecordError) else cost[1].max_patches for cost in costs], np.int64)
    if len(shapes):
        np.maximum.at(largest, rows, most[shape_of])
    columns["max_patches_per_image"] = largest

    too_long = summary.max_sample_length
    if too_long is not None:
        keep &= columns["tokens"] <= too_long
    dropped = {int(index[row]): refused.get(int(row), "longer than max_sample_length") for row in np.flatnonzero(~keep)}
    return {name: values[keep] for name, values in columns.items()}, np.flatnonzero(keep), dropped


def largest_image(table: CostTable) -> int | None:
    """Patches of the table's largest image, all its tiles together; None where headers or their rule are not there."""
    index = table.column("index")
    media = _media_of(table, index)
    shapes = [(header, beside) for header, beside in _shapes(media, len(index))[0] if header.kind == "image"]
    if not shapes:
        return None
    before = table.summary.limits
    after = table.limits.over(before)
    try:
        pricer = _Pricer(table, before, after)
    except PacktrainError:  # the model is no longer there, or has no rule
        return None
    costs = [pricer.costs(header, count) for header, count in shapes]
    return max((cost[1].patches for cost in costs if not isinstance(cost, RecordError)), default=None)


def _media_of(table: CostTable, index: np.ndarray) -> dict[str, np.ndarray]:
    """The media of the table's rows, each with the row it belongs to."""
    record = table.media("record")
    here = np.isin(record, index)
    media = {name: table.media(name)[here] for name in (*_SHAPE, "supervised")}
    return {**media, "row": np.searchsorted(index, record[here])}


def _shapes(media: dict[str, np.ndarray], num_rows: int) -> tuple[list[tuple[MediaHeader, int]], np.ndarray]:
    """The distinct (header, images in its sample), and for each medium which of them it is."""
    images = np.bincount(media["row"][media["kind"] == "image"], minlength=num_rows)
    columns = [media[name].tolist() for name in _SHAPE] + [images[media["row"]].tolist()]
    known: dict[tuple[Any, ...], int] = {}
    shape_of = np.array([known.setdefault(shape, len(known)) for shape in zip(*columns, strict=True)], np.int64)
    return [(_header(shape), shape[-1]) for shape in known], shape_of


def _header(shape: tuple[Any, ...]) -> MediaHeader:
    header = dict(zip(_SHAPE, shape, strict=False))
    return MediaHeader(**{**header, "limits": PartLimits.of(header["limits"])})


def _delta(kind: str, cost: tuple[_MediaCost, _MediaCost] | RecordError) -> tuple[int, ...]:
    """What the new limits add to each of _CHANGED."""
    if isinstance(cost, RecordError):
        return (0,) * len(_CHANGED)
    old, new = cost
    text = (new.tokens - new.media_tokens) - (old.tokens - old.media_tokens)
    media = new.media_tokens - old.media_tokens
    return (
        new.tokens - old.tokens,
        text,
        *(media if kind == one.name else 0 for one in VISION),
        new.frames - old.frames,
        new.patches - old.patches,
        text,
    )


class _Pricer:
    """Prices of media under the old and the new limits, each distinct shape computed once."""

    def __init__(self, table: CostTable, before: MediaLimits, after: MediaLimits) -> None:
        request = table.request()
        settings = request.settings()
        if changed := differences(table.summary.settings, settings_state(settings)):
            raise ArtifactError(
                request.model, got="; ".join(changed), expected="the measured model", fix="measure again"
            )
        rules = [rule for limits in (before, after) if (rule := load_rule(settings, limits)) is not None]
        if len(rules) < 2:
            raise ConfigError("with_limits", got="a family without a rule", fix="measure again with the new limits")
        self._rules = [MediaRules(settings, rule) for rule in rules]
        self._encoder = RecordEncoder(settings, rules[0], loss_on=request.loss_on)

    def costs(self, header: MediaHeader, images: int) -> tuple[_MediaCost, _MediaCost] | RecordError:
        """Before and after, or why a size cannot be had."""
        try:
            old, new = (self._cost_of(rules, header, images) for rules in self._rules)
        except RecordError as error:
            return error
        return old, new

    def refused_samples(
        self, shapes: Sequence[tuple[MediaHeader, int]], shape_of: np.ndarray, rows: np.ndarray
    ) -> Iterator[tuple[int, RecordError]]:
        """Rows whose combination of media the family refuses under the new limits."""
        if type(self._rules[1].rule).check_sample is Rule.check_sample or not len(rows):
            return
        several = np.flatnonzero(np.bincount(rows) > 1)
        verdicts: dict[tuple[int, ...], RecordError | None] = {}
        starts, stops = (np.searchsorted(rows, several, side=side) for side in ("left", "right"))
        for row, start, stop in zip(several, starts, stops, strict=True):
            combination = tuple(shape_of[start:stop].tolist())
            if combination not in verdicts:
                verdicts[combination] = _refusal(self._rules[1], [shapes[at][0] for at in combination])
            if (error := verdicts[combination]) is not None:
                yield int(row), error

    def _cost_of(self, rules: MediaRules, header: MediaHeader, images: int) -> _MediaCost:
        expansion = rules.expansion(header, images)
        return _MediaCost(
            tokens=self._encoder.token_count(expansion.pieces),
            media_tokens=expansion.media_tokens,
            patches=expansion.patches,
            max_patches=expansion.max_patches,
            frames=expansion.frames,
        )


def _refusal(rules: MediaRules, headers: Sequence[MediaHeader]) -> RecordError | None:
    try:
        rules.expansions(headers)
    except RecordError as error:
        return error
    return None
