"""Metrics are on the disk before a checkpoint is there, and watching never ends a run."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from made_metrics import step_of
from rich.console import Console
from small_run import dataset, trainer_of
from transformers import TrainerCallback, TrainerControl, TrainerState

from packtrain.core.errors import ArtifactError
from packtrain.delivery.trainers.watch import RankWatchdog
from packtrain.runs.metrics_log import MetricsLog, read_metrics
from packtrain.training.callbacks import RunLogger
from packtrain.training.checkpoints import find_latest
from packtrain.training.meter import StepMeter
from packtrain.training.progress import TrainingProgress
from packtrain.verifying.check_result import CheckReport, CheckResult

pytestmark = pytest.mark.contract


class Noted(TrainingProgress):
    """Keeps what it is to say."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True), steps=2, work=2.0, quiet=True)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def watched(folder: Path, log: MetricsLog, *more: TrainerCallback, eval_dataset: Any = None, **options: Any) -> Any:
    watch = RunLogger(log, Noted())
    parts = {"callbacks": [watch, *more], "on_step": watch.on_step, "meter": StepMeter(), "eval_dataset": eval_dataset}
    return trainer_of(dataset(), folder, parts=parts, **{"max_steps": 2, **options})


def test_metrics_are_synced_before_the_checkpoint_has_its_name(tmp_path: Path) -> None:
    seen: list[tuple[list[int], int | None]] = []

    class Watched(MetricsLog):
        def sync(self) -> None:
            super().sync()
            newest = find_latest(tmp_path)
            steps = [step.step for step in read_metrics(tmp_path / "metrics.jsonl").steps]
            seen.append((steps, newest.step if newest is not None else None))

    with Watched(tmp_path / "metrics.jsonl") as log:
        watched(tmp_path, log).train()
    assert seen[:3] == [([], None), ([1], None), ([1, 2], 1)], "the step's own line is there, and its checkpoint is not"


def test_a_proof_of_shared_weights_is_said_when_it_is_made() -> None:
    shown = Noted()
    made: dict[str, Any] = {
        "model": "m",
        "attn_implementation": "sdpa",
        "device": "cpu",
        "dtype": "float32",
        "tokens": 9,
    }
    finding = CheckResult(check="labels", difference=0.0, allowed=0.0)
    made |= {"kinds": ("text",), "longest": 1200}
    verdict = CheckReport(samples=("a (text)",), checks=(finding,), left_out=("a\x1b[2J",), seconds=2.0, **made)
    RunLogger(MetricsLog(None), shown).on_packing_check(verdict)
    said = (
        "passed in 2.0 s: 1 sample (text, longest 1,200 tokens) packed vs. alone, largest difference 0.0e+00 in 1 check"
    )
    assert shown.notes == [f"packing check: {said}", "packing check: not checked: a\ufffd[2J"]


def test_a_run_that_goes_on_knows_what_was_before(tmp_path: Path) -> None:
    evaluating = {"eval_dataset": dataset(epochs=1), "eval_strategy": "steps", "eval_steps": 1}
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        watched(tmp_path, log, **evaluating).train()
    before = read_metrics(tmp_path / "metrics.jsonl")
    watch = RunLogger(MetricsLog(tmp_path / "metrics.jsonl"), Noted())
    parts = {"callbacks": [watch], "on_step": watch.on_step, "meter": StepMeter()}
    trainer_of(dataset(), tmp_path, parts=parts, max_steps=2).train(resume_from_checkpoint=True)
    seconds = [*(one.step_seconds for one in before.steps), *(one.seconds or 0.0 for one in before.evaluations)]
    assert len(seconds) == 4
    assert watch.seconds_before == pytest.approx(sum(seconds))
    assert watch.eval_loss == before.evaluations[-1].eval_loss


def test_metrics_that_cannot_be_written_leave_no_checkpoint(tmp_path: Path) -> None:
    class Full(MetricsLog):
        def sync(self) -> None:
            if (tmp_path / ".checkpoint-1.saving").is_dir():
                raise OSError(28, "No space left on device")

    full = Full(tmp_path / "metrics.jsonl")
    with pytest.raises(ArtifactError, match="No space left"):
        watched(tmp_path, full).train()
    assert find_latest(tmp_path) is None


class Stopped(TrainerCallback):
    """A signal in the middle of a step, or the death of the process before it."""

    def __init__(self, step: int, *, dies: bool) -> None:
        self._step, self._dies = step, dies

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step - 1:
            if self._dies:
                raise ZeroDivisionError
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.more
def test_an_evaluation_that_was_synthetic_for_stands_there_once(tmp_path: Path) -> None:
    """Also where the run that made up for it has left no checkpoint."""
    data, path = dataset(epochs=1), tmp_path / "metrics.jsonl"
    options = {"eval_dataset": data, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "save_strategy": "no"}

    def evaluated() -> list[int]:
        return [one.step for one in read_metrics(path).evaluations]

    with MetricsLog(path) as log:
        trainer = watched(tmp_path, log, Stopped(2, dies=False), **options)
        trainer.train()
    assert (trainer.interrupted, trainer.state.global_step, evaluated()) == ("SIGTERM", 2, [])
    for _ in range(2):
        with MetricsLog(path) as log, pytest.raises(ZeroDivisionError):
            watched(tmp_path, log, Stopped(4, dies=True), **options).train(resume_from_checkpoint=True)
        assert evaluated() == [2]
    with MetricsLog(path) as log:
        watched(tmp_path, log, **options).train(resume_from_checkpoint=True)
    assert evaluated() == [2, 4]
    assert [one.step for one in read_metrics(path).steps] == [1, 2, 3, 4]


@pytest.mark.parametrize("saved", [{"version": 99}, {"version": 1, "last": {}}, [], "text"])
def test_a_state_of_monitors_that_cannot_be_read_ends_no_run(tmp_path: Path, saved: Any) -> None:
    shown = Noted()
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        watch = RunLogger(log, shown)
        state = TrainerState(global_step=3, stateful_callbacks={"packtrain.monitors": saved})
        watch.on_train_begin(None, state, TrainerControl())  # type: ignore[arg-type]
        watch.on_step(step_of(4))
    assert len(shown.notes) == 1
    assert "the monitors start over" in shown.notes[0]


def test_processes_wait_for_one_that_falls_behind_as_long_as_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, float]] = []
    monkeypatch.setattr("packtrain.training.trainer.world_size", lambda: 2)
    monkeypatch.setattr(RankWatchdog, "of_group", lambda **timeouts: given.append(timeouts) or nullcontext())
    for number, timeout in enumerate((None, 1800.0, 60.0, 7200.0)):
        trainer_of(dataset(), tmp_path / str(number), parts={"rank_timeout": timeout})._watching()
    assert [tuple(one.values()) for one in given] == [
        (120.0, 120.0, 1800.0),
        (120.0, 1800.0, 1800.0),
        (60.0, 60.0, 1800.0),
        (120.0, 7200.0, 7200.0),
    ], "deadline, step_deadline, start_deadline"
