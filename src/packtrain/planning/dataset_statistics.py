"""What a dataset is: spread of every column, histograms, parts by source and by modality."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from packtrain.core.modality import VISION, VISION_TOKENS
from packtrain.core.numbers import percent
from packtrain.measuring.measure_summary import DESCRIBED, describe
from packtrain.measuring.table import CostTable
from packtrain.packing.resources import Samples
from packtrain.planning.study_values import DatasetStats, Group, Histogram, Statistics


def tiles_of(samples: Samples) -> np.ndarray | None:
    """Tiles of every sample; None where images are not cut.

    A cut image has more patches than what attends to itself, a whole one never.

    >>> one = {"images": np.array([1, 2]), "frames": np.array([0, 0]), "largest_patches": np.array([1024, 1024])}
    >>> tiles_of(Samples({**one, "patches": np.array([17 * 1024, 2 * 1024])})).tolist()
    [17, 2]
    >>> tiles_of(Samples({**one, "patches": np.array([1024, 1500])}))
    """
    patches, largest = samples["patches"], np.maximum(samples["largest_patches"], 1)
    cut = (samples["frames"] == 0) & (patches > samples["images"] * largest)
    return patches // largest if cut.any() else None


def largest_image_patches(samples: Samples) -> int:
    """Patches of the largest image at most, all tiles together: what one of several has if others have one tile."""
    patches, images = samples["patches"], samples["images"]
    alone = np.where(images > 1, patches - (images - 1) * samples["largest_patches"], patches)
    return int(np.maximum(alone, samples["largest_patches"])[images > 0].max(initial=0))


CONTENTS = ("text", "image", "images", "video", "mixed")
CHARTED = ("tokens", "text_tokens", "vision_tokens", "patches", "images", "objects")
_GROUPED = ("tokens", "text_tokens", "vision_tokens", "images", "frames", "objects", "patches", "supervised_tokens")
_KINDS = ("text", *(one.name for one in VISION))
_SPARSE = ("vision_tokens", "patches", "images", "objects")  # where a sample has none, it is not counted
_BINS = 40
_SKEWED = 1.2  # mean over median, or the other way round
_ALIKE = 0.3  # standard deviation over mean
_MOST_SOURCES = 50  # shown one by one; a dataset may have thousands


def dataset_stats(table: CostTable) -> DatasetStats:
    """Statistics of a whole cost table, every row counted once; each column is read once and let go."""
    tokens = table.column("tokens")
    total = int(tokens.sum())
    sources = table.source_codes()
    by_source = _Parts(*_largest(sources.names, sources.codes, tokens))
    by_modality = _Parts(CONTENTS, modality_codes(table.column("images"), table.column("videos")))
    statistics: dict[str, Statistics] = {}
    histograms: dict[str, Histogram] = {}
    for name in (*DESCRIBED, "vision_tokens"):
        values = _column(table, name)
        statistics[name] = describe(values)
        some = values[values > 0] if name in _SPARSE else values
        if name in CHARTED and len(some) and (name == "tokens" or some.min() < some.max()):  # one bar shows nothing
            of_some = describe(some) if len(some) < len(values) else {}
            histograms[name] = replace(histogram(some), without_zeros=of_some)
        for parts in (by_source, by_modality) if name in _GROUPED else ():
            parts.add(name, values, statistics[name])
    columns = {name: table.column(name) for name in ("images", "frames", "patches", "max_patches_per_image")}
    tiles = tiles_of(Samples({**columns, "largest_patches": columns["max_patches_per_image"]}))
    if tiles is not None:
        statistics["tiles"] = describe(tiles)
    by_kind = {kind: round(statistics[f"{kind}_tokens"].get("total", 0)) for kind in _KINDS}
    shown = table.column("image_tokens")
    counts = table.summary.counts
    return DatasetStats(
        samples=len(table),
        tokens=total,
        statistics=statistics,
        histograms=histograms,
        by_source=by_source.groups(total),
        by_modality=by_modality.groups(total),
        modality_tokens={kind: tokens for kind, tokens in by_kind.items() if tokens},
        observations=observations(statistics, describe(shown[shown > 0])),
        entries_read=counts.entries,
        measured_ledger={name: int(count) for name, count in counts.reasons.items()},
    )


def observations(statistics: Mapping[str, Statistics], with_images: Statistics) -> tuple[str, ...]:
    """What stands out: skew, outliers, shares, spread; `with_images` describes the image tokens of samples with any."""
    tokens = statistics["tokens"]
    mean, median, most, total = (tokens[name] for name in ("mean", "median", "max", "total"))
    lengths = f"The median sample has {median:,.0f} tokens, the mean {mean:,.0f}"
    if mean > _SKEWED * median:
        lengths += ": many short samples and a long tail, so padding to the longest of a batch wastes much."
    elif median > _SKEWED * mean:
        lengths += ": many long samples and some short ones."
    else:
        lengths += ": lengths are spread evenly around them."
    lines = [lengths]
    outliers = f"The longest has {most:,.0f} tokens, {most / mean:,.1f} times the mean"
    decide = "; a few outliers decide what padded batches need" if most > 10 * mean else ""
    lines.append(f"{outliers}; 1 % are above {tokens['p99']:,.0f}{decide}.")
    kinds = {kind: statistics[f"{kind}_tokens"].get("total", 0) / total for kind in _KINDS}
    if kinds["text"] < 1:
        lines.append("Tokens: " + ", ".join(f"{kind} {percent(share)}" for kind, share in kinds.items() if share) + ".")
    if with_images:
        spread = with_images["std"] / with_images["mean"]
        alike = "about equally many" if spread < _ALIKE else "very different numbers"
        lines.append(
            f"Samples with images have {with_images['mean']:,.0f} image tokens, ± {with_images['std']:,.0f} "
            f"({percent(spread)}): {alike}."
        )
    supervised = statistics["supervised_tokens"].get("total", 0) / total
    lines.append(f"{percent(supervised)} of the tokens are supervised.")
    return tuple(lines)


def _column(table: CostTable, name: str) -> np.ndarray:
    """A column; image and video tokens together are `vision_tokens`."""
    if name == "vision_tokens":
        return np.add.reduce([table.column(name) for name in VISION_TOKENS])
    return table.column(name)


def modality_codes(images: np.ndarray, videos: np.ndarray) -> np.ndarray:
    """The position in MODALITIES of every row.

    >>> [CONTENTS[code] for code in modality_codes(np.array([0, 1, 3, 0]), np.array([0, 0, 0, 2]))]
    ['text', 'image', 'images', 'video']
    """
    return np.where(videos > 0, np.where(images > 0, 4, 3), np.minimum(images, 2))


def histogram(values: np.ndarray) -> Histogram:
    """Counts of whole numbers: equal steps up to the rare large ones, or growing steps where the tail is very long."""
    most = int(values.max(initial=0))
    usual = np.percentile(values, 99.5) if len(values) else 0.0
    middle = np.percentile(values, 50) if len(values) else 0.0
    if most <= _BINS:
        edges = np.arange(most + 2) - 0.5
    elif middle > 0 and usual > 20 * middle:
        low = max(1.0, float(values[values > 0].min()))
        edges = np.unique(np.round(np.geomspace(low, most + 1, _BINS)))
        edges = np.concatenate([[0.0], edges]) if edges[0] > 0 else edges
    else:
        step = _round_step(max(usual, 1.0) / _BINS)
        edges = np.arange(0.0, max(usual, 1.0) + step, step)
        edges = np.append(edges[edges < most], most + 1.0)
    counts, _ = np.histogram(values, edges)
    return Histogram(edges=tuple(float(edge) for edge in edges), counts=tuple(int(count) for count in counts))


def _round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, 50, ... so that edges are numbers one can read.

    >>> _round_step(33.0)
    50.0
    """
    size = 10.0 ** math.floor(math.log10(max(step, 1.0)))
    return next(size * factor for factor in (1, 2, 5, 10) if size * factor >= step)


