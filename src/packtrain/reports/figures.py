"""The two PNG figures: the lengths of samples, and each packing that was tried. Their numbers are those of the page."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from packtrain.core.numbers import count, counted, decimal, large, percent, shown, tick
from packtrain.planning.study_values import Study
from packtrain.reports.charts import bin_position, edge_ticks, wide
from packtrain.reports.study_content import by_limits, sources_by_size, words
from packtrain.reports.study_page import Sweep, histogram_marks, histogram_title, sweeps
from packtrain.reports.svg import LIGHT

_SOURCES = 8  # of the largest


def draw_distribution(study: Study, path: Path) -> Figure:
    """Histograms of all tokens, of text and media tokens and of objects, and whose the tokens are."""
    stats = study.dataset
    names = [name for name in ("text_tokens", "vision_tokens", "objects") if name in stats.histograms]
    whole = sum(stats.modality_tokens.values()) or 1
    shares = {"modality": {words(kind): tokens / whole for kind, tokens in stats.modality_tokens.items()}, "source": {}}
    if len(stats.by_source) > 1:
        largest = sources_by_size(stats.by_source)[:_SOURCES]
        shares["source"] = {shown(group.name, 19): group.share_of_tokens for group in largest}
    shares = {what: parts for what, parts in shares.items() if parts}
    figure = _figure("Length of samples", study)
    grid = figure.add_gridspec(2, max(len(names) + len(shares), 1))
    _histogram(figure.add_subplot(grid[0, :]), study, "tokens", all_marks=True)
    for at, name in enumerate(names):
        _histogram(figure.add_subplot(grid[1, at]), study, name)
    for at, (what, parts) in enumerate(shares.items(), start=len(names)):
        axes = figure.add_subplot(grid[1, at])
        bars = axes.barh(range(len(parts)), list(parts.values()), color=[LIGHT[f"c{n % 8}"] for n in range(len(parts))])
        labels = [f"{_plain(name)}  {percent(share)}" for name, share in parts.items()]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
        axes.set(title=f"Tokens by {what}", xlim=(0, 1.6 * max(parts.values()) or 1), xticks=[], yticks=[])
        axes.invert_yaxis()
        axes.spines["bottom"].set_visible(False)
    return _save(figure, path)


def draw_efficiency(study: Study, path: Path) -> Figure:
    """Speed, fill, packs and memory over the packing length."""
    figure = _figure("Packing by length", study)
    for number, one in enumerate(sweeps(study), start=1):
        _sweep(figure.add_subplot(2, 2, number), study, one)
    lines, names = figure.axes[0].get_legend_handles_labels()
    note = f"hollow: does not fit; ring: {study.recommendation.mark}"
    legend = figure.legend(lines, names, title=note, ncols=4, loc="outside lower left", fontsize=8, frameon=False)
    legend.get_title().set_fontsize(8)
    return _save(figure, path)


def _histogram(axes: Axes, study: Study, name: str, *, all_marks: bool = False) -> None:
    """Bars are equally wide whatever their edges, as on the page."""
    histogram = study.dataset.histograms[name]
    bins = len(histogram.counts)
    axes.bar(range(bins), histogram.counts, width=0.96, align="edge", color=LIGHT["c0"])
    ticks = edge_ticks(histogram.edges)
    axes.set(title=histogram_title(study, name), xlim=(0, bins), ylim=(0, 1.15 * max(histogram.counts, default=1)))
    axes.set_xticks([bins * x for x, _ in ticks], [text for _, text in ticks])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: tick(y)))
    marks = histogram_marks(study, name, all_of_them=all_marks)
    for at, (word, value) in enumerate(marks.items()):
        x = bin_position(histogram.edges, value)
        axes.axvline(bins * x, color=LIGHT["ink"], linewidth=0.8, linestyle=(0, (3, 3)), alpha=0.6)
        side = "right" if x > 0.7 else "left"
        y = 0.94 - 0.06 * at if all_marks else 0.92 - 0.09 * at
        axes.text(bins * x, y, f" {word} {decimal(value)} ", transform=axes.get_xaxis_transform(), ha=side, fontsize=8)


def _sweep(axes: Axes, study: Study, one: Sweep) -> None:
    """A line for each set of further limits; hollow marks do not fit the GPU, the ring is what was chosen."""
    chosen = study.simulations[study.recommendation.simulation]
    highest = max([one.value(each) for each in study.simulations]) if one.top is None else one.top
    axes.axvline(chosen.packing_length, color=LIGHT["accent"], linewidth=9, alpha=0.13)
    for number, (limits, tried) in enumerate(by_limits(study.simulations).items()):
        color = LIGHT[f"c{number % 8}"]
        x = [each.packing_length for each in tried]
        y = [min(one.value(each), highest) for each in tried]
        axes.plot(
            x, y, "--o" if number else "-o", color=color, markersize=4, label=_plain(limits or "no further limits")
        )
        fill = [color if each.fits else "white" for each in tried]
        axes.scatter(
            x, y, 16 if number else 36, fill, edgecolors=color, zorder=3, clip_on=False
        )  # equal lines show each other
        ring = [each is chosen for each in tried]
        axes.scatter(np.compress(ring, x), np.compress(ring, y), 170, "none", edgecolors=color, zorder=4, clip_on=False)
    if one.limit is not None:
        axes.axhline(one.limit[0], color=LIGHT["bad"], linestyle=(0, (5, 4)), linewidth=1.2)
        along = axes.get_yaxis_transform()
        below = one.limit[0] > 0.9 * highest  # the title is above
        va = "top" if below else "bottom"
        axes.text(0.01, one.limit[0], _plain(one.limit[1]), transform=along, va=va, fontsize=8)
    lengths = sorted({each.packing_length for each in study.simulations})
    axes.set_xscale("log" if wide(lengths) else "linear")
    axes.set_xticks(lengths, [count(length) for length in lengths], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_title(f"{one.title}: {_plain(one.unit)}")
    if one.from_zero:
        axes.set_ylim(bottom=0, top=1.08 * highest)
    if one.top is not None:
        axes.set_ylim(top=one.top)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: one.write(y)))


def _figure(title: str, study: Study) -> Figure:
    figure = Figure(figsize=(12, 7), dpi=144, layout="constrained")
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=16, weight="bold")
    figure.text(0.01, 0.935, _plain(subtitle(study)), fontsize=9, color=LIGHT["muted"])
    return figure


def _save(figure: Figure, path: Path) -> Figure:
    """Without a version in it: the same study gives the same bytes."""
    for axes in figure.axes:
        axes.set_title(axes.get_title(), loc="left", fontsize=10, weight="bold")
        axes.set_title("")
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(length=0, labelsize=8, labelcolor=LIGHT["muted"])
        axes.grid(axis="y", color=LIGHT["line"], linewidth=0.8)
        axes.set_axisbelow(True)
    with warnings.catch_warnings():
        # A name in a script that the font lacks is drawn as boxes, which is not worth a warning.
        warnings.filterwarnings("ignore", message=".*missing from font.*")
        FigureCanvasAgg(figure).print_png(str(path), metadata={"Software": None})
    return figure


def _plain(text: str) -> str:
    """Dollar signs would start a formula."""
    return text.replace("$", r"\$")


def subtitle(study: Study) -> str:
    """The study and its recommendation in one line."""
    chosen = study.simulations[study.recommendation.simulation]
    return (
        f"{count(study.dataset.samples)} samples, {large(study.dataset.tokens)} tokens · {shown(study.model, 50)} · "
        f"{count(study.gpus)} × {shown(study.gpu, 30)} · {study.recommendation.mark}: "
        f"{count(chosen.packing_length)} tokens, {counted(chosen.packs, 'pack')}, {percent(chosen.fill)} filled"
    )
