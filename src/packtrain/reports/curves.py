"""Curves over a run as inline SVG: a line through the means, a band from the smallest to the largest, marks, limits.

Curves are drawn in a box of 1,000 units that is stretched to the width there is; strokes keep their width. Hovering a
column shows what all curves are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from packtrain.reports.svg import (
    BOTTOM,
    TOP,
    Scale,
    element,
    frame,
    nice_scale,
    to_percent,
    x_label,
    y_at,
    y_axis,
)

BUCKETS = 140  # as many as a page is wide enough to show
_WIDE = 1000.0


# ---- long runs as few points: every step counts, and what is drawn says how far it spread


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Thinned:
    """Steps put together bucket by bucket: mean, smallest and largest. Buckets without a number are left out."""

    bucket: np.ndarray  # number of each bucket that has something
    x: np.ndarray  # mean place of the steps in it
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    steps: np.ndarray  # how many there are

    @property
    def spread(self) -> bool:
        """Does any bucket hold several steps?"""
        return bool((self.steps > 1).any())


def edges_for(end: float, buckets: int = BUCKETS) -> np.ndarray:
    """Equally wide buckets from 0 to the end."""
    return np.linspace(0.0, max(end, 1e-9), buckets + 1)


def thin(x: np.ndarray, y: np.ndarray, edges: np.ndarray) -> Thinned:
    """Put steps into buckets. Numbers that are not finite are left out, and so is what lies beyond the last edge.

    >>> thinned = thin(np.array([1.0, 2.0, 9.0]), np.array([4.0, 6.0, 1.0]), np.array([0.0, 5.0, 10.0]))
    >>> thinned.mean.tolist(), thinned.low.tolist(), thinned.high.tolist(), thinned.steps.tolist()
    ([5.0, 1.0], [4.0, 1.0], [6.0, 1.0], [2, 1])
    """
    good = np.isfinite(x) & np.isfinite(y) & (x <= edges[-1])
    x, y = x[good], y[good]
    at = np.clip(np.searchsorted(edges, x, side="left") - 1, 0, len(edges) - 2)
    order = np.argsort(at, kind="stable")
    x, y, at = x[order], y[order], at[order]
    buckets, first, counts = np.unique(at, return_index=True, return_counts=True)
    if not len(buckets):
        empty = np.zeros(0)
        return Thinned(bucket=buckets, x=empty, mean=empty, low=empty, high=empty, steps=counts)
    return Thinned(
        bucket=buckets,
        x=np.add.reduceat(x, first) / counts,
        mean=np.add.reduceat(y, first) / counts,
        low=np.minimum.reduceat(y, first),
        high=np.maximum.reduceat(y, first),
        steps=counts,
    )


# ---- charts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Curve:
    """One line with its band."""

    name: str
    css: str  # s0 to s7, and dash1 to dash3
    points: Thinned
    trend: Thinned | None = None  # a smoothed line; the points themselves are then drawn faintly


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """One mark next to the curves."""

    x: float
    y: float
    css: str
    tip: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """A horizontal line with a name."""

    y: float
    name: str
    css: str = "limit"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Axes:
    """How a chart's numbers are written, and what it spans."""

    label: str  # what is drawn, for readers who do not see it
    edges: np.ndarray  # of the buckets along x
    write: Callable[[float], str]  # a value, in the tip
    write_x: Callable[[float], str]  # a place along x, in the tip
    tick_x: Callable[[float], str]
    title_x: str  # what lies along x
    unit_x: float = 1.0  # of x, that its ticks are round numbers of
    tick: Callable[[float], str] | None = None  # a value at the axis; None: as in the tip
    from_zero: bool = True
    top: float | None = None
    bottom: float | None = None
    height: int = 200


def curve_chart(curves: Sequence[Curve], axes: Axes, dots: Sequence[Dot] = (), levels: Sequence[Level] = ()) -> Markup:
    """The chart; its scale reaches for the levels too."""
    scale, ticks = _scale(curves, axes, dots, levels)
    labels, plot = y_axis(scale, ticks, axes.height, axes.tick or axes.write)
    across = Scale(start=0.0, end=float(axes.edges[-1]))
    drawn: list[Markup] = []
    for curve in curves:
        drawn += _curve_marks(curve, across, scale, axes.height)
    box = {"width": "100%", "height": axes.height, "viewBox": f"0 0 {_WIDE:g} {axes.height}"}
    plot.append(element("svg", *drawn, **box, preserveAspectRatio="none", class_="curves", aria_hidden="true"))
    for number, level in enumerate(levels):
        plot += _level(level, scale, axes.height, right=number % 2 == 1)
    plot += _columns(curves, axes)
    for dot in dots:
        x, y = to_percent(across.at(dot.x)), y_at(scale, dot.y, axes.height)
        plot.append(element("circle", element("title", dot.tip), cx=x, cy=y, r=4, class_=f"dot {dot.css}"))
    plot += _x_labels(axes)
    title = element("div", axes.title_x, class_="along", aria_hidden="true")
    return frame(plot, axis=labels, label=axes.label, height=axes.height) + title