def _largest(names: tuple[str, ...], codes: np.ndarray, tokens: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
    """The sources with the most tokens, and all others as one."""
    if len(names) <= _MOST_SOURCES:
        return names, codes
    sums = np.bincount(codes, weights=tokens, minlength=len(names))
    shown = np.argsort(-sums, kind="stable")[: _MOST_SOURCES - 1]
    place = np.full(len(names), len(shown))
    place[shown] = np.arange(len(shown))
    return (*(names[at] for at in shown), f"{len(names) - len(shown):,} other sources"), place[codes]


class _Parts:
    """The rows in groups, described column by column."""

    def __init__(self, names: tuple[str, ...], codes: np.ndarray) -> None:
        sizes = np.bincount(codes, minlength=len(names))
        self._present = [(names[code], int(sizes[code])) for code in np.flatnonzero(sizes)]
        self._order = np.argsort(codes, kind="stable") if len(self._present) > 1 else None
        self._found: list[dict[str, Statistics]] = [{} for _ in self._present]

    def add(self, name: str, values: np.ndarray, whole: Statistics) -> None:
        """Describe one column in every group; a group of all rows has been described already."""
        if self._order is None:
            self._found[0][name] = whole
            return
        ordered, start = values[self._order], 0
        for (_, size), statistics in zip(self._present, self._found, strict=True):
            statistics[name] = describe(ordered[start : start + size])
            start += size

    def groups(self, total: int) -> tuple[Group, ...]:
        """One group for each name that has rows, most tokens first."""
        groups = [
            Group(
                name=name,
                samples=size,
                tokens=round(statistics["tokens"]["total"]),
                share_of_tokens=statistics["tokens"]["total"] / total,
                statistics=statistics,
            )
            for (name, size), statistics in zip(self._present, self._found, strict=True)
        ]
        return tuple(sorted(groups, key=lambda group: -group.tokens))
