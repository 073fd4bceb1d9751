"""The demo: planted faults are in the ledger, stages agree, both runs learn, and a second run finds nothing to do."""

from __future__ import annotations

import html
import json
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from PIL import Image
from typer.testing import CliRunner

from packtrain.app.measure import measure_outcome
from packtrain.app.train.prepare import prepare
from packtrain.app.train.resolve import resolve_run
from packtrain.cli import app
from packtrain.cli.measure import MeasureBar, measured_json
from packtrain.cli.pack import plan_json
from packtrain.cli.plan import planned_json
from packtrain.cli.terminal import Terminal
from packtrain.config.run_config import load_config
from packtrain.demo import run_demo, train_demo
from packtrain.records.synthetic import BROKEN, write_dataset
from packtrain.reports.run_words import ALIKE
from packtrain.runs.training_run import read_run


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


def test_data_are_the_same_every_time_and_grow_with_their_number(tmp_path: Path) -> None:
    first, again = (write_dataset(tmp_path / name, 16).read_bytes() for name in ("a", "b"))
    assert first == again
    other = write_dataset(tmp_path / "c", 16, seed=1).read_bytes()
    assert other != first
    pictures = {path.name: Image.open(path).size for path in (tmp_path / "a" / "images").glob("0*.jpg")}
    assert len(pictures) == 16
    sizes = {
        Path(record["images"][0]).name: (record["width"], record["height"])
        for line in first.splitlines()
        if b'"objects"' in line and (record := json.loads(line))
    }
    assert sizes == pictures


@pytest.mark.full
def test_the_smallest_demo_and_its_second_run(tmp_path: Path) -> None:
    """As a user calls it, the check against the real processor included."""
    run = ["demo", "--out", str(tmp_path / "demo"), "--pictures", "32", "--workers", "1"]
    first = CliRunner().invoke(app, [*run, "--json"], catch_exceptions=False)
    assert first.exit_code == 0
    said = json.loads(first.stdout)["measure"]
    assert said["counts"]["failed"] == BROKEN == len(said["counts"]["reasons"]), "two faults are the same"
    assert said["counts"]["rows"] == 32 + 2 + 2
    assert said["check"] == {"records": 32, "note": ""}
    costs = tmp_path / "demo" / "costs"
    before = {path.name: path.stat().st_mtime_ns for path in costs.iterdir()}
    plan = {path.name: path.read_bytes() for path in (tmp_path / "demo" / "plan").iterdir()}
    _check_report(json.loads(first.stdout), tmp_path / "demo")
    _check_training(json.loads(first.stdout)["train"], tmp_path / "demo")
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "demo" / "runs").rglob("*")}
    second = CliRunner().invoke(app, run, catch_exceptions=False)
    assert second.exit_code == 0
    assert "Nothing has changed" in second.stdout
    assert "the runs are reused" in second.stdout
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "demo" / "runs").rglob("*")} == runs
    assert {path.name: path.stat().st_mtime_ns for path in costs.iterdir()} == before
    assert {path.name: path.read_bytes() for path in (tmp_path / "demo" / "plan").iterdir()} == plan
    third = CliRunner().invoke(app, [*run, "--json"], catch_exceptions=False)
    assert json.loads(third.stdout)["pack"] == json.loads(first.stdout)["pack"]


def _check_report(said: dict[str, Any], folder: Path) -> None:
    """Report and plan are there, are about all measured records, and agree with each other."""
    for path in said["plan"]["files"].values():
        assert Path(path).stat().st_size > 0
    recommended = said["plan"]["recommendation"]
    page = " ".join(html.unescape((folder / "report" / "report.html").read_text()).split())
    assert recommended["verdict"] in page
    chosen = said["plan"]["simulations"][recommended["simulation"]]
    packed = said["pack"]
    assert packed["config"]["packing_length"] == chosen["packing_length"]
    assert len(packed["epochs"]) == said["plan"]["about"]["epochs"] == 2
    for counts in packed["epochs"]:
        assert (counts["packs"], counts["dropped"]) == (chosen["packs"], chosen["samples_dropped"])
        assert counts["entries"] + counts["dropped"] == said["measure"]["counts"]["rows"]
    assert load_config(folder / "report" / "recommended.yaml").notes == ()
    lines = (folder / "report" / "sample_stats.jsonl").read_text().splitlines()
    assert len(lines) == said["measure"]["counts"]["rows"]


