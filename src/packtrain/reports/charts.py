"""The charts of a study as inline SVG, drawn without scripts; hovering shows the numbers of a mark."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup

from packtrain.core.numbers import count, counted, isolate, percent, ratio, shown, tick
from packtrain.packing.schedule import BalanceLine
from packtrain.planning.study_values import Histogram, PicturePack, PictureSample
from packtrain.reports.svg import (
    BOTTOM,
    TOP,
    Scale,
    element,
    frame,
    nice_scale,
    space_out,
    to_percent,
    x_label,
    y_at,
    y_axis,
)

MOST_PACKS, MOST_SAMPLES = 40, 1600  # a page stays small whatever the data
COLOURS = 7  # sources with a colour of their own; the others share the last
_RING = 9.5  # wide enough that marks inside it stay readable
_ROW, _BAR = 16, 12  # pixels of a pack in the picture of packs


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One mark of a line."""

    x: float
    y: float
    tip: str
    hollow: bool = False  # does not fit the GPU
    ring: bool = False  # recommended


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Marks joined in order."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class LegendKey:
    """A colour and its meaning."""

    css: str
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A chart under its title."""

    title: str
    svg: Markup
    unit: str = ""
    keys: tuple[LegendKey, ...] = ()  # where the section has no legend for its colours


@dataclass(frozen=True, kw_only=True, slots=True)
class BarSpan:
    """One part of a stacked bar."""

    size: float
    css: str
    tip: str


def histogram_chart(histogram: Histogram, *, name: str, marks: Mapping[str, float], height: int = 190) -> Markup:
    """Counts per bin, drawn equally wide whatever their edges, so that a long tail does not flatten the rest."""
    counts, edges = histogram.counts, histogram.edges
    scale, ticks = nice_scale(0, 1.15 * max(counts, default=1), steps=3, least=1)
    labels, plot = y_axis(scale, ticks, height, tick)
    width = 1 / max(len(counts), 1)
    for at, number in enumerate(counts):
        y = y_at(scale, number, height)
        tip = f"{bin_name(edges, at)} {name}: {count(number)} samples"
        plot.append(_bar(at * width, width, y, height - BOTTOM - y, "c0", tip))
    for at, (word, value) in enumerate(marks.items()):
        x = bin_position(edges, value)
        plot.append(element("line", x1=to_percent(x), x2=to_percent(x), y1=TOP, y2=height - BOTTOM, class_="mark"))
        anchor, shift = ("end", -4) if x > 0.7 else ("start", 4)
        plot.append(
            element("text", word, x=to_percent(x), dx=shift, y=TOP + 10 + 14 * at, class_="note", text_anchor=anchor)
        )
    plot += [x_label(text, x, height) for x, text in edge_ticks(edges)]
    most = max(range(len(counts)), key=counts.__getitem__, default=0)
    label = f"Histogram of {name} per sample; most samples have {bin_name(edges, most)}"
    return frame(plot, axis=labels, label=label, height=height)


def line_chart(
    lines: Sequence[Line],
    *,
    label: str,
    write: Callable[[float], str],
    chosen: float,
    from_zero: bool = True,
    top: float | None = None,
    limit: tuple[float, str] | None = None,
    height: int = 200,
) -> Markup:
    """Lines over the packing length, with the recommended length marked; what is above `top` is drawn at the edge."""
    points = [point for line in lines for point in line.points]
    values = [point.y for point in points] + ([limit[0]] if limit else [])
    scale, ticks = nice_scale(0 if from_zero else min(values), max(values) if top is None else top)
    labels, plot = y_axis(scale, ticks, height, write)
    xs = sorted({point.x for point in points})
    place = _places(xs)
    if chosen in place:
        at = place[chosen]
        plot.append(element("line", x1=at, x2=at, y1=TOP, y2=height - BOTTOM, class_="chosen"))
    if limit:
        y = y_at(scale, limit[0], height)
        plot.append(element("line", x1="0", x2="100%", y1=y, y2=y, class_="limit"))
        plot.append(element("text", limit[1], x="2%", y=y - 5 if y > TOP + 12 else y + 13, class_="note"))
    for number, line in enumerate(lines):
        plot += _line_marks(line, number, lambda point: (place[point.x], y_at(scale, point.y, height)), chosen)
    shares = [float(place[x].rstrip("%")) / 100 for x in xs]
    first = xs.index(chosen) if chosen in xs else 0
    inside = [min(max(share, 0.12), 0.88) for share in shares]  # labels at the ends are turned inwards
    for number in space_out(inside, first, 0.2):
        css = "tick strong" if xs[number] == chosen else "tick"
        plot.append(x_label(count(xs[number]), shares[number], height, css))
    return frame(plot, axis=labels, label=label, height=height)


def _line_marks(line: Line, number: int, at: Callable[[Point], tuple[str, float]], chosen: float) -> list[Markup]:
    """Strokes, then dots. All lines but the first are dashed with smaller dots, so that equal ones show each other."""
    css = f"s{number % 8}" + (" more" if number else "")
    marks = []
    for one, two in pairwise(line.points):
        (x1, y1), (x2, y2) = at(one), at(two)
        marks.append(element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=css))
    for point in line.points:
        x, y = at(point)
        radius = (5.0 if point.x == chosen else 3.5) - (1.5 if number else 0)
        kind = f"dot {css} hollow" if point.hollow else f"dot {css}"
        marks.append(element("circle", element("title", point.tip), cx=x, cy=y, r=radius, class_=kind))
        if point.ring:
            marks.append(element("circle", cx=x, cy=y, r=_RING, class_=f"ring {css}"))
    return marks


def stacked_bar(
    spans: Sequence[BarSpan], *, label: str, whole: float, limit: float | None = None, height: int = 44
) -> Markup:
    """Parts side by side on a track of size `whole`, and a line at the limit where the parts may pass it."""
    plot = [element("rect", x="0", y="0", width="100%", height=height, rx="6", class_="track")]
    x = 0.0
    for span in spans:
        share = span.size / whole if whole else 0.0
        plot.append(_bar(x, share, 0, height, span.css, span.tip))
        x += share
    if limit is not None and whole and limit < whole:
        at = to_percent(limit / whole)
        plot.append(element("line", x1=at, x2=at, y1="-4", y2=height + 4, class_="limit"))
    return frame(plot, label=label, height=height, css="stack")


def share_bar(share: float, css: str = "c0") -> Markup:
    """A small bar for a table cell; the number is next to it."""
    width = to_percent(min(max(share, 0.0), 1.0))
    return element(
        "svg", element("rect", width=width, height="8", rx="2", class_=css), class_="bar", aria_hidden="true"
    )


def balance_chart(rows: Sequence[BalanceLine]) -> Markup:
    """Slowest rank over mean as bars that start at 1, the ideal."""
    orders = (("random", "c7"), ("sorted", "c0"), ("strict", "c2"))
    most = max((getattr(row, order).slowest for row in rows for order, _ in orders), default=1.0)
    scale, _ = nice_scale(0, max(most - 1, 1e-3))
    step, bar = 66, 16
    axis, plot = [], []
    for at, row in enumerate(rows):
        top = 4 + at * step
        axis.append(element("text", f"{row.ranks:,}", x=44, y=top + 22, class_="tick strong", text_anchor="end"))
        axis.append(
            element("text", "GPU" if row.ranks == 1 else "GPUs", x=44, y=top + 36, class_="tick", text_anchor="end")
        )
        for number, (order, css) in enumerate(orders):
            value, y = getattr(row, order).slowest, top + number * (bar + 2)
            # The number beside the bar needs a fifth of the width.
            width = max(0.8 * scale.at(value - 1), 0.004)
            tip = f"{counted(row.ranks, 'GPU')}, {order}: slowest rank / mean {ratio(value)}"
            plot.append(_bar(0, width, y, bar, css, tip))
            text = f"{ratio(value)}  {order}"
            plot.append(element("text", text, x=to_percent(width), dx=6, y=y + 12, class_="tick"))
    label = "Slowest rank over mean by order of packs: " + "; ".join(
        f"{counted(row.ranks, 'GPU')}: "
        + ", ".join(f"{order} {ratio(getattr(row, order).slowest)}" for order, _ in orders)
        for row in rows
    )
    return frame(plot, axis=axis, label=label, height=8 + step * len(rows))


def wide(lengths: Sequence[float]) -> bool:
    """Do lengths differ so much that equal steps on an axis should be equal factors?"""
    return bool(lengths) and min(lengths) > 0 and max(lengths) > 8 * min(lengths)


def bin_name(edges: Sequence[float], at: int) -> str:
    """The range of a bin, in words.

    >>> bin_name([-0.5, 0.5, 1.5], 1), bin_name([0.0, 200.0, 9001.0], 1)
    ('1', '200 to 9,000')
    """
    low, high = edges[at], edges[at + 1]
    if high - low <= 1:
        return count(-(-low // 1))
    return f"{count(low)} to {count(high - 1)}"


def bin_position(edges: Sequence[float], value: float) -> float:
    """Where a value lies when all bins are equally wide, between 0 and 1.

    >>> bin_position([0, 10, 1000], 505)
    0.75
    """
    for at, (low, high) in enumerate(pairwise(edges)):
        if value < high or at == len(edges) - 2:
            return min(1.0, (at + max(0.0, min(1.0, (value - low) / (high - low)))) / (len(edges) - 1))
    return 0.0


def edge_ticks(edges: Sequence[float]) -> list[tuple[float, str]]:
    """(position, label) of the edges worth a label: few, and the last one, which holds the maximum."""
    last = len(edges) - 1
    if last < 1:
        return []
    if edges[1] - edges[0] <= 1 and edges[0] % 1:  # whole numbers: the label is under the middle of its bar
        chosen = space_out([(at + 0.5) / last for at in range(last)], 0, 0.12)
        return [((at + 0.5) / last, count(edges[at] + 0.5)) for at in chosen]
    labels = [(at / last, tick(edges[at])) for at in range(0, last, max(1, round(last / 5)))]
    labels = [(x, text) for x, text in labels if x <= 0.72]
    return [*labels, (1.0, tick(edges[last] - 1))]


def _places(xs: Sequence[float]) -> dict[float, str]:
    """Percentages of values along the plot, with a margin for the marks at its ends."""
    along = [math.log(x) if wide(xs) else x for x in xs]
    scale = Scale(start=min(along, default=0.0), end=max(along, default=1.0))
    return {x: to_percent(0.04 + 0.92 * scale.at(value)) for x, value in zip(xs, along, strict=True)}


def _bar(x: float, width: float, y: float, height: float, css: str, tip: str) -> Markup:
    return element(
        "rect",
        element("title", tip),
        x=to_percent(x),
        y=float(y),
        width=to_percent(width),
        height=float(max(height, 0.0)),
        class_=css,
    )


def picture_keys(packs: Sequence[PicturePack], colours: Mapping[str, str]) -> tuple[LegendKey, ...]:
    """The legend: the sources that are in the picture, in the order of their colours."""
    names = {sample.source for pack in packs[:MOST_PACKS] for sample in pack.samples}
    own = [name for name in colours if name in names and colours[name] != f"c{COLOURS}"]
    keys = [LegendKey(css=colours[name], name=shown(name, 48) or "(no name)") for name in own]
    if len(names) > len(own):
        keys.append(LegendKey(css=f"c{COLOURS}", name=counted(len(names) - len(own), "other source")))
    return tuple(keys)


def source_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each source, the largest first; those after the first few share the last."""
    return {name: f"c{min(at, COLOURS)}" for at, name in enumerate(names)}


