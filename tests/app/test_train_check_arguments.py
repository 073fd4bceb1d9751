"""Arguments that only a trainer would look at are tried before a run, and before any of it is there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import Run
from made_runs_data import write_config
from transformers import TrainingArguments

from packtrain.app.train.trainer_arguments import try_arguments
from packtrain.core.errors import ConfigError

pytestmark = pytest.mark.contract
needs_tensorboard = pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")


def arguments(tmp_path: Path, **given: object) -> TrainingArguments:
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": [], "max_steps": 10, **given}
    return TrainingArguments(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"report_to": ["tensorbord"]}, "tensorbord is not supported"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "min_lr_rate"),
        ({"lr_scheduler_kwargs": {"power_of": 2}}, "power_of"),
        ({"optim_args": "foo"}, "optim_args"),
    ],
)
def test_what_a_trainer_would_trip_over_is_said(tmp_path: Path, given: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        try_arguments(arguments(tmp_path, **given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        pytest.param({"report_to": ["tensorboard"]}, marks=needs_tensorboard),
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
        {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps"},
        {"optim": "adamw_torch", "optim_args": "fused=False"},
        {"optim": "adafactor", "warmup_steps": 0.1},
    ],
)
def test_what_it_can_train_with_passes(tmp_path: Path, given: dict[str, object]) -> None:
    try_arguments(arguments(tmp_path, **given))


def test_the_command_leaves_no_run(run: Run, tmp_path: Path) -> None:
    config = write_config(tmp_path, max_steps=3)
    code, _, err = run("train", config, "training.report_to=tensorbord", "training.packing_check=false")
    assert code == 2
    assert "training.report_to" in err
    assert not (tmp_path / "out" / "run.json").exists()
