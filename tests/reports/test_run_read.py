"""Reading a run's folder: what was logged comes back; what is broken, missing or unfinished is said, never raised."""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from made_runs import WARNINGS, Made, steps_of, write_run

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.runs.metrics_log import MetricsLog
from packtrain.runs.run_folder import Origin, RunFolder, commit
from packtrain.runs.step_metrics import LEARNING_RATES, STEP_KEYS, EvalMetrics, to_plain
from packtrain.runs.training_run import read_run


def test_columns_are_keys_of_the_log() -> None:
    """The page and the log agree on every name, or a curve would silently stay empty."""
    keys = set(to_plain(steps_of(Made(steps=1))[0]))
    assert set(STEP_KEYS) | {LEARNING_RATES} <= keys


def test_what_was_written_is_read(tmp_path: Path) -> None:
    made = Made(steps=40, warnings=WARNINGS, evaluate=10, nan_at=(7,))
    run, steps = read_run(write_run(tmp_path / "run", made)), steps_of(made)
    assert run.notes == ()
    assert (run.facts.model, run.facts.mode, run.facts.packs_per_step) == (made.model, "packed", 4)
    assert run.recorded["versions.torch"] == "2.15.0"
    for key in STEP_KEYS:
        written = np.array([math.nan if (one := to_plain(step)[key]) is None else one for step in steps], np.float64)
        np.testing.assert_array_equal(run.steps[key], written, err_msg=key)
    assert np.isnan(run.steps["loss"][6])
    assert list(run.steps.rates) == ["language", "vision", "projector"]
    assert [one.step for one in run.evaluations] == [10, 20, 30, 40]
    assert run.ledger == {"plan: longer than a pack": 3, "decode: image cannot be decoded": 2}
    assert run.status == "complete"
    assert (*run.facts.prepared, *run.facts.notes) == (
        "the cost table is reused",
        "data.packing_length: the model's own",
    )


def test_evaluations_are_read_whole(tmp_path: Path) -> None:
    evaluation = EvalMetrics(step=1, epoch=0.5, eval_loss=2.0, samples_seen=4, seconds=1.5, eval_failures=3)
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.evaluation(evaluation)
    assert read_run(tmp_path).evaluations == (evaluation,)


def test_the_facts_of_a_run_are_those_that_were_written(tmp_path: Path) -> None:
    facts = replace(read_run(write_run(tmp_path / "made", Made(steps=1))).facts, origin=Origin(seed=3))
    assert facts.derived is not None
    assert facts.derived.course.rates == {"language": 2e-4}
    RunFolder(tmp_path / "run").begin({}, facts)
    read = read_run(tmp_path / "run").facts
    assert read == RunFolder(tmp_path / "run").facts()
    own = {"versions": facts.versions, "commit": facts.commit}
    assert replace(read, **own).to_json() | {"derived": None} == facts.to_json() | {"derived": None}
    assert read.derived is not None
    assert (read.derived.course, read.derived.lora) == (facts.derived.course, facts.derived.lora)


def test_facts_of_other_kinds_are_those_of_an_older_run(tmp_path: Path) -> None:
    body = {"model": 3, "seed": -1, "world_size": True, "packs_per_step": "4", "notes": ["a", 2]}
    body["derived"] = {"steps": 7}
    (tmp_path / "run.json").write_text(json.dumps({**body, "outcome": {"loss": "nan"}, "versions": {"torch": None}}))
    facts = read_run(tmp_path).facts
    assert (facts.model, facts.seed, facts.world_size, facts.packs_per_step) == (None, 0, 1, None)
    assert (facts.notes, facts.versions, facts.status) == (("a",), {}, "started")
    assert facts.derived is not None
    assert (facts.derived.steps, facts.derived.method, facts.derived.expected) == (7, "", None)
    assert facts.outcome is not None
    assert math.isnan(facts.outcome.loss or 0.0)