def _scale(
    curves: Sequence[Curve], axes: Axes, dots: Sequence[Dot], levels: Sequence[Level]
) -> tuple[Scale, tuple[float, ...]]:
    shown = [values for curve in curves for values in (curve.points.low, curve.points.high) if len(values)]
    values = np.concatenate([*shown, [dot.y for dot in dots], [level.y for level in levels]])
    if not len(values):
        return nice_scale(0, 1)
    low = 0.0 if axes.from_zero else float(values.min())
    high = float(values.max())
    low, high = (given if given is not None else own for given, own in ((axes.bottom, low), (axes.top, high)))
    return nice_scale(min(low, high), high if high > low else low + (abs(low) or 1.0))


def _curve_marks(curve: Curve, across: Scale, scale: Scale, height: int) -> list[Markup]:
    """Band, then lines."""
    points, marks = curve.points, []
    xs = [_WIDE * across.at(x) for x in points.x.tolist()]

    def at(values: np.ndarray) -> list[str]:
        return [f"{x:.1f},{y_at(scale, y, height):.1f}" for x, y in zip(xs, values.tolist(), strict=True)]

    if points.spread:
        around = [*at(points.high), *reversed(at(points.low))]
        marks.append(element("polygon", points=" ".join(around), class_=f"band {curve.css}"))
    faint = " faint" if curve.trend is not None else ""
    marks.append(element("polyline", points=" ".join(at(points.mean)), class_=f"{curve.css}{faint}"))
    if curve.trend is not None and len(curve.trend.x):
        line = [
            f"{_WIDE * across.at(x):.1f},{y_at(scale, y, height):.1f}"
            for x, y in zip(curve.trend.x.tolist(), curve.trend.mean.tolist(), strict=True)
        ]
        marks.append(element("polyline", points=" ".join(line), class_=curve.css))
    if len(points.x) == 1:  # one point makes no line
        x, y = xs[0], y_at(scale, float(points.mean[0]), height)
        marks.append(element("line", x1=x - 6, x2=x + 6, y1=y, y2=y, class_=curve.css))
    return marks


def _level(level: Level, scale: Scale, height: int, *, right: bool) -> list[Markup]:
    """The line, and its name on one of the sides, so that two names do not meet."""
    y = y_at(scale, level.y, height)
    line = element("line", x1="0", x2="100%", y1=y, y2=y, class_=level.css)
    side = {"x": "98%", "text_anchor": "end"} if right else {"x": "2%", "text_anchor": "start"}
    return [line, element("text", level.name, y=y - 5 if y > TOP + 12 else y + 13, class_="note", **side)]


def _columns(curves: Sequence[Curve], axes: Axes) -> list[Markup]:
    """One invisible column for each bucket that has something: what to read when the pointer is there."""
    edges = axes.edges
    tips: dict[int, list[str]] = {}
    for curve in curves:
        points, trend = curve.points, curve.trend
        smooth = np.interp(points.x, trend.x, trend.mean) if trend is not None and len(trend.x) else None
        for at, bucket in enumerate(points.bucket.tolist()):
            text = axes.write(float(points.mean[at]))
            if points.steps[at] > 1:
                text = f"mean {text} ({axes.write(float(points.low[at]))} to {axes.write(float(points.high[at]))})"
            if smooth is not None:
                text += f", smoothed {axes.write(float(smooth[at]))}"
            tips.setdefault(bucket, []).append(f"{curve.name}: {text}" if curve.name else text)
    whole, columns = float(edges[-1]), []
    buckets = sorted(tips)
    for at, bucket in enumerate(buckets):
        # Sparse runs have empty buckets: a column reaches half-way to its neighbours.
        middle = (edges[bucket] + edges[bucket + 1]) / 2
        start = (edges[buckets[at - 1] + 1] + edges[bucket]) / 2 if at else 0.0
        end = (edges[bucket + 1] + edges[buckets[at + 1]]) / 2 if at + 1 < len(buckets) else whole
        tip = f"{axes.write_x(float(middle))} · " + " · ".join(tips[bucket])
        place = {"x": to_percent(start / whole), "width": to_percent(max(end - start, 0.0) / whole)}
        height = axes.height - TOP - BOTTOM
        columns.append(element("rect", element("title", tip), **place, y=TOP, height=height, class_="hit"))
    return columns


def _x_labels(axes: Axes) -> list[Markup]:
    end = float(axes.edges[-1])
    _, ticks = nice_scale(0, end / axes.unit_x, steps=4)
    inside = [tick * axes.unit_x for tick in ticks if tick * axes.unit_x <= end * 1.0001]
    return [x_label(axes.tick_x(tick), tick / end, axes.height) for tick in inside]
