"""What a checkpoint has is what a model gets: every weight of every family, or an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from encoded import TEXT_ONLY, VISION, fresh_model
from safetensors.torch import load_file, save_file

from packtrain.core.errors import ArtifactError
from packtrain.modeling.load import reload_weights
from packtrain.modeling.preparation import prepare_model

pytestmark = pytest.mark.contract
FAMILIES = (*VISION, *TEXT_ONLY)
NAME = "model.safetensors"


def saved(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model that has learned something, and its folder."""
    model = fresh_model(family).to(dtype)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.rand_like(weight)
    model.save_pretrained(folder)
    return model


def same(one: Any, other: Any) -> bool:
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_comes_back(tmp_path: Path, family: str) -> None:
    model, again = saved(family, tmp_path), fresh_model(family)
    prepare_model(again, attn_implementation="sdpa")
    assert not same(model, again)
    reload_weights(again, tmp_path)
    assert same(model, again)


def test_trainers_own_way_would_leave_weights_as_they_are(tmp_path: Path) -> None:
    """The trap itself: once it is gone, so can be what avoids it."""
    model, again = saved("qwen2_5_vl", tmp_path), fresh_model("qwen2_5_vl")
    again.load_state_dict(load_file(tmp_path / NAME), strict=False)
    assert not same(model, again)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nothing_is_rounded_whatever_the_config_says(tmp_path: Path, dtype: torch.dtype) -> None:
    model = saved("qwen2_5_vl", tmp_path, dtype)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    again = fresh_model("qwen2_5_vl").to(dtype)
    reload_weights(again, tmp_path)
    assert same(model, again)
    assert again.dtype == dtype


def test_weights_of_two_kinds_stay_what_they_are(tmp_path: Path) -> None:
    model, again = fresh_model("llama"), fresh_model("llama")
    for one in (model, again):
        one.lm_head.to(torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            weight += torch.rand_like(weight)
    model.save_pretrained(tmp_path)
    reload_weights(again, tmp_path)
    assert same(model, again)
    assert again.lm_head.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("fault", ["one is missing", "one too many", "another shape", "cut", "none"])
def test_anything_less_is_an_error(tmp_path: Path, fault: str) -> None:
    saved("qwen2_5_vl", tmp_path)
    path = tmp_path / NAME
    weights = load_file(path)
    name = "visual.merger.mlp.0.weight"
    if fault == "one is missing":
        del weights[name]
    elif fault == "one too many":
        weights["visual.other.weight"] = torch.zeros(3)
    elif fault == "another shape":
        weights[name] = weights[name][1:].clone()
    save_file(weights, path, metadata={"format": "pt"})
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "none":
        path.unlink()
    model, before = fresh_model("qwen2_5_vl"), fresh_model("qwen2_5_vl")
    with pytest.raises(ArtifactError, match="all of them") as error:
        reload_weights(model, tmp_path)
    assert str(tmp_path) in str(error.value)
    assert same(model, before), "nothing was changed"


def test_adapters_are_not_taken_for_weights(tmp_path: Path) -> None:
    """The error is about the checkpoint, not about the model that its adapters belong to."""
    peft = pytest.importorskip("peft")
    saved("llama", tmp_path / "base")
    adapted = peft.get_peft_model(fresh_model("llama"), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(tmp_path / "checkpoint")
    model, before = fresh_model("llama"), fresh_model("llama")
    with pytest.raises(ArtifactError, match=r"adapters .*of a run that trained only them") as error:
        reload_weights(model, tmp_path / "checkpoint")
    assert str(tmp_path / "base") not in str(error.value)
    assert same(model, before)
