"""Parameter groups: every trained parameter in exactly one, with the rate of its part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from encoded import TEXT_ONLY, VISION, fresh_model
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from packtrain.core.errors import ConfigError
from packtrain.modeling.adapters import describe_trainable, set_trainable
from packtrain.modeling.model_parts import PARTS, part_of_weight
from packtrain.modeling.model_settings import ModelSettings
from packtrain.training.optimizers import parameter_groups

RATES = {"learning_rate": 1e-3, "vit_lr": 2e-4, "aligner_lr": 5e-4}
RATE_OF = {"language": 1e-3, "vision": 2e-4, "projector": 5e-4}


def settings(**given: Any) -> ModelSettings:
    return ModelSettings(name="tiny:here", lora_rank=2, **given)


def check(model: Any, groups: list[dict[str, Any]], rates: dict[str, float], decay: float) -> None:
    """A partition of what is trained, with the rate of each part."""
    names = {id(weight): name for name, weight in model.named_parameters()}
    placed = [id(weight) for group in groups for weight in group["params"]]
    assert len(placed) == len(set(placed))
    assert set(placed) == {id(weight) for weight in model.parameters() if weight.requires_grad}
    assert len({(group["name"], group["weight_decay"] > 0) for group in groups}) == len(groups)
    for group in groups:
        assert group["lr"] == rates[group["name"]]
        assert group["weight_decay"] in (0.0, decay)
        for weight in group["params"]:
            name = names[id(weight)]
            assert part_of_weight(name) == group["name"]
            assert group["weight_decay"] == 0.0 or weight.ndim > 1, "neither biases nor norms, whatever they are called"


@pytest.mark.contract
@pytest.mark.parametrize("family", [*VISION, *TEXT_ONLY])
def test_a_rate_for_each_part(family: str) -> None:
    model = set_trainable(fresh_model(family), settings())
    rates = RATES if family in VISION else {"learning_rate": 1e-3}
    groups = parameter_groups(model, **rates, weight_decay=0.1)
    check(model, groups, RATE_OF, 0.1)
    assert {group["name"] for group in groups} == ({*PARTS} if family in VISION else {"language"})
    assert any(group["weight_decay"] == 0.0 for group in groups)
    assert any(group["weight_decay"] == 0.1 for group in groups)


@examples(max_examples=40, deadline=None)
@given(
    family=st.sampled_from(("qwen3_vl", "llava_next", "gemma3")),
    method=st.sampled_from(("full", "lora", "dora")),
    parts=st.sets(st.sampled_from(PARTS), min_size=1),
    rates=st.fixed_dictionaries({name: st.none() | st.floats(0, 1) for name in ("vit_lr", "aligner_lr")}),
    decay=st.sampled_from((0.0, 0.1)),
)
def test_whatever_learns_is_in_one_group(
    family: str, method: str, parts: set[str], rates: dict[str, float | None], decay: float
) -> None:
    chosen = {f"train_{name}": name in parts for name in PARTS}
    model = set_trainable(fresh_model(family), settings(method=method, **chosen))
    learning = {part.name for part in describe_trainable(model) if part.trained}
    assert learning == parts
    asked = {"vision": rates["vit_lr"], "projector": rates["aligner_lr"]}
    if any(rate is not None and name not in parts for name, rate in asked.items()):
        with pytest.raises(ConfigError, match="frozen"):
            parameter_groups(model, learning_rate=0.5, **rates, weight_decay=decay)
        return
    groups = parameter_groups(model, learning_rate=0.5, **rates, weight_decay=decay)
    expected = {"language": 0.5, **{name: 0.5 if rate is None else rate for name, rate in asked.items()}}
    if decay:
        check(model, groups, expected, decay)
    else:
        assert sum(len(group["params"]) for group in groups) == sum(p.requires_grad for p in model.parameters())
        assert all(group["weight_decay"] == 0.0 for group in groups)


def test_decay_is_where_trainer_puts_it() -> None:
    from transformers import Trainer

    model = set_trainable(fresh_model("qwen3_vl"), settings())
    groups = parameter_groups(model, learning_rate=1.0, weight_decay=0.1)
    names = {id(weight): name for name, weight in model.named_parameters()}
    decaying = {names[id(weight)] for group in groups if group["weight_decay"] for weight in group["params"]}
    everything = set(names.values())
    assert decaying == everything & set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    assert 0 < len(decaying) < len(everything)


def test_wrapped_models_have_the_same_groups() -> None:
    """Names differ inside DDP and compiled models, parts do not."""

    class Wrapped(torch.nn.Module):
        def __init__(self, module: Any) -> None:
            super().__init__()
            self.module = module

    model = set_trainable(fresh_model("qwen3_vl"), settings(method="lora", train_projector=True))
    options = {"learning_rate": 1.0, "aligner_lr": 0.5, "weight_decay": 0.1}
    plain, wrapped = parameter_groups(model, **options), parameter_groups(Wrapped(model), **options)
    assert [(group["name"], group["lr"], list(map(id, group["params"]))) for group in plain] == [
        (group["name"], group["lr"], list(map(id, group["params"]))) for group in wrapped
    ]


def test_sharded_parameters_are_grouped_the_same(tmp_path: Path) -> None:
    model = set_trainable(fresh_model("qwen3_vl"), settings())
    options = {**RATES, "weight_decay": 0.1}
    plain = [
        (group["name"], group["weight_decay"], len(group["params"])) for group in parameter_groups(model, **options)
    ]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in (*model.model.language_model.layers, *model.model.visual.blocks, model):
            fully_shard(layer, mesh=mesh)
        groups = parameter_groups(model, **options)
        assert all(isinstance(weight, DTensor) for group in groups for weight in group["params"])
        assert [(group["name"], group["weight_decay"], len(group["params"])) for group in groups] == plain
        check(model, groups, RATE_OF, 0.1)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        torch.optim.AdamW(groups).step()
    finally:
        dist.destroy_process_group()


def test_an_optimizer_moves_each_part_at_its_rate() -> None:
    model = set_trainable(fresh_model("gemma3"), settings())
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.SGD(parameter_groups(model, **RATES))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        step = (before[name] - weight).detach().mean()
        assert float(step) == pytest.approx(RATE_OF[part_of_weight(name)], rel=1e-3)


@pytest.mark.parametrize(
    ("family", "given", "rates", "message"),
    [
        ("gemma3", {"train_vision": False}, {"vit_lr": 1e-5}, "the vision part is frozen"),
        ("gemma3", {"method": "lora"}, {"aligner_lr": 1e-5}, "set train_projector: true"),
        ("llama", {}, {"vit_lr": 1e-5}, "no vision encoder"),
    ],
)
def test_a_rate_of_what_does_not_learn_is_refused(
    family: str, given: dict[str, Any], rates: dict[str, float], message: str
) -> None:
    model = set_trainable(fresh_model(family), settings(**given))
    with pytest.raises(ConfigError, match=message):
        parameter_groups(model, learning_rate=1e-3, **rates)