def _check_training(said: dict[str, Any], folder: Path) -> None:
    """Both runs saw every sample once, learned, and stand on one page."""
    assert said["verified"]
    assert [run["about"]["mode"] for run in said["runs"]] == ["packed", "padded"]
    packed, padded = (run["summary"] for run in said["runs"])
    assert packed["samples"] == padded["samples"] == said["comparison"]["samples"] > 0
    assert packed["tokens"] == padded["tokens"]
    assert packed["padding"] < 0.05 < padded["padding"]
    assert said["comparison"]["changes"][0] == []
    assert "data.packing: false" in said["comparison"]["changes"][1]
    for run in (packed, padded):
        assert run["loss_end"] < run["loss_start"]
    assert (folder / "report.html").stat().st_size > 10_000
    assert said["headline"] in html.unescape((folder / "report.html").read_text(encoding="utf-8"))


@pytest.mark.full
def test_packed_and_padded_learn_the_same(tmp_path: Path) -> None:
    """At equal samples, and far below a model that has learned nothing."""
    data = write_dataset(tmp_path / "data", 200)
    trained = train_demo(data, tmp_path, model="tiny:qwen2_5_vl", pictures=200)
    content = trained.reported.content
    assert trained.check_report.passed
    assert not trained.reused
    first, second = (run["summary"] for run in content["runs"])
    assert first["loss_start"] == pytest.approx(second["loss_start"], rel=0.02), "the same model, not yet trained"
    assert content["comparison"]["evaluated"]
    for run in content["comparison"]["runs"]:
        assert run["eval_loss"] < 0.25 * first["loss_start"]
    # Every step has the same samples: what is left is the order in which numbers are added up.
    assert "the same samples in all runs" in content["comparison"]["why"]
    assert content["comparison"]["apart"] < 1e-3 < ALIKE
    packed, padded = (read_run(run).steps for run in trained.folders)
    assert packed["samples"].tolist() == padded["samples"].tolist()
    assert packed["supervised_tokens"].tolist() == padded["supervised_tokens"].tolist()
    assert padded["loss"].tolist() == pytest.approx(packed["loss"].tolist(), rel=1e-3)
    assert first["padding"] < 0.01 < 0.3 < second["padding"]
    derived = [run.facts.derived for run in map(read_run, trained.folders)]
    assert len({one.attn_implementation for one in derived if one is not None}) == 1, "by the same kernel"
    assert train_demo(data, tmp_path, model="tiny:qwen2_5_vl", pictures=200).reused


def test_the_smallest_demo_without_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage once, in this process: what takes long is the real processor, which the full suite runs."""
    monkeypatch.setattr("packtrain.demo.measure_outcome", partial(measure_outcome, check=0))
    first, second = (run_demo(tmp_path / "demo", pictures=16, workers=1, train=False) for _ in range(2))
    assert (first.measured.reused, first.packed.reused) == (False, False)
    assert (second.measured.reused, second.packed.reused) == (True, True)
    said = {
        "measure": measured_json(first.measured),
        "plan": planned_json(first.planned),
        "pack": plan_json(first.packed.plan),
    }
    _check_report(said, tmp_path / "demo")
    assert first.measured.table.summary.counts.failed == BROKEN
    assert second.planned.study == first.planned.study
    assert first.trained is None
    config = load_config(tmp_path / "demo" / "report" / "recommended.yaml")
    assert config.model.model_name_or_path == "tiny:qwen2_5_vl", "what is planned for has no weights"
    prepared = prepare(resolve_run(config, overrides=("training.use_cpu=true",)))
    assert prepared.numbers.samples == len(first.measured.table)


def test_stages_are_shown_in_their_order_and_without_hints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    """On a terminal too: no bar is left beside a message."""
    monkeypatch.setattr("packtrain.demo.measure_outcome", partial(measure_outcome, check=0))
    bars = Terminal(file=StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr("packtrain.cli.terminal.errors", bars)
    alive: list[bool] = []
    shown = MeasureBar.__exit__
    monkeypatch.setattr(MeasureBar, "__exit__", lambda self, *_: (shown(self), alive.append(self._bar.live.is_started)))
    code, out, _ = run("demo", "--no-train", "--pictures", 16, "--workers", 1, "--out", tmp_path / "demo")
    assert code == 0
    places = [out.index(title) for title in ("Record costs", "Packing lengths tried", "Packs of")]
    assert places == sorted(places)
    assert "next:" not in out
    assert len(alive) >= 4
    assert not any(alive)
    assert "measuring" in bars.file.getvalue(), "the bar was there"  # type: ignore[attr-defined]


def test_without_the_packages_the_demo_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.demo.measure_outcome", partial(measure_outcome, check=0))
    monkeypatch.setattr("packtrain.demo.can_train", lambda: False)
    said: list[str] = []
    assert run_demo(tmp_path / "demo", pictures=16, workers=1, say=said.append).trained is None
    assert any("packtrain[train]" in line for line in said)
