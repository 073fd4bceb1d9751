"""The page of a run in a real browser: quiet, fits a phone, readable in both colour schemes, curves can be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from browser import Browser
from made_runs import WARNINGS, Made, write_run
from test_report_browser import CONTRAST, SIZES, overflowing

from packtrain.reports.run_page import write_run_report

pytestmark = pytest.mark.full
# The middle of the fiftieth column of the first chart, once the page has come to rest there.
COLUMN = """(async () => {
  const column = document.querySelectorAll(".hit")[50];
  column.scrollIntoView({ block: "center", behavior: "instant" });
  await new Promise((done) => setTimeout(done, 200));
  const box = column.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})()"""


@pytest.fixture(scope="module", params=["one", "both", "long names", "just started"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pages")
    if request.param == "just started":
        return write_run_report(write_run(root / "run", Made(steps=0)))
    model = "x" * 300 if request.param == "long names" else "tiny:qwen2_5_vl"
    first = write_run(root / ("a" * (100 if model[0] == "x" else 1)), Made(model=model, warnings=WARNINGS))
    if request.param == "one":
        return write_run_report(first)
    other = write_run(root / ("b" * (100 if model[0] == "x" else 1)), Made(mode="padded", seconds=0.9, seed=2))
    return write_run_report(first, others=[other])


def test_page_is_quiet_and_asks_for_nothing(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert browser.run("document.getElementById('theme').hidden") is False, "the script ran"
    assert browser.problems() == []
    assert browser.requests() == []


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_page_never_scrolls_sideways(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width, height=800)
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert overflowing(browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(browser: Browser, page: Path, scheme: str) -> None:
    browser.open(page, scheme=scheme)
    found = browser.run(CONTRAST)
    assert len(found) > 8
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("width", [360, 1280])
def test_every_chart_can_be_seen(browser: Browser, page: Path, width: int) -> None:
    browser.open(page, width=width)
    # Curves are as high as what they show, and flat ones have no height at all.
    charts = [chart for chart in browser.run(SIZES) if chart[0] != "curves"]
    for name, label, wide, high, inside in charts:
        assert wide >= 30, (name, label)
        assert high >= 8, (name, label)
        assert inside > 0, (name, label)


@pytest.mark.parametrize("width", [320, 1000, 1400])
def test_numbers_stay_inside_their_cards(browser: Browser, tmp_path: Path, width: int) -> None:
    made = Made(steps=23, seconds=100.0)
    page = write_run_report(write_run(tmp_path / "run", made))
    assert re.search(r">\d\d min \d+ s<", page.read_text()), "as long as any that is shown there"
    browser.open(page, width=width)
    beyond = browser.run(
        "[...document.querySelectorAll('.tile .big')].filter((one) => one.scrollWidth > one.clientWidth)"
        ".map((one) => one.textContent)"
    )
    assert beyond == []


def test_pointing_at_a_curve_reads_it(browser: Browser, tmp_path: Path) -> None:
    browser.open(write_run_report(write_run(tmp_path / "run", Made())))
    x, y = browser.run(COLUMN)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = browser.run("document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').textContent")
    assert " samples · " in tip
    assert "smoothed" in tip
