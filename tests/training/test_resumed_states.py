"""A resumed run has the settings that it is given; what it has learned is that of its checkpoint."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import dataset, losses, model_of, same, shared, trainer_of, weights
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from transformers import TrainerCallback

from packtrain.core.errors import ArtifactError
from packtrain.training.resuming import settings_as_asked
from packtrain.training.step_settings import StepSettings

pytestmark = pytest.mark.contract
RATE, STOP, STEPS = 0.01, 2, 6


class Rates(TrainerCallback):
    """Keeps the rate that the optimizer makes each step with, by step."""

    def __init__(self) -> None:
        self.found: dict[int, float] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        (self.found[state.global_step + 1],) = {group["lr"] for group in optimizer.param_groups}


def rates(trainer: Any) -> dict[int, float]:
    return next(one.found for one in trainer.callback_handler.callbacks if isinstance(one, Rates))


def settings(trainer: Any, name: str) -> set[Any]:
    return {group[name] for group in trainer.optimizer.param_groups}


def made_trainer(folder: Path, model: Any = None, **given: Any) -> Any:
    model = model_of(dropout=0.0) if model is None else model
    parts = {"callbacks": [Rates()]}
    return trainer_of(dataset(), folder, model, parts=parts, **{"max_steps": STEPS, **given})


@cache
def begun() -> Path:
    """The checkpoint of a run that ended, its cosine at rate 0."""
    folder = shared() / "settings-begun"
    made_trainer(folder, max_steps=STOP).train()
    return folder / f"checkpoint-{STOP}"


def resumed(folder: Path, **given: Any) -> Any:
    trainer = made_trainer(folder, **given)
    trainer.train(resume_from_checkpoint=str(begun()))
    return trainer


def test_a_run_made_longer_has_the_rates_of_the_longer_schedule(tmp_path: Path) -> None:
    saved = torch.load(begun() / "optimizer.pt", weights_only=True)
    assert {group["lr"] for group in saved["param_groups"]} == {0.0}, "or nothing is tested"
    again = resumed(tmp_path / "again")
    cosine = {step: RATE * (1 + math.cos(math.pi * (step - 1) / STEPS)) / 2 for step in range(STOP + 1, STEPS + 1)}
    assert rates(again) == pytest.approx(cosine)


def test_rates_and_options_are_those_that_are_asked_for(tmp_path: Path) -> None:
    asked = {"learning_rate": RATE / 100, "weight_decay": 0.5, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
    again = resumed(tmp_path, lr_scheduler_type="constant", **asked)
    assert rates(again) == dict.fromkeys(range(STOP + 1, STEPS + 1), RATE / 100)
    assert settings(again, "initial_lr") == settings(again, "lr") == {RATE / 100}
    assert settings(again, "weight_decay") == {0.0, 0.5}, "norms do not decay"
    assert settings(again, "betas") == {(0.9, 0.9)}
    assert settings(again, "eps") == {1e-6}
    assert set(again.lr_scheduler.base_lrs) == {RATE / 100}


def test_the_moments_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """Another rate must not be paid for with what the optimizer has learned."""
    again = resumed(tmp_path, learning_rate=RATE / 2, max_steps=STOP + 1)
    assert {int(state["step"]) for state in again.optimizer.state.values()} == {STOP + 1}


def test_a_part_of_the_model_gets_its_own_rate(tmp_path: Path) -> None:
    data = dataset("qwen2_5_vl")

    def trainer(folder: str, **given: Any) -> Any:
        parts = {"step": StepSettings(loss_chunk=16, **given)}
        model = model_of("qwen2_5_vl", dropout=0.0)
        return trainer_of(data, tmp_path / folder, model, parts=parts, lr_scheduler_type="constant", max_steps=2)

    first = trainer("first", vit_lr=0.001)
    first.train()
    again = trainer("again", vit_lr=0.0002)
    again.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    found = {group["name"]: group["lr"] for group in again.optimizer.param_groups}
    assert found == {"language": RATE, "vision": 0.0002, "projector": RATE}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_nothing_changed_is_the_same_run(tmp_path: Path, precision: torch.dtype) -> None:
    """Bit by bit, also where masters of half weights are stepped."""

    def trainer(folder: str) -> Any:
        given = {"max_steps": 4, "weight_decay": 0.1, "warmup_steps": 1}
        return made_trainer(tmp_path / folder, model_of().to(precision), **given)

    whole, again = trainer("whole"), trainer("again")
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert rates(again) == {step: rate for step, rate in rates(whole).items() if step > 2}
    assert losses(again) == losses(whole)
    assert same(weights(again), weights(whole))


def test_checkpoints_come_as_often_as_is_asked(tmp_path: Path) -> None:
    again = resumed(tmp_path, save_steps=3, logging_steps=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]
    assert [step for step in losses(again) if step > STOP] == [4, 6]


def test_a_share_of_the_steps_is_one_of_all_steps_now(tmp_path: Path) -> None:
    resumed(tmp_path, save_steps=0.5)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


# ---- by themselves


def made(rate: float, *names: str, decay: float = 0.0) -> torch.optim.Optimizer:
    torch.manual_seed(0)
    groups = [{"params": [torch.nn.Parameter(torch.randn(2))], "name": name} for name in names or ("language",)]
    return torch.optim.AdamW(groups, lr=rate, weight_decay=decay)


def load(optimizer: Any, schedule: Any, saved: Any) -> None:
    with settings_as_asked(optimizer, schedule, "checkpoint-1"):
        optimizer.load_state_dict(saved[0])
        schedule.load_state_dict(saved[1])


def test_a_schedule_with_a_course_of_its_own_keeps_its_rates() -> None:
    first = made(RATE)
    plateau = ReduceLROnPlateau(first, patience=0)
    for _ in range(3):
        plateau.step(1.0)
    reached = first.param_groups[0]["lr"]
    assert reached < RATE
    again = made(RATE, decay=0.3)
    load(again, ReduceLROnPlateau(again, patience=0), (first.state_dict(), plateau.state_dict()))
    assert again.param_groups[0]["lr"] == reached
    assert again.param_groups[0]["weight_decay"] == 0.3


def test_what_an_optimizer_counts_in_its_groups_stays() -> None:
    first, again = made(RATE), made(RATE)
    first.param_groups[0]["k"] = 7
    again.param_groups[0]["k"] = 0
    schedules = [LambdaLR(one, lambda _: 1.0) for one in (first, again)]
    load(again, schedules[1], (first.state_dict(), schedules[0].state_dict()))
    assert again.param_groups[0]["k"] == 7


def test_groups_of_other_parts_are_refused() -> None:
    first, again = made(RATE, "vision", "language"), made(RATE, "language", "vision")
    schedules = [LambdaLR(one, lambda _: 1.0) for one in (first, again)]
    with pytest.raises(ArtifactError, match=r"(?s)groups vision, language.*language, vision"):
        load(again, schedules[1], (first.state_dict(), schedules[0].state_dict()))


def test_states_of_other_parameters_are_an_error_that_says_so(tmp_path: Path) -> None:
    trainer_of(dataset(), tmp_path, model_of(), max_steps=1).train()
    fewer = model_of()
    next(iter(fewer.parameters())).requires_grad_(False)
    other = trainer_of(dataset(), tmp_path / "other", fewer, max_steps=2)
    with pytest.raises(ArtifactError, match="of other parameters"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
