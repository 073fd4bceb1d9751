"""The two PNG figures, composed of the charts of the page: the lengths of samples, and each packing that was tried.

matplotlib is the canvas: it brings fonts and draws the elements of the charts at their places, and knows nothing of
axes. Widths are pixels of a figure of 1,200.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from packtrain.core.numbers import count, large, percent, shown
from packtrain.planning.study_values import Study
from packtrain.reports.charts import share_chart
from packtrain.reports.compared import words
from packtrain.reports.study_content import sources_by_size
from packtrain.reports.study_page import Titled, histogram_of, sweep_charts, sweep_names
from packtrain.reports.svg import AXIS, LIGHT

_WIDE, _HIGH = 1200, 700
_LEFT, _GAP = 60, 36
_POINT = 0.72  # points of a pixel, at 100 pixels an inch
_DASHES = {"mark": (0, (3, 3)), "limit": (0, (5, 4)), "more": (0, (4, 3))}
_LINES = {  # colour, width, opacity
    "grid": ("line", 0.8, 1.0),
    "mark": ("ink", 0.9, 0.6),
    "chosen": ("accent", 12.0, 0.13),
    "limit": ("bad", 1.4, 1.0),
}


def draw_distribution(study: Study, path: Path) -> None:
    """Histograms of all tokens, of text and media tokens and of objects, and whose the tokens are."""
    canvas = _Canvas("Length of samples", study)
    stats = study.dataset
    canvas.chart(histogram_of(study, "tokens", height=250, every_mark=True), _LEFT, 116, _WIDE - 2 * _LEFT)
    names = [name for name in ("text_tokens", "vision_tokens", "objects") if name in stats.histograms]
    kinds = {words(kind): tokens for kind, tokens in stats.modality_tokens.items()}
    shares = {"modality": _shares(kinds), "source": {}}
    if len(stats.by_source) > 1:
        largest = sources_by_size(stats.by_source)[:8]
        shares["source"] = {shown(group.name, 19): group.share_of_tokens for group in largest}
    shares = {what: parts for what, parts in shares.items() if parts}
    width = (_WIDE - 2 * _LEFT - _GAP * (len(names) + len(shares) - 1)) / max(len(names) + len(shares), 1)
    for at, name in enumerate(names):
        canvas.chart(histogram_of(study, name, height=220), _LEFT + at * (width + _GAP), 415, width)
    for at, (what, parts) in enumerate(shares.items(), start=len(names)):
        bars = share_chart(parts, label=f"Tokens by {what}", height=220)
        title = Titled(title=f"Tokens by {what}", unit="", svg=bars)
        canvas.chart(title, _LEFT + at * (width + _GAP) + 8, 415, width)
    canvas.save(path)


def draw_efficiency(study: Study, path: Path) -> None:
    """Speed, fill, packs and memory over the packing length."""
    canvas = _Canvas("Packing by length", study)
    width = (_WIDE - 2 * _LEFT - _GAP) / 2
    for at, chart in enumerate(sweep_charts(study, height=210)):
        canvas.chart(chart, _LEFT + at % 2 * (width + _GAP), 116 + at // 2 * 275, width)
    x = float(_LEFT)
    for at, name in enumerate((*sweep_names(study), "hollow: does not fit", f"ring: {study.recommendation.mark}")):
        x = canvas.key(name, at if at < len(sweep_names(study)) else None, x, _HIGH - 28)
    canvas.save(path)


def _shares(parts: Mapping[str, float]) -> dict[str, float]:
    whole = sum(parts.values()) or 1
    return {name: part / whole for name, part in parts.items()}


class _Canvas:
    """A figure whose places are pixels from its upper left corner."""

    def __init__(self, title: str, study: Study) -> None:
        self._figure = Figure(figsize=(_WIDE / 100, _HIGH / 100), dpi=144, facecolor="white")
        self._axes: Axes = self._figure.add_axes((0, 0, 1, 1))
        self._axes.set(xlim=(0, _WIDE), ylim=(_HIGH, 0))
        self._axes.axis("off")
        self.text(title, _LEFT, 44, size=22, weight="bold")
        self.text(_subtitle(study), _LEFT, 68, size=13, colour="muted")

    def text(self, text: str, x: float, y: float, *, size: float = 11.5, colour: str = "ink", **style: object) -> None:
        """One line; dollar signs would start a formula."""
        color = LIGHT[colour]
        self._axes.text(x, y, text.replace("$", r"\$"), size=size * _POINT, color=color, clip_on=False, **style)  # type: ignore[arg-type]

    def key(self, name: str, number: int | None, x: float, y: float) -> float:
        """A line of a legend; returns where the next one begins."""
        if number is not None:
            self._line((x, x + 24), (y - 4, y - 4), [f"s{number % 8}", *(["more"] if number else [])])
            x += 30
        self.text(shown(name, 40), x, y, colour="muted")
        return x + 30 + 6.6 * len(shown(name, 40))

    def chart(self, chart: Titled, x: float, y: float, width: float) -> None:
        """The elements of a chart of the page, under its title."""
        unit = f": {chart.unit}" if chart.unit not in ("", "samples") else ""
        self.text(f"{chart.title}{unit}", x, y - 8, size=13, weight="bold")
        for part in ElementTree.fromstring(str(chart.svg)):
            is_axis = part.get("class") == "axis"
            left = 0 if is_axis or not _has_axis(chart.svg) else AXIS
            self._elements(part, x + left, y, AXIS if is_axis else width - left)

    def _elements(self, parts: ElementTree.Element, left: float, top: float, width: float) -> None:
        for one in parts:
            css = (one.get("class") or "").split()

            def across(name: str, one: ElementTree.Element = one) -> float:
                value = one.get(name, "0")
                return left + (float(value[:-1]) / 100 * width if value.endswith("%") else float(value))

            if one.tag == "rect":
                size = across("width") - left, float(one.get("height", 0))
                place = across("x"), top + float(one.get("y", 0))
                color = LIGHT[css[0]]
                self._axes.add_patch(Rectangle(place, *size, facecolor=color, edgecolor="white", linewidth=0.7))
            elif one.tag == "line":
                ends = [top + float(one.get(name, 0)) for name in ("y1", "y2")]
                self._line((across("x1"), across("x2")), ends, css)
            elif one.tag == "circle":
                self._dot(across("cx"), top + float(one.get("cy", 0)), float(one.get("r", 0)), css)
            elif one.tag == "text":
                self._label(one, across("x") + float(one.get("dx", 0)), top + float(one.get("y", 0)), css)

    def _label(self, one: ElementTree.Element, x: float, y: float, css: Sequence[str]) -> None:
        side = {"end": "right", "middle": "center"}.get(one.get("text-anchor", ""), "left")
        halo = [withStroke(linewidth=3, foreground="white")] if "note" in css else []
        dark = "note" in css or "strong" in css
        weight = "bold" if "strong" in css else "normal"
        self.text(
            one.text or "", x, y, colour="ink" if dark else "muted", ha=side, weight=weight, path_effects=halo, zorder=5
        )

    def _line(self, xs: Sequence[float], ys: Sequence[float], css: Sequence[str]) -> None:
        colour, width, alpha = _LINES.get(css[0], (css[0].replace("s", "c"), 1.8, 1.0))
        dashes = next((_DASHES[name] for name in css if name in _DASHES), "-")
        style = {"color": LIGHT[colour], "linewidth": width, "alpha": alpha, "linestyle": dashes}
        self._axes.add_line(Line2D(xs, ys, solid_capstyle="butt", zorder=1 if css[0] == "grid" else 2, **style))  # type: ignore[arg-type]

    def _dot(self, x: float, y: float, radius: float, css: Sequence[str]) -> None:
        color = LIGHT[css[1].replace("s", "c")]
        fill = "none" if "ring" in css else "white" if "hollow" in css else color
        size = {"markersize": 2 * radius * _POINT, "markeredgewidth": 1.4}
        self._axes.add_line(Line2D([x], [y], marker="o", color=color, markerfacecolor=fill, zorder=3, **size))  # type: ignore[arg-type]

    def save(self, path: Path) -> None:
        """Without a version in it: the same study gives the same bytes."""
        with warnings.catch_warnings():
            # A name in a script that the font lacks is drawn as boxes, which is not worth a warning.
            warnings.filterwarnings("ignore", message=".*missing from font.*")
            FigureCanvasAgg(self._figure).print_png(str(path), metadata={"Software": None})


def _has_axis(chart: Markup) -> bool:
    return 'class="axis"' in chart


def _subtitle(study: Study) -> str:
    chosen = study.simulations[study.recommendation.simulation]
    return (
        f"{count(study.dataset.samples)} samples, {large(study.dataset.tokens)} tokens · {shown(study.model, 50)} · "
        f"{count(study.gpus)} × {shown(study.gpu, 30)} · {study.recommendation.mark}: "
        f"{count(chosen.packing_length)} tokens, {count(chosen.packs)} packs, {percent(chosen.fill)} filled"
    )
