"""The pieces of inline SVG: escaped elements, scales, ticks. Widths are percentages, so that text keeps its size.

Style sheets colour the markup. A chart is an axis of fixed width beside a plot that fills what is left. Horizontal
positions in the plot are percentages and vertical ones pixels: it is sharp and readable on a phone and on a wide
screen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

AXIS = 52  # pixels for the labels left of a plot
TOP, BOTTOM = 14, 24  # pixels above and below what is drawn

# Colours by their names in the style sheet. c0 to c7 are Okabe and Ito's, which stay apart for every kind of colour
# vision, a little darker on white and a little lighter on black; m0 to m9 are the parts of a GPU's memory.
LIGHT = {
    **{"page": "#faf9f7", "surface": "#ffffff", "sunken": "#f1f0ed", "ink": "#1b1f24", "muted": "#59616c"},
    **{"line": "#e2e0db", "accent": "#0a5ea8", "accent-soft": "#e6f0f9", "good": "#00674f", "bad": "#b03a12"},
    **{"bad-soft": "#fbeae3", "track": "#e9e7e2"},
    **{"c0": "#1f6fb5", "c1": "#e08a00", "c2": "#00896b", "c3": "#b4538f", "c4": "#4aa8dc", "c5": "#c8501a"},
    **{"c6": "#857612", "c7": "#8b949f"},
    **{"m0": "#174a82", "m1": "#2f74bb", "m2": "#86b3e0", "m3": "#d97a06", "m4": "#f3b755", "m5": "#8d5b0a"},
    **{"m6": "#b4538f", "m7": "#00896b", "m8": "#69747f", "m9": "#a8b0b9"},
}
DARK = {
    **{"page": "#111418", "surface": "#181c22", "sunken": "#0d1013", "ink": "#e9ebee", "muted": "#a5aeb9"},
    **{"line": "#2b3139", "accent": "#7cbcff", "accent-soft": "#16273a", "good": "#52cfa9", "bad": "#ff9a72"},
    **{"bad-soft": "#38211a", "track": "#282e36"},
    **{"c0": "#57a5e4", "c1": "#f0a83c", "c2": "#35b692", "c3": "#d887b6", "c4": "#90cdf2", "c5": "#ee8355"},
    **{"c6": "#c6b646", "c7": "#8b949f"},
    **{"m0": "#3f86cf", "m1": "#6aaaea", "m2": "#b5d5f5", "m3": "#ee9430", "m4": "#f8cd83", "m5": "#b98432"},
    **{"m6": "#d887b6", "m7": "#35b692", "m8": "#8b949f", "m9": "#5f6a76"},
}


def element(name: str, *children: str, **attributes: object) -> Markup:
    """An element with everything escaped; `class_` and `aria_label` become `class` and `aria-label`.

    >>> element("text", "a<b", x=1.50, class_="tick")
    Markup('<text x="1.5" class="tick">a&lt;b</text>')
    """
    words = "".join(f' {_attribute(key)}="{escape(_number(value))}"' for key, value in attributes.items())
    inside = Markup("").join(children)
    return Markup(f"<{name}{words}>") + inside + Markup(f"</{name}>")


def to_percent(value: float) -> str:
    """A horizontal position between 0 and 1.

    >>> to_percent(1 / 3)
    '33.33%'
    """
    return f"{100 * value:.2f}".rstrip("0").rstrip(".") + "%"


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A range of values; positions in it are shares of the way from its start."""

    start: float
    end: float

    def at(self, value: float) -> float:
        """Where a value is: 0 at the start, 1 at the end."""
        if self.end == self.start:
            return 0.5
        return (value - self.start) / (self.end - self.start)


def nice_scale(low: float, high: float, *, steps: int = 4, least: float = 0.0) -> tuple[Scale, tuple[float, ...]]:
    """A scale of round numbers around a range, and its ticks, which are at least `least` apart.

    >>> nice_scale(0, 92)[1]
    (0.0, 25.0, 50.0, 75.0, 100.0)
    """
    span = max(high - low, 1e-6 * max(abs(low), abs(high))) or 1.0
    size = 10.0 ** math.floor(math.log10(span / steps))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor * steps >= span * 0.999)
    step = max(step, least)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    ticks = tuple(float(f"{number * step:.12g}") for number in range(first, last + 1))
    return Scale(start=ticks[0], end=ticks[-1]), ticks


def space_out(positions: Sequence[float], first: int, gap: float) -> list[int]:
    """Which labels to write so that none touches another: one that must be there, then others from the ends inwards.

    >>> space_out([0.0, 0.05, 0.5, 1.0], first=2, gap=0.2)
    [0, 2, 3]
    """
    chosen = [first] if positions else []
    order = sorted(range(len(positions)), key=lambda at: min(at, len(positions) - 1 - at))
    for at in order:
        if all(abs(positions[at] - positions[other]) >= gap for other in chosen):
            chosen.append(at)
    return sorted(chosen)


def frame(plot: Sequence[Markup], *, label: str, height: int, axis: Sequence[Markup] = (), css: str = "") -> Markup:
    """A plot with its axis, which screen readers skip: the plot's label and the tables say the same."""
    left = element("svg", *axis, class_="axis", width=AXIS, height=height, aria_hidden="true") if axis else Markup("")
    right = element("svg", *plot, class_="plot", height=height, width="100%", role="img", aria_label=label)
    return element("div", left, right, class_=f"chart {css}".strip())


def y_axis(
    scale: Scale, ticks: Sequence[float], height: int, write: Callable[[float], str]
) -> tuple[list[Markup], list[Markup]]:
    """(labels for the axis, grid lines for the plot)."""
    labels, lines = [], []
    for tick in ticks:
        y = y_at(scale, tick, height)
        labels.append(element("text", write(tick), x=AXIS - 8, y=y + 4, class_="tick", text_anchor="end"))
        lines.append(element("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
    return labels, lines


def y_at(scale: Scale, value: float, height: int) -> float:
    """The pixel of a value; larger values are higher, and those beyond the scale at its edge."""
    return TOP + (1 - min(scale.at(value), 1.0)) * (height - TOP - BOTTOM)


def x_label(text: str, at: float, height: int, css: str = "tick") -> Markup:
    """A label under the plot, turned inwards at the ends so that it stays inside."""
    anchor = "start" if at < 0.06 else "end" if at > 0.94 else "middle"
    return element("text", text, x=to_percent(at), y=height - 6, class_=css, text_anchor=anchor)


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _number(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
