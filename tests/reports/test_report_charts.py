"""Charts: scales hold what they show, bars are as long as their numbers, labels do not touch."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page

from packtrain.core.numbers import FORMATS, percent
from packtrain.packing.schedule import BalanceLine, Evenness
from packtrain.planning.study_values import Histogram
from packtrain.reports.charts import (
    BarSpan,
    Line,
    Point,
    balance_chart,
    bin_position,
    edge_ticks,
    histogram_chart,
    line_chart,
    stacked_bar,
)
from packtrain.reports.svg import nice_scale, space_out

SIZES = st.floats(-1e12, 1e12, allow_nan=False)


@given(SIZES, SIZES)
def test_a_scale_holds_its_range(one: float, two: float) -> None:
    low, high = sorted((one, two))
    scale, ticks = nice_scale(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1e-9)
    assert scale.start <= low + slack
    assert scale.end >= high - slack
    assert 2 <= len(ticks) <= 8
    assert list(ticks) == sorted(set(ticks))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(0, 29))
def test_labels_keep_their_distance(positions: list[float], first: int) -> None:
    positions = sorted(positions)
    first %= len(positions)
    chosen = space_out(positions, first, 0.17)
    assert first in chosen
    for one, two in itertools.pairwise(chosen):
        assert positions[two] - positions[one] >= 0.17


@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=40, unique=True), st.floats(0, 1))
def test_values_keep_their_order_in_bins(edges: list[int], share: float) -> None:
    edges = sorted(edges)
    value = edges[0] + share * (edges[-1] - edges[0])
    assert 0 <= bin_position(edges, value) <= 1
    assert bin_position(edges, edges[0]) == 0
    assert bin_position(edges, edges[-1]) == 1
    assert bin_position(edges, value) <= bin_position(edges, value + 1)
    assert all(0 <= x <= 1 for x, _ in edge_ticks(edges))


def test_histogram_bars_are_as_high_as_their_counts() -> None:
    page = Page(
        str(histogram_chart(Histogram(edges=(0, 10, 20, 500), counts=(10, 40, 20)), name="tokens", marks={"m": 12}))
    )
    heights = [float(rect.attributes["height"]) for rect in page.all("rect")]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.05)
    assert heights[1] == pytest.approx(2 * heights[2], abs=0.05)
    assert [title.text for title in page.all("title")][2] == "20 to 499 tokens: 20 samples"


def test_stacked_parts_fill_their_share_and_the_limit_is_marked() -> None:
    parts = [BarSpan(size=size, css="c0", tip=str(size)) for size in (10, 30, 60)]
    page = Page(str(stacked_bar(parts, label="a", whole=200, limit=80)))
    bars = [rect for rect in page.all("rect") if rect.attributes["class"] == "c0"]
    assert [bar.attributes["width"] for bar in bars] == ["5%", "15%", "30%"]
    assert [bar.attributes["x"] for bar in bars] == ["0%", "5%", "20%"]
    assert page.all("line")[0].attributes["x1"] == "40%"
    assert not Page(str(stacked_bar(parts, label="a", whole=200, limit=200))).all("line")


def test_line_marks_the_chosen_length_and_what_does_not_fit() -> None:
    points = tuple(Point(x=x, y=x / 2, tip=f"<{x}>", hollow=x > 2) for x in (1, 2, 3))
    page = Page(str(line_chart([Line(name="a", points=points)], label="x", write=str, chosen=2, limit=(9, "<gpu>"))))
    assert [("hollow" in dot.attributes["class"]) for dot in page.all("circle")] == [False, False, True]
    assert page.all("circle")[1].attributes["r"] > page.all("circle")[0].attributes["r"]
    assert [title.text for title in page.all("title")] == ["<1>", "<2>", "<3>"]
    [band] = [line for line in page.all("line") if line.attributes["class"] == "chosen"]
    assert band.attributes["x1"] == page.all("circle")[1].attributes["cx"]


def test_values_beyond_the_top_are_drawn_at_the_edge() -> None:
    points = tuple(Point(x=x, y=y, tip="") for x, y in ((1, 5), (2, 10), (3, 900)))
    page = Page(str(line_chart([Line(name="a", points=points)], label="x", write=str, chosen=1, top=10)))
    heights = [float(dot.attributes["cy"]) for dot in page.all("circle")]
    assert heights[0] > heights[1] == heights[2]


def test_equal_lines_can_both_be_seen() -> None:
    points = tuple(Point(x=x, y=x, tip="") for x in (1, 2))
    page = Page(str(line_chart([Line(name=name, points=points) for name in "ab"], label="x", write=str, chosen=1)))
    one, two = (page.all("circle")[at].attributes for at in (0, 2))
    assert (one["cx"], one["cy"]) == (two["cx"], two["cy"])
    assert float(one["r"]) > float(two["r"])
    assert [("more" in line.attributes["class"]) for line in page.all("line") if "x2" in line.attributes][-2:] == [
        False,
        True,
    ]


def test_lengths_far_apart_are_spread_by_factors() -> None:
    points = tuple(Point(x=x, y=1, tip="") for x in (4_096, 32_768, 262_144))
    page = Page(str(line_chart([Line(name="a", points=points)], label="x", write=str, chosen=4_096)))
    first, middle, last = (float(dot.attributes["cx"].rstrip("%")) for dot in page.all("circle"))
    assert middle - first == pytest.approx(last - middle, abs=0.05)


def test_one_point_is_drawn() -> None:
    points = (Point(x=1024, y=0.7, tip="one"),)
    text = str(line_chart([Line(name="a", points=points)], label="x", write=str, chosen=1024, from_zero=False, top=1.0))
    assert len(Page(text).all("circle")) == 1
    assert "nan" not in text


def test_perfect_balance_is_drawn() -> None:
    even = Evenness(slowest=1.0, length_spread=0, samples_spread=0)
    row = BalanceLine(ranks=8, packs_per_step=8, steps=1, random=even, sorted=even, strict=even)
    page = Page(str(balance_chart([row])))
    assert len(page.all("rect")) == 3
    assert all(re.fullmatch(r"[\d.]+%", rect.attributes["width"]) for rect in page.all("rect"))


@given(st.floats(0, 1))
def test_a_share_reads_as_all_or_nothing_only_when_it_is(share: float) -> None:
    assert (percent(share) == "100 %") == (share == 1)
    assert (percent(share) == "0 %") == (share == 0)
    assert not percent(share).startswith(("100.0", "0.00"))


@given(st.sampled_from(sorted(FORMATS)), st.one_of(st.integers(0, 10**15), st.floats(0, 1e15)))
def test_every_format_writes_every_number(kind: str, value: float) -> None:
    assert re.search(r"\d", FORMATS[kind](value))
