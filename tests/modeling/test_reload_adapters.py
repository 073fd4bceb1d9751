"""What a checkpoint has is what adapters get: all of them, made as they are made here, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from encoded import TEXT_ONLY, VISION, fresh_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from packtrain.core.errors import ArtifactError
from packtrain.modeling.adapters import set_trainable
from packtrain.modeling.load import reload_adapters
from packtrain.modeling.model_settings import ModelSettings

pytestmark = pytest.mark.contract
pytest.importorskip("peft")
NAME = "adapter_model.safetensors"


def adapted(family: str = "llama", *, dtype: torch.dtype = torch.float32, **given: Any) -> Any:
    torch.manual_seed(0)
    options = {"method": "lora", "lora_rank": 4, **given}
    return set_trainable(fresh_model(family).to(dtype), ModelSettings(name="tiny:here", **options), half_adapters=True)


def saved(folder: Path, family: str = "llama", **given: Any) -> Any:
    """A model whose adapters have learned something, and its folder."""
    model = adapted(family, **given)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight += torch.rand_like(weight)
    model.save_pretrained(folder)
    return model


def weights(model: Any) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


QUICK = ("llama", "gemma3_text", "qwen2_5_vl", "qwen3_vl")
FAMILIES = [f if f in QUICK else pytest.param(f, marks=pytest.mark.more) for f in (*VISION, *TEXT_ONLY)]


@pytest.mark.parametrize("method", ["lora", "dora"])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_them_come_back(tmp_path: Path, family: str, method: str) -> None:
    """With what is trained whole beside them; they stay the parameters that an optimizer knows."""
    chosen: dict[str, Any] = {"method": method, "train_projector": True if family in VISION else None}
    model, again = saved(tmp_path, family, **chosen), adapted(family, **chosen).train()
    before = {name: (id(weight), weight.requires_grad) for name, weight in again.named_parameters()}
    assert not same(weights(model), weights(again))
    reload_adapters(again, tmp_path)
    assert same(weights(model), weights(again))
    assert before == {name: (id(weight), weight.requires_grad) for name, weight in again.named_parameters()}
    assert again.training


def test_they_keep_their_precision(tmp_path: Path) -> None:
    model, again = saved(tmp_path, dtype=torch.bfloat16), adapted(dtype=torch.bfloat16)
    reload_adapters(again, tmp_path)
    assert same(weights(model), weights(again))
    assert {weight.dtype for weight in again.parameters()} == {torch.bfloat16}


def test_several_adapters_of_one_model(tmp_path: Path) -> None:
    """Each has its own folder; which one is used stays as it is."""
    made = []
    for number in (1, 2):
        model = adapted()
        model.add_adapter("other", model.peft_config["default"])
        if number == 1:
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    if "lora_" in name:
                        weight += torch.rand_like(weight)
            model.save_pretrained(tmp_path)
        made.append(model)
    reload_adapters(made[1], tmp_path)
    assert same(weights(made[0]), weights(made[1]))
    assert made[1].active_adapters == ["default"]


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape", "a part is missing", "cut", "none", "no config"])
def test_anything_less_is_an_error(tmp_path: Path, fault: str) -> None:
    whole = {"train_projector": True}
    saved(tmp_path, "qwen3_vl", **whole)
    path = tmp_path / NAME
    found = load_file(path)
    adapter = next(name for name in found if "lora_A" in name)
    part = next(name for name in found if "merger" in name)
    if fault == "missing":
        del found[adapter]
    elif fault == "unexpected":
        found[adapter.replace(".0.", ".99.")] = found[adapter].clone()
    elif fault == "shape":
        found[adapter] = found[adapter][1:].clone()
    elif fault == "a part is missing":
        del found[part]
    save_file(found, path, metadata={"format": "pt"})
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "none":
        path.unlink()
    elif fault == "no config":
        (tmp_path / "adapter_config.json").unlink()
    named = {
        "missing": "missing: .*lora_A",
        "unexpected": r"unexpected: .*\.99\.",
        "shape": "RuntimeError",
        "a part is missing": "merger",
        "cut": "SafetensorError",
        "none": "no adapter_model.safetensors",
        "no config": "no adapter_config.json",
    }
    with pytest.raises(ArtifactError, match=named[fault]) as error:
        reload_adapters(adapted("qwen3_vl", **whole), tmp_path)
    assert str(tmp_path) in str(error.value)
    assert "all of them" in str(error.value)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({}, {"lora_rank": 8, "lora_alpha": 8}, "r 4 instead of 8"),
        ({}, {"lora_alpha": 16}, "lora_alpha 8 instead of 16"),
        ({}, {"method": "dora"}, "use_dora"),
        ({"method": "dora"}, {}, "use_dora"),
        ({}, {"lora_target_modules": ("v_proj",)}, "target_modules"),
        ({"lora_target_modules": ("v_proj", "q_proj")}, {"lora_target_modules": ("v_proj",)}, "target_modules"),
        ({"train_projector": True}, {}, "modules_to_save"),
        ({}, {"train_projector": True}, "modules_to_save"),
    ],
)
def test_adapters_that_were_made_otherwise_are_refused(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], named: str
) -> None:
    """By name, before anything is read: peft would take what fits and leave the rest."""
    saved(tmp_path, "qwen3_vl", **before)
    model = adapted("qwen3_vl", **now)
    untouched = weights(model)
    with pytest.raises(ArtifactError, match=named):
        reload_adapters(model, tmp_path)
    assert same(weights(model), untouched)


def test_the_order_of_names_does_not_matter(tmp_path: Path) -> None:
    saved(tmp_path, lora_target_modules=("v_proj", "q_proj"))
    path = tmp_path / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "target_modules": sorted(config["target_modules"], reverse=True)}))
    reload_adapters(adapted(lora_target_modules=("q_proj", "v_proj")), tmp_path)


def test_whole_weights_are_not_taken_for_adapters(tmp_path: Path) -> None:
    fresh_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="whole weights, of a run without adapters"):
        reload_adapters(adapted(), tmp_path)
