"""Metrics are on the disk before a checkpoint is there, and watching never ends a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_metrics import step_of
from rich.console import Console
from small_run import dataset, trainer_of
from transformers import TrainerControl, TrainerState

from packtrain.core.errors import ArtifactError
from packtrain.training.checkpoints import find_latest
from packtrain.training.meter import StepMeter
from packtrain.training.metrics_log import MetricsLog, read_metrics
from packtrain.training.progress import TrainingProgress
from packtrain.training.run_watch import RunWatch

pytestmark = pytest.mark.contract


class Noted(TrainingProgress):
    """Keeps what it is to say."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True), steps=2, work=2.0, quiet=True)
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def watched(folder: Path, log: MetricsLog) -> Any:
    watch = RunWatch(log, Noted())
    parts = {"callbacks": [watch], "on_step": watch.on_step, "meter": StepMeter()}
    return trainer_of(dataset(), folder, parts=parts, max_steps=2)


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


def test_metrics_that_cannot_be_written_leave_no_checkpoint(tmp_path: Path) -> None:
    class Full(MetricsLog):
        def sync(self) -> None:
            if (tmp_path / ".checkpoint-1.saving").is_dir():
                raise OSError(28, "No space left on device")

    full = Full(tmp_path / "metrics.jsonl")
    with pytest.raises(ArtifactError, match="No space left"):
        watched(tmp_path, full).train()
    assert find_latest(tmp_path) is None


@pytest.mark.parametrize("saved", [{"version": 99}, {"version": 1, "last": {}}, [], "text"])
def test_a_state_of_monitors_that_cannot_be_read_ends_no_run(tmp_path: Path, saved: Any) -> None:
    shown = Noted()
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        watch = RunWatch(log, shown)
        state = TrainerState(global_step=3, stateful_callbacks={"packtrain.monitors": saved})
        watch.on_train_begin(None, state, TrainerControl())  # type: ignore[arg-type]
        watch.on_step(step_of(4))
    assert len(shown.notes) == 1
    assert "early warnings begin anew" in shown.notes[0]
