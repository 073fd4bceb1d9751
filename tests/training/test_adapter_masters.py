"""LoRA in half precision with fp32 masters: it learns as fp32 does, and a resumed run is the same run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import dataset, losses, same, trainer_of, weights
from torch import Tensor
from torch.optim import AdamW

from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.preparation import ready_model
from packtrain.predicting.values import TrainingSetup
from packtrain.training.masters import MASTER, make_optimizer, masters_of
from packtrain.training.step_settings import StepSettings

HALF, WIDE = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ready(method: str = "lora", *, dropout: float = 0.0, dtype: str = "bf16", **setup: Any) -> Any:
    """As `train` makes it."""
    chosen = ModelSettings(name="tiny:llama", method=method, lora_rank=4, lora_dropout=dropout, dtype=dtype)  # type: ignore[arg-type]
    options = {"gradient_checkpointing": False, "vision_checkpointing": False, **setup}
    how = TrainingSetup(method=method, train_vision=False, train_projector=False, **options)  # type: ignore[arg-type]
    return ready_model(chosen, how, device=torch.device("cpu"), packing=True, seed=4)


def adapters(model: Any) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if "lora_" in name}


def test_the_setup_decides() -> None:
    """Masters as the optimizer has them: without, adapters are fp32, or small updates were lost."""
    for method, setup, wanted in (
        ("lora", {}, HALF),
        ("lora", {"master_weights": False}, WIDE),
        ("lora", {"optimizer": "adamw_8bit"}, WIDE),
        ("dora", {}, WIDE),
    ):
        made = ready(method, **setup)
        assert {weight.dtype for weight in adapters(made.model).values()} == {wanted}
        assert made.trains_half == (wanted == HALF)
    assert {weight.dtype for weight in adapters(ready(dtype="fp32").model).values()} == {WIDE}


# ---- learning


def learned(model: Any, *, masters: bool | None = None, steps: int = 20) -> Tensor:
    """How far adapters went in some steps, their masters where there are some."""
    trained = adapters(model.train())
    start = [weight.detach().float().clone() for weight in trained.values()]
    optimizer = make_optimizer(AdamW, [{"params": list(trained.values())}], {"lr": 5e-5}, masters=masters)
    assert (masters_of(optimizer) is not None) == (masters is None and WIDE not in {w.dtype for w in trained.values()})
    for step in range(steps):
        ids = torch.randint(5, 200, (1, 96), generator=torch.Generator().manual_seed(step % 5))
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    now = [optimizer.state[weight].get(MASTER, weight).detach().float() for weight in trained.values()]
    return torch.cat([(one - was).flatten() for one, was in zip(now, start, strict=True)])


def test_it_learns_as_in_fp32() -> None:
    exact = ready()
    exact.model.float()  # the same weights and adapters
    wanted = learned(exact.model)
    assert wanted.norm() > 0

    def apart(found: Tensor) -> float:
        return float((found - wanted).norm() / wanted.norm())

    half = apart(learned(ready().model))
    wide = apart(learned(ready(master_weights=False).model))
    rounded = apart(learned(ready().model, masters=False))
    assert half < 0.1
    assert half < 1.5 * wide, "as well as fp32 adapters beside bf16 weights"
    assert rounded > 0.4, "or masters were not needed"


# ---- resuming


@pytest.mark.contract
def test_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    """With dropout; weights, masters and losses bit by bit."""
    given = {"learning_rate": 1e-3, "max_steps": 4}
    runs = []
    for name in ("whole", "again"):
        model = ready(dropout=0.2, gradient_checkpointing=True).model
        trainer = trainer_of(dataset(), tmp_path / name, model, **given)
        before = adapters(model)
        trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2") if name == "again" else None)
        assert all(adapters(model)[key] is weight and weight.dtype == HALF for key, weight in before.items())
        runs.append(trainer)
    whole, again = runs
    assert len(again.trained) == len(whole.trained) // 2
    assert losses(again) == losses(whole)
    assert same(weights(again), weights(whole))
    states = [masters_of(trainer.optimizer).state for trainer in runs]  # type: ignore[union-attr]
    assert len(states[0]) == len(adapters(whole.model))
    for left, right in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(left[name], right[name]) for name in ("exp_avg", "exp_avg_sq", MASTER))
        assert left[MASTER].dtype == WIDE


@pytest.mark.contract
def test_the_users_own_adapters_are_resumed_in_their_precision(tmp_path: Path) -> None:
    """A model that was given to the trainer with adapters in it."""
    peft = pytest.importorskip("peft")
    found = []
    for name in ("whole", "again"):
        model = ready(method="full").model
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj"])
        model = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
        parts = {"step": StepSettings(loss_chunk=16)}
        trainer = trainer_of(dataset(), tmp_path / name, model, parts=parts, max_steps=2)
        trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1") if name == "again" else None)
        assert {weight.dtype for weight in adapters(model).values()} == {HALF}
        found.append(weights(trainer))
    assert same(*found)