def packs_picture(packs: Sequence[PicturePack], packing_length: int, colours: Mapping[str, str]) -> Markup:
    """The bars; a full bar is a full pack."""
    packs = packs[:MOST_PACKS]
    each = max(4, MOST_SAMPLES // max(len(packs), 1))
    axis, plot = [], []
    for at, pack in enumerate(packs):
        y = at * _ROW
        axis.append(element("text", f"{pack.number:,}", x=44, y=y + 10, class_="tick", text_anchor="end"))
        tip = f"Pack {pack.number:,}: {count(pack.tokens)} of {count(packing_length)} tokens"
        tip += f" ({percent(pack.tokens / packing_length)}), {counted(len(pack.samples), 'sample')}"
        plot.append(element("rect", element("title", tip), x="0", y=y, width="100%", height=_BAR, class_="track"))
        plot += _spans(pack.samples, packing_length, y, each, colours)
    label = f"{counted(len(packs), 'pack')} of {count(packing_length)} tokens, drawn as bars that their samples fill"
    return frame(plot, axis=axis, label=label, height=max(len(packs) * _ROW, _ROW), css="packs")


def _spans(
    samples: Sequence[PictureSample], length: int, y: int, most: int, colours: Mapping[str, str]
) -> list[Markup]:
    """The largest samples one by one; the small ones of a crowded pack together."""
    ordered = sorted(samples, key=lambda sample: -sample.tokens)
    spans, x = [], 0
    for sample in ordered[:most]:
        spans.append(_span(sample, x / length, length, y, colours.get(sample.source, f"c{COLOURS}")))
        x += sample.tokens
    rest = ordered[most:]
    if rest:
        tokens = sum(sample.tokens for sample in rest)
        tip = f"{counted(len(rest), 'small sample')}: {count(tokens)} tokens together"
        place = {"x": to_percent(x / length), "width": to_percent(tokens / length)}
        spans.append(element("rect", element("title", tip), **place, y=y, height=_BAR, class_="crowd"))
    return spans


def _span(sample: PictureSample, x: float, length: int, y: int, css: str) -> Markup:
    tip = f"{isolate(sample.id, 60)}: {count(sample.tokens)} tokens"
    if sample.vision_tokens:
        tip += f", {count(sample.vision_tokens)} of them media"
    tip += f", {isolate(sample.source, 40)}"
    width, media = sample.tokens / length, min(sample.vision_tokens, sample.tokens) / length
    whole = element("rect", x=to_percent(x), y=y, width=to_percent(width), height=_BAR, class_=f"{css} text")
    if not media:
        return element("g", element("title", tip), whole)
    part = element("rect", x=to_percent(x), y=y, width=to_percent(media), height=_BAR, class_=css)
    return element("g", element("title", tip), whole, part)
