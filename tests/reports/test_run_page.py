"""The page of a run: one file, nothing from data becomes markup, every number is the run's, whatever it is like."""

from __future__ import annotations

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_runs import WARNINGS, Made, write_run
from pages import Page, at, read_page

from packtrain.core.artifacts import alone
from packtrain.core.errors import ConfigError
from packtrain.core.numbers import FORMATS, format_number
from packtrain.reports.run_charts import draw_runs
from packtrain.reports.run_content import runs_content
from packtrain.reports.run_page import render_runs, write_run_report
from packtrain.runs.early_warnings import EarlyWarning
from packtrain.runs.run_folder import RunFacts
from packtrain.runs.step_metrics import STEP_KEYS, EvalMetrics
from packtrain.runs.training_run import Steps, TrainingRun, read_run

EVIL = "</script><script>document.title='pwned'</script><img src=x onerror=alert(1)>{{ 7 * 7 }}\u202e\x00"


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A packed and a padded run."""
    root = tmp_path_factory.mktemp("runs")
    packed = write_run(root / "a", Made(warnings=WARNINGS))
    padded = write_run(root / "b", Made(mode="padded", seconds=0.93, padding=0.55, seed=1))
    return packed, padded


@pytest.fixture(scope="session")
def pages(pair: tuple[Path, Path]) -> dict[str, Path]:
    """The page of one run, and of both."""
    one = write_run_report(pair[0])
    return {"one": one, "both": write_run_report(pair[0], others=[pair[1]], out=pair[0] / "both.html")}


def data_of(page: Page) -> dict[str, Any]:
    [script] = [one for one in page.all("script") if one.attributes.get("id") == "run"]
    return dict(json.loads(script.text))


def made_of(columns: dict[str, np.ndarray], **more: Any) -> TrainingRun:
    """A run straight from columns."""
    length = len(columns["step"])
    whole = {name: columns.get(name, np.full(length, np.nan)) for name in STEP_KEYS}
    steps = Steps(columns=whole, rates=more.pop("rates", {}))
    return TrainingRun(
        **{"folder": Path("run"), "name": "run", "facts": RunFacts(model="m", mode="packed"), **more}, steps=steps
    )


@pytest.mark.parametrize("name", ["one", "both"])
def test_page_is_one_file_that_can_be_read_aloud(pages: dict[str, Path], name: str) -> None:
    page = read_page(pages[name])
    for element in page.elements:
        for attribute, value in element.attributes.items():
            assert attribute not in ("src", "srcset", "style", "action", "background"), element.tag
            assert not attribute.startswith("on")
            if attribute == "href":
                assert value.startswith("#") or value == "data:,"
    levels = [int(element.tag[1]) for element in page.elements if element.tag in ("h1", "h2", "h3")]
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    ids = [element.attributes["id"] for element in page.elements if "id" in element.attributes]
    assert len(ids) == len(set(ids))
    assert {a.attributes["href"][1:] for a in page.all("a")} <= set(ids)
    assert len(page.all("caption")) == len(page.all("table")) >= 2
    assert all("scope" in th.attributes for th in page.all("th"))
    for svg in page.all("svg"):
        assert svg.attributes.get("aria-hidden") == "true" or svg.attributes.get("aria-label"), svg
    assert len([svg for svg in page.all("svg") if svg.attributes.get("class") == "curves"]) >= 10


@pytest.mark.parametrize("name", ["one", "both"])
def test_every_visible_number_is_one_of_the_run(pages: dict[str, Path], pair: tuple[Path, Path], name: str) -> None:
    page = read_page(pages[name])
    runs = [read_run(folder) for folder in (pair if name == "both" else pair[:1])]
    content = json.loads(json.dumps(runs_content(runs)))
    assert data_of(page) == content
    numbers = page.all("data")
    assert len(numbers) > (20 if name == "one" else 50)
    for number in numbers:
        value = at(content, number.attributes["data-at"])
        assert number.attributes["data-as"] in FORMATS
        assert format_number(number.attributes["data-as"], value) == number.text, number.attributes["data-at"]


def test_comparison_says_what_differs_and_by_how_much(pages: dict[str, Path]) -> None:
    page = read_page(pages["both"])
    assert page.all("h1")[0].text.startswith("The same loss, 2.3")
    text = page.all("main")[0].text
    assert "data.packing: false" in text
    assert "What Padded has set differently from Packed" in text
    assert "Loss over time" in text
    assert "Loss over time" not in read_page(pages["one"]).all("main")[0].text


def test_the_page_begins_with_what_readers_look_for(pages: dict[str, Path]) -> None:
    for name in ("one", "both"):
        text = read_page(pages[name]).all("main")[0].text
        words = (
            *("lora: rank 8, alpha 16.0, q_proj, v_proj", "language 20.0 k of 1.0 M (2.0 %), vision frozen"),
            *("1,000 samples, 12 videos, 96 frames, each seen 3 times", "0.0002; cosine schedule, 4 steps of warm-up"),
            *(
                "adamw_torch_fused, weight decay 0.1, gradients clipped at 1, in bf16 autocast",
                "2026-01-02 03:04:05 UTC",
            ),
            *(
                "packtrain train run.yaml",
                "0123abcd-dirty",
                "torch 2.15.0",
                "4 packs of up to 4,096 tokens, about 16 samples",
            ),
        )
        for line in words:
            assert line in text, (name, line)
        assert text.index("rank 8") < text.index("Gradient norm"), "before most charts"


def test_charts_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    def titles(*made: Made) -> list[str]:
        folders = [write_run(tmp_path / f"{len(made)}-{at}-{one.padding}", one) for at, one in enumerate(made)]
        page = read_page(write_run_report(folders[0], others=folders[1:]))
        return [caption.text for caption in page.all("figcaption")]

    none, padded = Made(padding=0.0, steps=12, world_size=1), Made(padding=0.5, steps=12, mode="padded", world_size=1)
    assert not any(title.startswith(("Padding", "Equal work")) for title in titles(none))
    assert any(title.startswith("Padding") for title in titles(none, padded)), "beside a run that has some"
    assert not any(title.startswith("Fill") for title in titles(padded)), "it is what is no padding"


def test_what_is_shown_alike_is_not_marked_as_different() -> None:
    steps = {name: np.arange(1.0, 3) for name in ("step", "samples_seen", "loss", "supervised_tokens")}
    outcomes = ((4.9801, 4.9801), (4.9802, 15.0))
    runs = [made_of(steps, recorded={"outcome.eval_loss": one, "outcome.seconds": two}) for one, two in outcomes]
    [outcome] = [group for group in runs_content(runs)["settings"] if group["title"] == "Outcome"]
    assert {row["name"]: row["differ"] for row in outcome["rows"]} == {"eval_loss": False, "seconds": True}


def test_runs_can_be_told_in_markdown(pair: tuple[Path, Path], tmp_path: Path) -> None:
    text = write_run_report(pair[0], others=[pair[1]], out=tmp_path / "both.md").read_text()
    assert text.startswith("**The same loss, 2.3")
    assert "| Speedup over the baseline | 2.3" in text
    assert "| --- | --- | --- |" in text
    assert "\u2068" not in text
    assert text.strip() in Page(render_runs([read_run(folder) for folder in pair])).all("main")[0].text


def test_a_new_metric_is_drawn_without_a_word_about_it() -> None:
    seen = {"step": np.array([1.0, 2]), "samples_seen": np.array([4.0, 8]), "loss": np.array([2.0, 1])}
    run = made_of({**seen, "supervised_tokens": np.ones(2)})
    assert not draw_runs([run], ["a"]).other, "every metric there is has its place"
    steps = replace(run.steps, columns={**run.steps.columns, "mean_token_accuracy": np.array([0.25, 0.5])})
    page = Page(render_runs([replace(run, steps=steps)]))
    assert "Mean token accuracy" in page.all("main")[0].text
    assert any("0.250" in title.text for title in page.all("title"))


def test_lines_of_runs_differ_by_more_than_colour(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, Made(steps=12, seed=at)) for at, name in enumerate("abcd")]
    page = read_page(write_run_report(folders[0], others=folders[1:]))
    swatches = [one.attributes["class"] for one in page.all("line") if "svg" in one.parents and "y2" in one.attributes]
    lines = {css for css in swatches if css.startswith("s")}
    assert {css.partition(" ")[2] for css in lines} == {"", "dash1", "dash2", "dash3"}
    assert lines <= {one.attributes["class"] for one in page.all("polyline")}, "the legend shows what is drawn"


def test_runs_with_the_same_changes_are_named_each(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / name, Made(steps=12, mode="padded" if at else "packed")) for at, name in enumerate("abc")
    ]
    titles = [one.text for one in read_page(write_run_report(folders[0], others=folders[1:])).all("h3")]
    assert [title for title in titles if title.startswith("What ")] == [
        "What b has set differently from a",
        "What c has set differently from a",
    ]


def test_curves_have_the_numbers_of_the_log(tmp_path: Path) -> None:
    """With fewer steps than buckets every step can be read from the page."""
    folder = write_run(tmp_path / "run", Made(steps=60))
    page, run = read_page(write_run_report(folder)), read_run(folder)
    tips = [title.text for title in page.all("title") if "svg" in title.parents]
    for value in run.steps["loss"]:
        assert any(format_number("loss", value) in tip for tip in tips)
    assert any("evaluation after step 30" in tip for tip in tips)
    [line] = [one.attributes["points"] for one in page.all("polyline") if one.attributes["class"] == "s0 faint"]
    points = np.array([point.split(",") for point in line.split()], float)
    assert len(points) == len(run.steps)
    np.testing.assert_array_equal(np.argsort(points[:, 0]), np.arange(60))
    slope = np.polyfit(run.steps["loss"], points[:, 1], 1)
    assert slope[0] < 0, "higher is more"
    np.testing.assert_allclose(points[:, 1], np.polyval(slope, run.steps["loss"]), atol=0.11)


def test_equal_learning_rates_are_one_curve() -> None:
    """Of several that lie upon each other only the last would be seen."""
    seen = {"step": np.array([1.0, 2]), "samples_seen": np.array([4.0, 8]), "loss": np.array([2.0, 1])}
    seen["supervised_tokens"] = np.ones(2)
    falling = np.array([2e-4, 1e-4])
    rates = {"language": falling, "vision": falling / 10, "projector": falling.copy()}
    [chart] = [one for one in draw_runs([made_of(seen, rates=rates)], ["a"]).learning if one.title == "Learning rate"]
    assert [key.name for key in chart.keys] == ["language, projector", "vision"]


def test_the_page_of_the_plan_is_linked_to() -> None:
    """As what it is: a file. Anything else that a run says there is no link."""
    seen = {"step": np.array([1.0, 2]), "samples_seen": np.array([4.0, 8]), "loss": np.array([2.0, 1])}
    seen["supervised_tokens"] = np.ones(2)
    for said, links in (("/r e/report.html", ["file:///r%20e/report.html"]), ("javascript:alert(1)", []), (None, [])):
        page = Page(render_runs([made_of(seen, facts=RunFacts.from_json({"planned_in": said}))]))
        found = [link.attributes["href"] for link in page.all("a") if not link.attributes["href"].startswith("#")]
        assert found == links


def test_names_and_texts_from_data_never_become_markup(tmp_path: Path) -> None:
    steps = {"step": np.array([1.0, 2]), "samples_seen": np.array([4.0, 8]), "loss": np.array([2.0, 1])}
    words = ("model", "mode", "plan", "began", "ended", "host", "command", "commit")
    derived: dict[str, object] = dict.fromkeys(("method", "attn_implementation", "dtype"), EVIL)
    derived |= {"trainable": {EVIL: 1}, "lora": {"targets": [EVIL]}, "expected": {"gpu": EVIL}}
    derived["course"] = {**dict.fromkeys(("optimizer", "schedule", "precision"), EVIL), "rates": {EVIL: 1e-4}}
    hostile = made_of(
        {**steps, "supervised_tokens": np.ones(2)},
        rates={EVIL: np.array([1e-4, 1e-4])},
        name=EVIL,
        facts=RunFacts.from_json({**dict.fromkeys(words, EVIL), "derived": derived, "outcome": {"status": EVIL}}),
        recorded={EVIL: EVIL, f"derived.{EVIL}": EVIL, "outcome.status": EVIL},
        warnings=(EarlyWarning(step=1, kind=EVIL, message=EVIL, advice=EVIL),),
        evaluations=(EvalMetrics(step=1, epoch=1.0, eval_loss=1.0, samples_seen=0),),
        ledger={EVIL: 3},
        config=f"a: '{EVIL}'\n# {EVIL}",
        notes=(EVIL,),
    )
    for runs in ([hostile], [hostile, replace(hostile, config=f"b: {EVIL}")]):
        page = Page(render_runs(runs))
        assert not page.all("img")
        assert len(page.all("script")) == 2
        assert "\u202e" not in page.source
        assert "{{ 7 * 7 }}" in page.all("body")[0].text, "the text itself is there"


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path, steps: int) -> None:
    folder = write_run(tmp_path / "run", Made(steps=steps, outcome={}, evaluate=0))
    page = read_page(write_run_report(folder))
    text = page.all("main")[0].text
    assert ("No step yet" in text) == (steps == 0)
    assert ("continues it" in text) == (steps > 0), "nobody is at work in its folder"
    assert "nan" not in text.lower().replace("nano", "")


def test_a_run_that_is_training_says_so(tmp_path: Path) -> None:
    outcome = {"status": "running", "step": 0, "steps": 40}
    folder = write_run(tmp_path / "run", Made(steps=12, outcome=outcome))
    stopped = runs_content([read_run(folder)])
    assert "without a reason" in stopped["lead"]
    assert f"--resume \u2068{folder}" in stopped["lead"]
    with alone(folder / ".lock"):
        content = runs_content([read_run(folder)])
        assert content["headline"].endswith(" so far")
        assert "still training: step 12 of 40" in content["lead"]
        assert "still training: step 12 of 40" in render_runs([read_run(folder)] * 2)
        (folder / "metrics.jsonl").unlink()
        write_run(folder, Made(steps=12))
        assert "Completed." in runs_content([read_run(folder)])["lead"], "its process writes the page, then lets go"


def test_runs_that_cannot_be_compared_have_a_page(tmp_path: Path) -> None:
    begun, empty = (write_run(tmp_path / str(at), Made(steps=at, evaluate=0)) for at in (3, 0))
    for folders in ((begun, empty), (empty, begun), (empty, empty)):
        page = read_page(write_run_report(folders[0], others=folders[1:]))
        assert 'id="compare"' not in page.source
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.json").write_text("{}")
    assert "No step yet" in write_run_report(tmp_path / "bare").read_text()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.0, -3.0, 1e30, 1e-30])
def test_any_loss_can_be_drawn(value: float) -> None:
    count = np.arange(1.0, 31)
    columns = {"step": count, "samples_seen": 4 * count, "supervised_tokens": np.ones(30), "step_seconds": np.ones(30)}
    for column in ("loss", "grad_norm", "memory_bytes", "tokens_per_second", "padding_share"):
        columns[column] = np.where(count % 3 == 0, value, 1.0)
    whole = made_of({**columns, "loss": np.full(30, value)})
    for runs in ([made_of(columns)], [whole], [made_of(columns), whole]):
        page = Page(render_runs(runs))
        for line in (*page.all("polyline"), *page.all("polygon")):
            assert "nan" not in line.attributes["points"]
            assert "inf" not in line.attributes["points"]
    assert "not a number" in render_runs([whole]) or np.isfinite(value)


def test_a_long_run_is_thinned_and_nothing_is_hidden() -> None:
    count = np.arange(1.0, 100_001)
    random = np.random.default_rng(0)
    columns = {
        "step": count,
        "samples_seen": 16 * count,
        "supervised_tokens": np.full(100_000, 500.0),
        "tokens": np.full(100_000, 900.0),
        "step_seconds": random.lognormal(0, 0.1, 100_000),
        "loss": 1 + 5 * np.exp(-count / 2e4) + random.normal(0, 0.05, 100_000),
        "grad_norm": random.lognormal(0, 0.3, 100_000),
    }
    columns["loss"][70_000] = 40.0  # one spike in a hundred thousand steps
    started = time.process_time()
    text = render_runs([made_of(columns)])
    assert time.process_time() - started < 60
    assert len(text.encode()) < 1_000_000
    assert any("to 40.00" in title.text for title in Page(text).all("title")), "the spike can still be read"


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Made(steps=2))
    with pytest.raises(ConfigError, match="a folder"):
        write_run_report(folder, out=tmp_path)
    with pytest.raises(ConfigError, match="at most 8"):
        write_run_report(folder, others=[folder] * 8)
    assert write_run_report(folder, others=[folder] * 7).exists()


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / at / "run", Made(steps=12, seed=int(at))) for at in "12"]
    content = runs_content([read_run(folder) for folder in folders])
    assert [run["label"] for run in content["runs"]] == ["run (1)", "run (2)"]


_SAME = {"fingerprints": {"schedule": "a"}}
_WHY = {
    "same": ({**_SAME}, "The remaining difference of their losses is rounding", "kernels"),
    "kernels": (
        {**_SAME, "derived": {"attn_implementation": "sdpa"}},
        "other attention kernels (",
        "different samples",
    ),
    "other order": ({"samples": 7.0}, "Steps of the runs hold different samples", "rounding"),
    "other rate": (
        {**_SAME, "config": "training: {learning_rate: 2}"},
        "may differ by what was set differently (\u2068training.learning_rate\u2069).",
        "rounding",
    ),
    "no cause": ({**_SAME, "config": "training: {learning_rate: 1, output_dir: b}"}, "is rounding", "set diff"),
    "warm start": (
        {"origin": {"run": "/runs/first", "weights": "final", "samples_seen": 1200}},
        "started from different weights: packed from \u2068m\u2069 and padded from "
        "\u2068final\u2069 of the run \u2068first\u2069, trained on 1,200 samples. "
        "Every optimizer step has as many samples",
        "which samples shared a step",
    ),
    "other seed": ({"origin": {"seed": 3}}, "(random weights, seed 3)", "rounding"),
    "other model": ({"model": "n"}, "padded from \u2068n\u2069", "rounding"),
}


@pytest.mark.parametrize("case", _WHY)
def test_why_losses_differ_is_said(case: str) -> None:
    changed, words, others = _WHY[case]
    numbers = {"step": np.arange(1.0, 9), "samples_seen": 8 * np.arange(1.0, 9), "supervised_tokens": np.ones(8)}
    columns = {**numbers, "loss": np.linspace(3, 1, 8), "step_seconds": np.ones(8), "tokens": np.ones(8)}
    usual = {
        "model": "m",
        "fingerprints": changed.get("fingerprints"),
        "origin": None,
        "derived": {"attn_implementation": "varlen"},
    }
    runs = []
    for mode, own in (("packed", {}), ("padded", changed)):
        facts = RunFacts.from_json({"mode": mode, **usual, **{name: own[name] for name in usual if name in own}})
        config = own.get("config", "training: {learning_rate: 1}")
        samples = np.full(8, own.get("samples", 8.0))
        runs.append(made_of({**columns, "samples": samples}, facts=facts, config=config))
    content = runs_content(runs)
    why = content["comparison"]["why"]
    assert words in why
    assert others not in why
    assert why in render_runs(runs)
    assert ("curves coincide" in why) == ("rounding" in why)
    assert ("from different starting weights" in content["headline"]) == ("different weights" in why)