def test_warnings_come_with_kind_and_advice(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", Made(steps=100, warnings=WARNINGS)))
    assert [(one.step, one.kind, one.message, one.advice) for one in run.warnings] == [
        (one.step, one.kind, one.message, one.advice) for one in WARNINGS
    ]


def test_a_line_in_the_making_is_no_fault_and_a_broken_one_is_said(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Made(steps=20))
    path = folder / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])  # the writer is in the middle of a line
    run = read_run(folder)
    assert (len(run.steps), run.notes) == (19, ())
    path.write_bytes(whole.replace(b'{"kind": "step", "step": 5,', b"\xff\x00{{ torn", 1))
    run = read_run(folder)
    assert len(run.steps) == 19
    assert 5 not in run.steps["step"]
    assert "1 unreadable line of metrics.jsonl" in run.notes[0]


def test_a_step_that_was_trained_again_counts_as_it_was_last(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Made(steps=10))
    with (folder / "metrics.jsonl").open("a") as file:
        again = {**to_plain(steps_of(Made(steps=10))[3]), "kind": "step", "loss": 123.0}
        file.write(json.dumps(again) + "\n")
    run = read_run(folder)
    assert run.steps["step"].tolist() == list(range(1, 11))
    assert run.steps["loss"][3] == 123.0


@pytest.mark.parametrize("name", ["run.json", "run.yaml", "metrics.jsonl"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe\x00 broken {", b"[1, 2]", b"null\n", b'{"step": {}}\n'])
def test_any_file_may_be_missing_or_broken(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder = write_run(tmp_path / "run", Made(steps=5))
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    run = read_run(folder)
    assert len(run.steps) == (0 if name == "metrics.jsonl" else 5)
    if content is None:
        assert run.notes == (f"{name} is not there.",)


def test_values_of_other_kinds_than_numbers_are_not_known(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    line = {"kind": "step", "step": 1, "samples_seen": 4, "loss": [1], "grad_norm": True, "fill": "Infinity"}
    line |= {"mfu": 10**400, "learning_rates": {"language": "x", "vision": 1e-4}}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    steps = read_run(folder).steps
    assert np.isnan(steps["loss"][0])
    assert np.isnan(steps["grad_norm"][0])
    assert (steps["fill"][0], steps["mfu"][0]) == (math.inf, math.inf)
    assert steps.rates["vision"].tolist() == [1e-4]


def test_what_is_no_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        read_run(tmp_path / "none")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="a file"):
        read_run(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"neither run\.json nor metrics\.jsonl"):
        read_run(tmp_path / "empty")
    (tmp_path / "empty" / "recommendations.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"open .*report\.html"):
        read_run(tmp_path / "empty")


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/etc/hostname"), os.mkfifo])
@pytest.mark.parametrize("name", ["run.json", "run.yaml", "metrics.jsonl", "ledger.jsonl"])
def test_links_and_pipes_of_a_foreign_folder_are_refused(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    """A page shows what it reads: a link would show a file of the reader's own."""
    for one in ("run.json", "metrics.jsonl"):
        (tmp_path / one).write_text("{}\n")
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(ArtifactError, match=rf"(?s){name}.*a link|{name}.*a pipe"):
        read_run(tmp_path)


def test_the_commit_that_a_run_was_started_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*given: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@x", "-C", str(tmp_path))
        return subprocess.run(("git", *who, *given), capture_output=True, text=True, check=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    assert commit() is None, "no repository"
    git("init", "-q")
    (tmp_path / "run.yaml").write_text("data: {}")
    git("add", ".")
    git("commit", "-qm", "first")
    assert commit() == git("rev-parse", "HEAD")
    (tmp_path / "run.yaml").write_text("data: {packing: false}")
    assert commit() == f"{git('rev-parse', 'HEAD')}-dirty"
    monkeypatch.setenv("PATH", "")
    assert commit() is None, "git is not there"
