"""What is changed on a model stands in one list, and can be taken off again."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

import packtrain
from packtrain.modeling.adapters import set_trainable
from packtrain.modeling.attention import set_attention
from packtrain.modeling.chunked_loss import ChunkedLoss
from packtrain.modeling.compiled import compile_layers
from packtrain.modeling.host_sync import avoid_host_sync
from packtrain.modeling.load import load_model
from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.patches import PATCHES, patches_of, take_off
from packtrain.modeling.preparation import prepare_model
from packtrain.modeling.vision import split_vision, use_patch_matmul

SOURCE = Path(packtrain.__file__).parent
_KEPT = {"_packtrain_patches", "_loss_function"}  # the second is the same function as before
_CHANGES = ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook")


def state(model: Any) -> list[Any]:
    """What each module has of its own, and what runs beside it."""
    return [
        (name, sorted(set(one.__dict__) - _KEPT), len(one._forward_pre_hooks), one._compiled_call_impl)
        for name, one in model.named_modules()
    ]


def test_a_model_is_as_it_was_when_all_are_taken_off(tmp_path: Path) -> None:
    model = load_model("tiny:qwen3_vl", cache_dir=tmp_path)
    before = state(model)
    prepare_model(model, attn_implementation="sdpa")
    avoid_host_sync(model)
    use_patch_matmul(model)
    compile_layers(model)
    split_vision(model, 64)
    ChunkedLoss.install(model, chunk=8)
    assert state(model) != before
    names = patches_of(model)
    assert set(names) == set(PATCHES) - {"rope", "four_bits", "adapter_precision"}, "else not all of them were tried"
    split_vision(model, 32)  # in place of the one before
    ChunkedLoss.install(model, chunk=4)
    set_attention(model, "sdpa", prepared_contract(model))
    assert patches_of(model) == names
    for module in model.modules():
        for name in PATCHES:
            take_off(module, name)
    assert state(model) == before
    assert not patches_of(model)


def prepared_contract(model: Any) -> Any:
    from packtrain.families.contracts import contract_for

    return contract_for(model.config.to_dict())


def test_adapters_that_are_loaded_keep_their_precision_until_it_is_taken_off(tmp_path: Path) -> None:
    model = load_model("tiny:llama", cache_dir=tmp_path, dtype=torch.bfloat16)
    adapted = set_trainable(model, ModelSettings(name="tiny:llama", method="lora"), half_adapters=True)
    assert patches_of(adapted) == {"adapter_precision": 1}
    take_off(adapted.base_model, "adapter_precision")
    assert "_cast_adapter_dtype" not in adapted.base_model.__dict__


@pytest.mark.parametrize("folder", ["modeling", "training", "delivery"])
def test_nothing_is_changed_that_is_not_in_the_list(folder: str) -> None:
    """Methods of modules that are replaced, and hooks."""
    allowed = {one.module for one in PATCHES.values()} | {"stopwatch"}  # which takes its hooks away after each step
    changing = set()
    for path in (SOURCE / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            hooked = isinstance(node, ast.Attribute) and node.attr in _CHANGES
            replaced = isinstance(node, ast.Assign) and any(
                isinstance(one, ast.Attribute) and one.attr in ("forward", "loss_function") for one in node.targets
            )
            changing |= {path.stem} if hooked or replaced else set()
    assert changing <= allowed
    assert folder != "modeling" or len(changing) >= 4, "else nothing was found"


def test_each_patch_is_put_by_the_module_that_the_list_names() -> None:
    for name, patch in PATCHES.items():
        text = (SOURCE / "modeling" / f"{patch.module}.py").read_text(encoding="utf-8")
        assert f', "{name}", ' in text, f"{patch.module} does not put {name}"
        assert all((patch.what, patch.why, patch.until))
