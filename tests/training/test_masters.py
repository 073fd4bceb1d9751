"""Half-precision weights with fp32 masters: they learn as fp32 weights do, and what is saved is all of it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import dataset, losses, model_of, same, shared, trainer_of, weights
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Optimizer
from transformers import Adafactor, Trainer, TrainerCallback

from packtrain.core.errors import ConfigError
from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.preparation import ready_model
from packtrain.predicting.values import TrainingSetup
from packtrain.training import masters as masters_module
from packtrain.training.masters import MASTER, MasterWeights, make_optimizer, masters_of
from packtrain.training.optimizers import parameter_groups
from packtrain.training.step_settings import StepSettings

sys.path.append(str(Path(__file__).parents[1] / "delivery"))
from processes import process_of

RATE = 1e-5
FACTORED = {"scale_parameter": False, "relative_step": False}
KINDS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (AdamW, {"lr": RATE, "foreach": True}),
    "adamw fused": (AdamW, {"lr": RATE, "fused": True}),
    "sgd": (SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adafactor": (Adafactor, {"lr": RATE, **FACTORED}),
}


def net(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
    return made.to(torch.bfloat16).to(dtype)  # so that all begin at the same weights


def optimizer_for(model: nn.Module, kind: str = "adamw", masters: bool | None = None, **more: Any) -> Any:
    found, options = KINDS[kind]
    return make_optimizer(found, [{"params": list(model.parameters())}], {**options, **more}, masters=masters)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 60, first: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, first + steps):
        torch.manual_seed(step)
        inputs, wanted = torch.randn(16, 32), torch.randn(16, 8)
        optimizer.zero_grad()
        ((model(inputs.to(dtype)).float() - wanted) ** 2).mean().backward()
        optimizer.step()


def moved(model: nn.Module, dtype: torch.dtype, optimizer: Any = None) -> Tensor:
    """How far all weights went, their masters where there are some."""
    state = {} if optimizer is None else optimizer.state
    now = [state.get(weight, {}).get(MASTER, weight).detach().float() for weight in model.parameters()]
    return torch.cat(
        [(one - was.detach().float()).flatten() for one, was in zip(now, net(dtype).parameters(), strict=True)]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_small_updates_are_not_lost(kind: str) -> None:
    """As far as an fp32 model goes, in its direction; without masters most of it is rounded away."""
    reference = net(torch.float32)
    train(reference, optimizer_for(reference, kind))
    expected, distances = moved(reference, torch.float32), {}
    for masters in (None, False):
        model = net()
        optimizer = optimizer_for(model, kind, masters)
        assert isinstance(optimizer, MasterWeights) == (masters is None)
        train(model, optimizer)
        found = moved(model, torch.bfloat16, optimizer)
        distances[masters] = float((found - expected).norm() / expected.norm())
        assert all(weight.dtype == torch.bfloat16 for weight in model.parameters())
    assert distances[None] < 0.1
    assert distances[False] > 0.4


def test_weights_are_their_masters_rounded() -> None:
    model = net()
    optimizer = optimizer_for(model)
    train(model, optimizer)
    states = [optimizer.state[weight] for weight in model.parameters()]
    for weight, state in zip(model.parameters(), states, strict=True):
        assert {one.dtype for one in state.values()} == {torch.float32}
        assert torch.equal(weight, state[MASTER].to(torch.bfloat16))
    finer = [
        torch.equal(state[MASTER], weight.float()) for weight, state in zip(model.parameters(), states, strict=True)
    ]
    assert not any(finer), "or nothing was tested"


def test_in_parts_it_is_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = net(), net()
    train(whole, optimizer_for(whole), 5)
    monkeypatch.setattr(masters_module, "AT_ONCE", 600)
    inner_steps = []
    optimizer = optimizer_for(parts)
    ordinary = optimizer._inner.step
    optimizer._inner.step = lambda: inner_steps.append(1) or ordinary()
    train(parts, optimizer, 5)
    assert len(inner_steps) == 5 * 2, "the first matrix is larger than a part, and the rest is one"
    assert_equal(whole, parts)


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_as_if_gradients_and_weights_were_fp32() -> None:
    """A step is exactly that of the optimizer on fp32 weights with the same gradients: decay, clipping and all."""
    model, wide = net(), net(torch.float32)
    options = {"weight_decay": 0.3, "lr": 0.01}
    optimizer, reference = optimizer_for(model, **options), AdamW(wide.parameters(), foreach=True, **options)
    for step in range(4):
        torch.manual_seed(step)
        for weight, other in zip(model.parameters(), wide.parameters(), strict=True):
            weight.grad = torch.randn_like(weight)
            other.grad = weight.grad.float()
        norms = [float(nn.utils.clip_grad_norm_(one.parameters(), 1.0)) for one in (model, wide)]
        assert norms[0] == pytest.approx(norms[1], rel=0.01)
        for weight, other in zip(model.parameters(), wide.parameters(), strict=True):
            other.grad = weight.grad.float()  # clipped in half precision
        optimizer.step()
        reference.step()
    for weight, other in zip(model.parameters(), wide.parameters(), strict=True):
        assert torch.equal(optimizer.state[weight][MASTER], other)


def test_rates_of_groups_and_their_schedule_reach_it() -> None:
    model = model_of("qwen3_vl").to(torch.bfloat16)
    groups = parameter_groups(model, learning_rate=1e-3, vit_lr=1e-4, aligner_lr=0.0, weight_decay=0.1)
    optimizer = make_optimizer(SGD, groups, {"lr": 1.0})
    assert {group["name"] for group in optimizer.param_groups} == {"language", "vision", "projector"}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for step in range(2):
        before = {weight: weight.detach().float() for group in optimizer.param_groups for weight in group["params"]}
        before = {weight: optimizer.state.get(weight, {}).get(MASTER, was).clone() for weight, was in before.items()}
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = torch.ones_like(weight)
        optimizer.step()
        for group in optimizer.param_groups:
            rate = {"language": 1e-3, "vision": 1e-4, "projector": 0.0}[group["name"]] * 0.5**step
            for weight in group["params"]:
                decayed = before[weight] * (1 - rate * group["weight_decay"])
                torch.testing.assert_close(optimizer.state[weight][MASTER], decayed - rate, rtol=1e-6, atol=1e-7)
        schedule.step()


# ---- which optimizers


def test_fp32_weights_are_their_own_masters() -> None:
    """Adapters are fp32 beside half-precision weights: they have no second copy."""
    half, wide, reference = (nn.Linear(8, 8).to(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float32))
    reference.load_state_dict(wide.state_dict())
    params = [*half.parameters(), *wide.parameters()]
    optimizer = make_optimizer(AdamW, [{"params": params}], {"lr": 0.01})
    plain = AdamW(reference.parameters(), lr=0.01)
    for weight in (*params, *reference.parameters()):
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    plain.step()
    assert all((MASTER in optimizer.state[weight]) == (weight.dtype == torch.bfloat16) for weight in params)
    assert_equal(wide, reference)


def test_only_fp32_weights_need_none() -> None:
    model = net(torch.float32)
    assert type(optimizer_for(model)) is AdamW
    assert type(optimizer_for(model, masters=True)) is AdamW


class Rounding(AdamW):
    """Stands for optimizers of other packages."""

    __module__ = "bitsandbytes.optim"


def test_optimizers_with_a_way_of_their_own_stay_as_they_are() -> None:
    groups = [{"params": list(net().parameters())}]
    assert type(make_optimizer(Rounding, groups, {"lr": RATE})) is Rounding
    with pytest.raises(ConfigError, match=r"master_weights(?s:.)*bitsandbytes\.optim\.Rounding"):
        make_optimizer(Rounding, groups, {"lr": RATE}, masters=True)


@pytest.mark.parametrize("kind", [Adagrad, LBFGS])
def test_nor_have_those_masters_that_begin_with_states_or_compute_losses(kind: type[Optimizer]) -> None:
    model = net()
    groups = [{"params": list(model.parameters())}]
    optimizer = make_optimizer(kind, groups, {"lr": 1e-3})
    assert type(optimizer) is kind
    with pytest.raises(ConfigError, match=f"master_weights(?s:.)*{kind.__name__}"):
        make_optimizer(kind, groups, {"lr": 1e-3}, masters=True)
    if kind is Adagrad:
        train(model, optimizer, 1)


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(10, 4, sparse=True).to(torch.bfloat16)
    optimizer = make_optimizer(SGD, [{"params": list(table.parameters())}], {"lr": 0.1})
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match="sparse gradients"):
        optimizer.step()


# ---- in the trainer


def half(**settings: Any) -> Any:
    return model_of(dropout=0.2, **settings).to(torch.bfloat16)


@pytest.mark.contract
def test_the_trainer_has_them_by_default(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(), tmp_path, half(), max_steps=2, save_strategy="no", learning_rate=1e-5)
    start = weights(trainer)
    trainer.train()
    optimizer = masters_of(trainer.optimizer)
    assert optimizer is not None
    moves = [
        (state[MASTER] - start_of(start, trainer, weight)).abs().max() for weight, state in optimizer.state.items()
    ]
    assert len(moves) == len(start)
    assert all(move > 0 for move in moves)
    plain = trainer_of(
        dataset(), tmp_path, half(), max_steps=1, save_strategy="no", parts={"step": StepSettings(master_weights=False)}
    )
    plain.train()
    assert masters_of(plain.optimizer) is None


def start_of(start: dict[str, Tensor], trainer: Any, weight: Tensor) -> Tensor:
    return next(start[name].float() for name, one in trainer.model.named_parameters() if one is weight)


def test_fp16_weights_that_learn_are_refused(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(), tmp_path, model_of().to(torch.float16))
    with pytest.raises(ConfigError, match=r"trainable fp16 weights(?s:.)*training\.fp16"):
        trainer.create_optimizer()
    for parts in ({}, {"method": "lora", "train_vision": True}, {"method": "lora", "train_projector": True}):
        with pytest.raises(ConfigError, match=r"model\.dtype(?s:.)*dtype: bf16"):
            ModelSettings(name="tiny:llama", dtype="fp16", **parts)


@pytest.mark.contract
def test_frozen_fp16_weights_have_fp32_adapters(tmp_path: Path) -> None:
    made = ready_model(
        ModelSettings(name="tiny:llama", method="lora", dtype="fp16"), TrainingSetup(method="lora"),
        device=torch.device("cpu"), packing=True, seed=0,
    )  # fmt: skip
    assert {weight.dtype for weight in made.model.parameters() if weight.requires_grad} == {torch.float32}
    assert {weight.dtype for weight in made.model.parameters() if not weight.requires_grad} == {torch.float16}


class Eight(AdamW):
    """Stands for 8-bit optimizers."""

    __module__ = "bitsandbytes.optim"

    def __init__(self, groups: Any, optim_bits: int, **options: Any) -> None:
        super().__init__(groups, **options)


@pytest.mark.contract
def test_embeddings_keep_fp32_states_as_with_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    manager = SimpleNamespace(register_module_override=lambda *one: said.append(one))
    package = ModuleType("bitsandbytes")
    package.optim = SimpleNamespace(GlobalOptimManager=SimpleNamespace(get_instance=lambda: manager))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bitsandbytes", package)
    for bits in (8, 32):
        chosen = (Eight, {"lr": RATE, "optim_bits": bits})
        trainer = trainer_of(dataset(), tmp_path, half(), parts={"optimizer_cls_and_kwargs": chosen})
        trainer.create_optimizer()
        ours, trainer.optimizer = list(said), None
        said.clear()
        Trainer.create_optimizer(trainer)
        assert ours == said
        assert bool(ours) == (bits == 8)
        said.clear()


@pytest.mark.contract
def test_resumed_in_half_precision_it_is_the_same_run(tmp_path: Path) -> None:
    """At a low rate: weights that are resumed without masters would be other ones soon."""
    given = {"learning_rate": 1e-4, "max_steps": 8}
    whole = trainer_of(dataset(), tmp_path / "whole", half(), **given)
    whole.train()
    again = trainer_of(dataset(), tmp_path / "again", half(), **given)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    assert losses(again) == losses(whole)
    assert same(weights(again), weights(whole))
    assert masters_equal(whole, again)


class Kill(TrainerCallback):
    """Ends the process without a word, in the middle of a step."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(folder: str, place: str, given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    parts = {"callbacks": [Kill()]}
    trainer_of(dataset(folder=Path(place)), Path(folder), half(), parts=parts, **given).train()


@pytest.mark.full
def test_killed_in_half_precision_and_resumed_it_is_the_same_run(tmp_path: Path) -> None:
    given = {"learning_rate": 1e-4, "max_steps": 6}
    dataset()
    process = process_of(train_until_killed, str(tmp_path / "killed"), str(shared() / "llama"), given)
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    whole = trainer_of(dataset(), tmp_path / "whole", half(), **given)
    whole.train()
    again = trainer_of(dataset(), tmp_path / "killed", half(), **given)
    again.train(resume_from_checkpoint=True)
    assert len(again.trained) == len(whole.trained) // 2
    assert losses(again) == losses(whole)
    assert same(weights(again), weights(whole))
    assert masters_equal(whole, again)


def masters_equal(one: Any, other: Any) -> bool:
    left, right = (masters_of(trainer.optimizer) for trainer in (one, other))
    pairs = zip(left.state.values(), right.state.values(), strict=True)
    return all(torch.equal(mine[MASTER], its[MASTER]) for mine, its in pairs)
