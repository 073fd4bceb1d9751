"""The page in a real browser: quiet, self-contained, fits a phone, follows the colour scheme, and its buttons work."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser
from study_parts import Made

Written = tuple[Made, Path]
pytestmark = pytest.mark.full

SIZES = """[...document.querySelectorAll("svg:not(.swatch)")].map((svg) => {
  const box = svg.getBoundingClientRect();
  const inside = svg.querySelectorAll("*").length;
  return [svg.getAttribute("class"), svg.getAttribute("aria-label"), box.width, box.height, inside];
})"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
# The contrast of text against what is behind it, as WCAG counts it, for every kind of text on the page.
CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const part = (v) => (v <= 10 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  const texts = "p, li, td, th, dt, dd, h1, h2, h3, a, button, caption, figcaption, small, code, pre, span, svg text";
  for (const e of document.querySelectorAll(texts)) {
    if (!e.textContent.trim() || !e.getBoundingClientRect().width) continue;
    const style = getComputedStyle(e), drawn = e instanceof SVGElement;
    const one = light(rgb(drawn ? style.fill : style.color)), two = light(behind(drawn ? e.closest("div") : e));
    const key = `${e.tagName} ${e.className.baseVal ?? e.className}`;
    found[key] = Math.min(found[key] ?? 99, (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05));
  }
  return found;
})()"""
# The middle of the first sample in the picture of packs, once the page has come to rest there.
FIRST_SAMPLE = """(async () => {
  const sample = document.querySelector(".packs g");
  sample.scrollIntoView({ block: "center", behavior: "instant" });
  await new Promise((done) => setTimeout(done, 200));
  const box = sample.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
})()"""
NO_CLIPBOARD = """navigator.clipboard.writeText = async () => { throw new Error("no") };
document.execCommand = () => false; 0"""


def overflowing(browser: Browser) -> list[str]:
    """Elements that reach beyond the window and are not inside a box that scrolls."""
    return list(
        browser.run(
            """[...document.body.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > innerWidth + 1
            && !e.closest(".scroll, .box, nav, .skip, svg")).map((e) => `${e.tagName}.${e.className}`)"""
        )
    )


def test_page_is_quiet_and_asks_for_nothing(browser: Browser, written: Written) -> None:
    browser.open(written[1] / "report.html")
    assert browser.run("document.getElementById('theme').hidden") is False, "the script ran"
    assert browser.problems() == []
    assert browser.requests() == []


def test_policy_stops_what_does_not_belong_to_the_page(browser: Browser, lvis: Written, tmp_path: Path) -> None:
    """The checks above can fail: a page that was tampered with is noticed, and its addition does not run."""
    bad = "<script>document.title = 'pwned'</script><img src='https://example.org/x.png'>"
    text = (lvis[1] / "report.html").read_text(encoding="utf-8").replace("<footer>", f"{bad}<footer>")
    (tmp_path / "bad.html").write_text(text, encoding="utf-8")
    browser.open(tmp_path / "bad.html")
    assert browser.problems()
    assert "pwned" not in browser.run("document.title")


def test_hostile_names_are_text(browser: Browser, hostile: Written) -> None:
    browser.open(hostile[1] / "report.html")
    assert "pwned" not in browser.run("document.title")
    assert browser.run("document.querySelectorAll('img, b, iframe, object').length") == 0
    assert "</script><script>document.title" in browser.run("document.body.innerText")
    assert "{{ 7 * 7 }}" in browser.run("document.body.innerText")
    assert browser.run("JSON.parse(document.getElementById('study').textContent).headline.packs") > 0


@pytest.mark.parametrize("width", [320, 360, 390, 768, 1280, 1920])
def test_page_never_scrolls_sideways(browser: Browser, written: Written, width: int) -> None:
    browser.open(written[1] / "report.html", width=width, height=800)
    assert browser.run("innerWidth") == width
    assert browser.run("document.documentElement.scrollWidth") <= width
    assert overflowing(browser) == []


def test_paper_is_wide_enough(browser: Browser, written: Written) -> None:
    browser.open(written[1] / "report.html", width=720)
    browser.scheme("light", media="print")
    assert browser.run("document.documentElement.scrollWidth") <= 720
    assert browser.run(
        "[...document.querySelectorAll('.scroll')].every((box) => box.scrollWidth <= box.clientWidth + 1)"
    )
    browser.scheme("light")


@pytest.mark.parametrize("width", [360, 1280])
def test_every_chart_can_be_seen(browser: Browser, written: Written, width: int) -> None:
    browser.open(written[1] / "report.html", width=width, height=800)
    charts = browser.run(SIZES)
    assert len(charts) >= 6
    for name, label, wide, high, inside in charts:
        assert wide >= 30, (name, label)
        assert high >= 8, (name, label)
        assert inside > 0, (name, label)


def test_colours_follow_the_system_and_the_button(browser: Browser, lvis: Written) -> None:
    page = lvis[1] / "report.html"
    browser.open(page, scheme="light")
    browser.run("try { localStorage.clear() } catch {}")
    browser.open(page, scheme="light")
    light = browser.run(BACKGROUND)
    browser.scheme("dark")
    dark = browser.run(BACKGROUND)
    assert light != dark
    browser.run("document.getElementById('theme').focus()")
    browser.press("Enter", 13)
    assert browser.run(BACKGROUND) == light, "the button wins over the system"
    browser.press("Enter", 13)
    assert browser.run(BACKGROUND) == dark
    browser.scheme("dark", media="print")
    assert browser.run(BACKGROUND) == "rgb(255, 255, 255)", "paper is white"
    browser.scheme("light")
    browser.run("try { localStorage.clear() } catch {}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(browser: Browser, lvis: Written, scheme: str) -> None:
    browser.open(lvis[1] / "report.html", scheme=scheme)
    found = browser.run(CONTRAST)
    assert len(found) > 15
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}


def test_copy_button_copies_the_config(browser: Browser, lvis: Written) -> None:
    browser.open(lvis[1] / "report.html")
    browser.run("window.copied = null; navigator.clipboard.writeText = async (text) => { window.copied = text }")
    browser.run("document.getElementById('copy').focus()")
    browser.press("Enter", 13)
    expected = (lvis[1] / "recommended.yaml").read_text(encoding="utf-8")
    assert browser.run("window.copied") == expected
    assert browser.run("document.getElementById('copied').textContent") == "Copied"


def test_without_a_clipboard_the_config_is_selected(browser: Browser, lvis: Written) -> None:
    browser.open(lvis[1] / "report.html")
    browser.run(NO_CLIPBOARD)
    browser.run("document.getElementById('copy').click()")
    browser.run("new Promise((done) => setTimeout(done, 50))")
    expected = (lvis[1] / "recommended.yaml").read_text(encoding="utf-8")
    assert browser.run("getSelection().toString().trim()") == expected.strip()
    assert "Ctrl+C" in browser.run("document.getElementById('copied').textContent")


def test_tooltip_names_the_sample_under_the_pointer(browser: Browser, lvis: Written) -> None:
    made, out = lvis
    browser.open(out / "report.html")
    x, y = browser.run(FIRST_SAMPLE)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = browser.run("document.querySelector('.tip').hidden ? '' : document.querySelector('.tip').textContent")
    first = max(made.study.picture[0].samples, key=lambda sample: sample.tokens)
    assert first.id in tip
    assert f"{first.tokens:,} tokens" in tip


def test_page_works_without_scripts(browser: Browser, lvis: Written) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.open(lvis[1] / "report.html")
        charts = browser.run(SIZES)
        assert all(wide >= 30 for _, _, wide, _, _ in charts)
        assert browser.run("document.querySelectorAll('svg title').length") > 100, "the browser's own tooltips"
        assert browser.run("[...document.querySelectorAll('button')].every((one) => one.hidden)") is True
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
