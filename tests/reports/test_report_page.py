"""The page: one file, no requests, nothing from data becomes markup, and readable by machines that read to people."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import studies
from pages import Page, read_page
from rich.console import Console
from study_parts import Made

from packtrain.cli.plan import _sweep_table
from packtrain.planning.study_values import Group, PicturePack, PictureSample
from packtrain.reports.figures import subtitle
from packtrain.reports.html import embed_json
from packtrain.reports.markdown import comparison_text, memory_text
from packtrain.reports.recommended import config_text
from packtrain.reports.study_content import study_content
from packtrain.reports.study_page import render_page

Written = tuple[Made, Path]
KNOWN = {
    *(
        "html",
        "head",
        "meta",
        "title",
        "link",
        "style",
        "body",
        "a",
        "header",
        "div",
        "span",
        "nav",
        "ul",
        "ol",
        "li",
        "button",
    ),
    *(
        "main",
        "p",
        "bdi",
        "data",
        "h1",
        "h2",
        "h3",
        "dl",
        "dt",
        "dd",
        "small",
        "section",
        "code",
        "figure",
        "figcaption",
    ),
    *(
        "svg",
        "text",
        "line",
        "rect",
        "circle",
        "g",
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "strong",
        "i",
    ),
    *("pre", "footer", "script"),
}


def policy(page: Page) -> str:
    [meta] = [one for one in page.all("meta") if one.attributes.get("http-equiv") == "Content-Security-Policy"]
    return meta.attributes["content"]


def test_page_is_one_file_without_requests(written: Written) -> None:
    page = read_page(written[1] / "report.html")
    assert policy(page).startswith("default-src 'none';")
    assert "unsafe" not in policy(page)
    for element in page.elements:
        for name, value in element.attributes.items():
            assert name not in ("src", "srcset", "style", "action", "data", "background"), (element.tag, name)
            assert not name.startswith("on"), (element.tag, name)
            if name in ("href", "xlink:href"):
                assert value.startswith("#") or value == "data:,", value
    assert "@import" not in page.source
    assert "url(" not in page.all("style")[0].text


def test_policy_allows_exactly_the_inline_script_and_style(written: Written) -> None:
    page = read_page(written[1] / "report.html")
    inline = [*page.all("style"), *(one for one in page.all("script") if "type" not in one.attributes)]
    assert len(inline) == 2
    for element in inline:
        digest = base64.b64encode(hashlib.sha256(element.text.encode()).digest()).decode()
        assert f"{element.tag}-src 'sha256-{digest}';" in policy(page)


def test_names_from_data_never_become_markup(hostile: Written) -> None:
    page = read_page(hostile[1] / "report.html")
    assert {element.tag for element in page.elements} <= KNOWN
    assert len(page.all("script")) == 2
    assert "\u202e" not in page.source
    assert "\x00" not in page.source
    assert studies.HOSTILE[0] in page.all("body")[0].text, "the name itself is there, as text"
    assert studies.HOSTILE[3] in page.all("body")[0].text
    assert max(len(word) for word in re.findall("x+", _without_config(page))) < 400, "long names are shortened"


def _without_config(page: Page) -> str:
    [config] = [one for one in page.all("pre") if one.attributes.get("id") == "config-text"]
    return "".join(one.text for one in page.elements if one.tag in ("td", "th", "p", "li", "h1", "title")) + config.tag


def test_embedded_json_cannot_end_its_script() -> None:
    text = embed_json({"a": "</script><!--&\u2028\u2029 \udc80"})
    assert not set(text) & set("<>&\u2028\u2029\udc80")


def test_page_can_be_read_aloud_and_jumped_through(written: Written) -> None:
    page = read_page(written[1] / "report.html")
    levels = [int(element.tag[1]) for element in page.elements if element.tag in ("h1", "h2", "h3")]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    anchors = [a.attributes["href"][1:] for a in page.all("a")]
    assert len(anchors) >= 8
    assert set(anchors) <= set(ids)
    assert all(one.attributes["aria-labelledby"] in ids for one in page.all("section"))
    assert len(page.all("caption")) == len(page.all("table")) >= 4
    assert all("scope" in th.attributes for th in page.all("th"))
    for svg in page.all("svg"):
        assert svg.attributes.get("aria-hidden") == "true" or svg.attributes.get("aria-label"), svg
    assert page.all("html")[0].attributes["lang"] == "en"
    assert all(one.attributes.get("type") == "button" for one in page.all("button"))


def test_verdict_and_sections_follow_the_study(lvis: Written) -> None:
    made, out = lvis
    page = read_page(out / "report.html")
    assert page.all("h1")[0].text == "Pack at 20,000 tokens"
    assert made.study.recommendation.verdict in page.all("body")[0].text
    single = studies.single()
    text = render_page(single.study, study_content(single.study), config_text(single.study.recommendation))
    assert Page(text).all("h1")[0].text == "Packing will not help here"
    assert 'id="packs"' not in text
    assert 'href="#packs"' not in text


def test_a_number_that_all_samples_have_alike_is_not_drawn() -> None:
    study = studies.lvis(3000).study
    histograms = study.dataset.histograms
    assert sum(number > 0 for number in histograms["images"].counts) > 1
    alike = {name: replace(one, counts=(0, 3000, *[0] * (len(one.counts) - 2))) for name, one in histograms.items()}
    constant = replace(study, dataset=replace(study.dataset, histograms={**histograms, "images": alike["images"]}))
    for one, drawn in ((study, True), (constant, False)):
        text = render_page(one, study_content(one), "")
        assert ("Images per sample" in text, "Tokens per sample" in text) == (drawn, True)
    every = replace(study, dataset=replace(study.dataset, histograms=alike))
    assert "Tokens per sample" in render_page(every, study_content(every), ""), "lengths always"


def test_where_packing_is_not_recommended_no_length_is_called_so(lvis: Written) -> None:
    screen = Console(width=160, record=True, file=StringIO())
    study = replace(lvis[0].study, setup=replace(lvis[0].study.setup, compiled=True))
    padded = replace(study, recommendation=replace(study.recommendation, packing=False))
    texts = []
    for one in (study, padded):
        content = study_content(one)
        page = Page(render_page(one, content, ""))
        screen.print(_sweep_table(one))
        charts = " ".join(svg.attributes.get("aria-label", "") for svg in page.all("svg"))
        parts = (page.all("section")[1].text, charts, comparison_text(content), memory_text(content))
        texts.append(" ".join((*parts, screen.export_text(), subtitle(one))).lower())
    assert texts[0].count("recommended") >= 7, "the words are looked for where they stand"
    assert "best packing" not in texts[0]
    assert "recommended" not in texts[1]
    assert texts[1].count("best packing") == texts[0].count("recommended")


def test_a_gpu_that_is_too_small_is_said() -> None:
    study = studies.lvis(3000).study
    small = replace(study, memory=replace(study.memory, gpu_bytes=40 << 30))
    assert "This does not fit" not in render_page(study, study_content(study), "")
    text = render_page(small, study_content(small), "")
    missing = study.memory.estimate.total - (40 << 30)
    assert "This does not fit" in text
    assert f">{missing / 2**30:,.1f} GiB</data> too much" in text


def test_page_stays_small_whatever_the_data() -> None:
    study = studies.lvis(3000).study
    group = study.dataset.by_source[0]
    sources = tuple(Group(name=f"source {at} " + "y" * 5000, samples=1, tokens=at + 1, share_of_tokens=1e-4,
                          statistics=group.statistics) for at in range(5000))  # fmt: skip
    samples = tuple(PictureSample(id="z" * 3000, source="s", tokens=4, vision_tokens=2) for _ in range(5000))
    crowded = replace(
        study,
        dataset=replace(study.dataset, by_source=sources),
        picture=tuple(PicturePack(number=at, tokens=20_000, samples=samples) for at in range(100)),
        ledger={f"reason {at} " + "w" * 2000: 1 for at in range(3000)},
        memory=replace(study.memory, worst_samples=("v" * 5000,) * 4000),
    )
    text = render_page(crowded, study_content(crowded), "")
    assert len(text.encode()) < 1_000_000
    inside = Page(text).data
    assert inside["dataset"]["more_sources"]["groups"] == 5000 - len(inside["dataset"]["by_source"])
    assert sum(inside["ledger"].values()) == 3000


def test_pack_bars_have_the_length_of_their_samples() -> None:
    made = studies.lvis(3000)
    page = Page(render_page(made.study, study_content(made.study), ""))
    groups = [title.text for title in page.all("title") if "g" in title.parents[-1:]]
    drawn = sum(len(pack.samples) for pack in made.study.picture)
    assert 0 < len(groups) <= drawn
    assert all(" tokens" in text for text in groups)
    widths = {
        rect.attributes["y"]: 0.0
        for rect in page.all("rect")
        if rect.attributes.get("class") == "track" and "g" not in rect.parents
    }
    for rect in page.all("rect"):
        if rect.parents[-1] == "g" and rect.attributes["class"].endswith("text"):
            widths[rect.attributes["y"]] += float(rect.attributes["width"].rstrip("%"))
    first = made.study.picture[0]
    assert abs(widths["0"] - 100 * first.tokens / 20_000) < 0.02 * len(first.samples)
