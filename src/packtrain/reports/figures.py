"""The two PNG figures: the lengths of samples, and how well and how fast each packing is."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from packtrain.core.numbers import GIB, count, decimal, large, percent, shown, tick
from packtrain.planning.study_values import DatasetStats, Group, Histogram, Simulation, Study
from packtrain.reports.charts import bin_position, edge_ticks, wide
from packtrain.reports.compared import limit_sets, other_limits, words
from packtrain.reports.study_content import sources_by_size
from packtrain.reports.svg import spaced

# Okabe and Ito's colours, which stay apart for every kind of colour vision; a little darker, for lines on white.
_COLOURS = ("#1f6fb5", "#e08a00", "#00896b", "#b4538f", "#4aa8dc", "#c8501a", "#857612", "#8b949f")
_INK, _MUTED, _LINE = "#1b1f24", "#59616c", "#e2e0db"
_RING = 11  # points: wide enough that marks inside it stay readable
_MARKS = (("median", "median"), ("95 %", "p95"), ("mean", "mean"), ("99 %", "p99"))


def draw_distribution(study: Study, path: Path) -> None:
    """Histograms of all tokens, of text and media tokens and of objects, and whose the tokens are."""
    figure = _figure("Length of samples", _subtitle(study))
    stats = study.dataset
    names = [name for name in ("text_tokens", "vision_tokens", "objects") if name in stats.histograms]
    several = len(stats.by_source) > 1
    shares = [("modality", _modalities(stats)), *([("source", _sources(stats.by_source))] if several else [])]
    columns = len(names) + len(shares)
    grid = figure.add_gridspec(
        2, columns, height_ratios=(1.15, 1), left=0.07, right=0.97, top=0.83, bottom=0.06, hspace=0.36, wspace=0.42
    )
    for place, name in ((grid[0, :], "tokens"), *((grid[1, at], name) for at, name in enumerate(names))):
        histogram = stats.histograms.get(name)
        statistics = (histogram and histogram.without_zeros) or stats.statistics.get(name, {})
        marks = _MARKS if name == "tokens" else _MARKS[:2]
        _histogram(figure.add_subplot(place), histogram, name, statistics, marks)
    for at, (what, parts) in enumerate(shares, start=len(names)):
        _shares(figure.add_subplot(grid[1, at]), parts, what)
    _save(figure, path)


def _modalities(stats: DatasetStats) -> dict[str, float]:
    whole = sum(stats.modality_tokens.values()) or 1
    return {kind: tokens / whole for kind, tokens in stats.modality_tokens.items()}


def _sources(groups: Sequence[Group]) -> dict[str, float]:
    return {shown(group.name, 19): group.share_of_tokens for group in sources_by_size(groups)[:8]}


def draw_efficiency(study: Study, path: Path) -> None:
    """Fill, speed, packs and memory over the packing length."""
    figure = _figure("Packing by length", _subtitle(study))
    grid = figure.add_gridspec(2, 2, left=0.09, right=0.97, top=0.83, bottom=0.06, hspace=0.36, wspace=0.22)
    panels: tuple[tuple[str, Callable[[Simulation], float], Callable[[float], str]], ...] = (
        ("fill: share of a pack that is real tokens", lambda one: one.fill, lambda value: f"{100 * value:g} %"),
        ("speed: real tokens per second", lambda one: one.tokens_per_second, tick),
        ("packs in an epoch", lambda one: one.packs, tick),
        ("memory of one GPU in GiB", lambda one: one.memory_bytes / GIB, lambda value: f"{value:g}"),
    )
    for at, (title, value, write) in enumerate(panels):
        axes = figure.add_subplot(grid[at // 2, at % 2])
        _style(axes, title, write)
        _sweep(axes, study, value)
        gpu = study.memory.usable_bytes / GIB
        most = max(value(one) for one in study.simulations)
        most = min(max(most, gpu), 1.5 * gpu) if at == 3 else most  # one far too long would flatten the others
        least = min(value(one) for one in study.simulations)
        # Shares are near their top; everything else is compared with nothing at all.
        axes.set_ylim(max(0.0, least - 0.35 * (1 - least) - 0.01) if at == 0 else 0, 1.0 if at == 0 else 1.12 * most)
        if at == 0:
            for line in axes.lines:
                line.set_clip_on(False)  # marks at 100 % are whole
        if at == 3:
            axes.axhline(gpu, color=_COLOURS[5], linestyle=(0, (5, 4)), linewidth=1.4)
            axes.annotate(
                _plain(f"{shown(study.memory.gpu, 30)}: {gpu:.1f} GiB usable"),
                (0.01, gpu),
                color=_COLOURS[5],
                size=8,
                xycoords=("axes fraction", "data"),
                xytext=(0, 4),
                textcoords="offset points",
            )
    figure.axes[0].legend(frameon=False, fontsize=8)
    _save(figure, path)


def _figure(title: str, subtitle: str) -> Figure:
    figure = Figure(figsize=(12, 7), dpi=144, facecolor="white")
    figure.text(0.07, 0.945, title, size=16, weight="bold", color=_INK)
    figure.text(0.07, 0.912, subtitle, size=9.5, color=_MUTED)
    return figure


def _subtitle(study: Study) -> str:
    chosen = study.simulations[study.recommendation.simulation]
    data = f"{count(study.dataset.samples)} samples, {large(study.dataset.tokens)} tokens"
    return _plain(
        f"{data} · {shown(study.model, 50)} · {count(study.gpus)} × {shown(study.gpu, 30)} · "
        f"{study.recommendation.mark}: {count(chosen.packing_length)} tokens, {count(chosen.packs)} packs, "
        f"{percent(chosen.fill)} filled"
    )


def _histogram(
    axes: Axes, histogram: Histogram | None, name: str, statistics: Any, marks: Sequence[tuple[str, str]]
) -> None:
    """Bins are drawn equally wide, as on the page, so that a long tail does not flatten the rest."""
    _style(axes, f"{words(name).lower()} per sample" if name else "", tick)
    if histogram is None:
        axes.text(0.5, 0.5, "none", ha="center", color=_MUTED, transform=axes.transAxes)
        return
    bins = len(histogram.counts)
    axes.bar([at + 0.5 for at in range(bins)], histogram.counts, width=0.92, color=_COLOURS[0])
    axes.set_xlim(0, bins)
    ticks = edge_ticks(histogram.edges)
    axes.set_xticks([x * bins for x, _ in ticks], [text for _, text in ticks])
    axes.set_ylim(0, 1.3 * max(histogram.counts))  # names of the marks stand above the bars
    for at, (word, key) in enumerate(sorted(marks, key=lambda mark: statistics.get(mark[1], 0))):
        if key in statistics:
            x = bin_position(histogram.edges, statistics[key])
            axes.axvline(x * bins, color=_INK, linestyle=(0, (3, 3)), linewidth=0.9, alpha=0.6)
            axes.annotate(
                f"{word} {decimal(statistics[key])}",
                (x * bins, 0.99 - 0.075 * at),
                size=8.5,
                color=_INK,
                xycoords=("data", "axes fraction"),
                ha="right" if x > 0.6 else "left",
                va="top",
                xytext=(-3 if x > 0.6 else 3, 0),
                textcoords="offset points",
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
            )


def _shares(axes: Axes, shares: Mapping[str, float], what: str) -> None:
    """Shares of tokens, from the top."""
    _style(axes, f"tokens by {what}", lambda value: "")
    sizes = list(shares.values())
    axes.barh(range(len(sizes)), sizes, height=0.62, color=_COLOURS[: len(sizes)])
    axes.set_yticks(range(len(sizes)), [_plain(name) for name in shares], size=8.5)
    axes.set_ylim(max(len(sizes), 3) - 0.5, -0.5)
    axes.set_xticks([])
    axes.grid(visible=False)
    axes.set_xlim(0, max([*sizes, 1e-9]) * 1.35)
    for at, share in enumerate(sizes):
        axes.annotate(
            percent(share),
            (share, at),
            xytext=(5, 0),
            size=8.5,
            va="center",
            textcoords="offset points",
            color=_INK,
        )


def _sweep(axes: Axes, study: Study, value: Callable[[Simulation], float]) -> None:
    """A line for each set of limits; what does not fit is hollow, and a ring is around what is recommended."""
    simulations, best = study.simulations, study.simulations[study.recommendation.simulation]
    chosen = best.packing_length
    for at, limits in enumerate(limit_sets(simulations)):
        line = [one for one in simulations if tuple(sorted(one.limits.items())) == limits]
        line.sort(key=lambda one: one.packing_length)
        colour = _COLOURS[at % len(_COLOURS)]
        size, above = 3.5 if at else 5, 3 + at / 100  # lines that are equal show each other
        axes.plot(
            [one.packing_length for one in line],
            [value(one) for one in line],
            color=colour,
            marker="o",
            markersize=size,
            linestyle=(0, (4, 3)) if at else "-",
            linewidth=1.8,
            zorder=above,
            label=_plain(other_limits(dict(limits)) or "no further limits"),
        )
        missed = [one for one in line if not one.fits]
        _marks(axes, missed, value, size, color=colour, markerfacecolor="white", zorder=above + 0.005)
        if best in line:
            ring = {"color": colour, "markerfacecolor": "none", "markeredgewidth": 1.6, "zorder": 9}
            _marks(axes, (best,), value, _RING, label=study.recommendation.mark, **ring)
    if any(not one.fits for one in simulations):
        _marks(axes, (), value, 5, color=_MUTED, markerfacecolor="white", label="hollow: does not fit")
    axes.axvline(chosen, color=_COLOURS[0], linewidth=9, alpha=0.12)
    lengths = sorted({one.packing_length for one in simulations})
    if wide(lengths):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    along = [math.log(length) if wide(lengths) else length for length in lengths]
    width = (along[-1] - along[0]) or 1
    shown_at = spaced([(at - along[0]) / width for at in along], lengths.index(chosen), 0.17)
    axes.set_xticks([lengths[at] for at in shown_at], [count(lengths[at]) for at in shown_at])


def _marks(
    axes: Axes, ones: Sequence[Simulation], value: Callable[[Simulation], float], size: float, **style: Any
) -> None:
    """Marks without a line."""
    places = [one.packing_length for one in ones], [value(one) for one in ones]
    axes.plot(*places, linestyle="", marker="o", markersize=size, **style)


def _style(axes: Axes, title: str, write: Callable[[float], str]) -> None:
    axes.set_title(title, loc="left", size=10.5, color=_INK, weight="bold", pad=9)
    axes.tick_params(colors=_MUTED, labelsize=8.5, length=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axes.grid(axis="y", color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)


def _plain(text: str) -> str:
    """Dollar signs would start a formula."""
    return text.replace("$", r"\$")


def _save(figure: Figure, path: Path) -> None:
    with warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes; that is no news for who reads the log.
        warnings.filterwarnings("ignore", message=".*missing from font.*")
        # Without a version in it, the same study gives the same bytes.
        FigureCanvasAgg(figure).print_png(str(path), metadata={"Software": None})
