"""What is changed on a model stands in one list, and can be taken off again."""

from __future__ import annotations

import ast
from collections import Counter
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from inspect import getsource
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
from packtrain.modeling.patches import PATCHES, PROCESS_PATCHES, is_on, take_off
from packtrain.modeling.preparation import prepare_model
from packtrain.modeling.vision import checkpoint_parts, split_vision, use_patch_matmul

SOURCE = Path(packtrain.__file__).parent
_KEPT = {"_packtrain_patches", "_loss_function"}  # the second is the same function as before
_REPLACED = ("forward", "loss_function", "gradient_checkpointing", "_gradient_checkpointing_func", "dynamic_sources")
_CHANGES = ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook")


# What upstream still does, and a piece of the source that does it: a patch goes when its piece has gone.
QWEN = "transformers.models.qwen3_vl.modeling_qwen3_vl:Qwen3VL"
STILL_NEEDED = {
    "boundaries": (f"{QWEN}VisionAttention.forward", "cu_seq_lens_q=cu_seqlens"),
    "rope": ("transformers.modeling_rope_utils:dynamic_rope_update", "max_seq_len_cached:  # growth"),
    "host_sync": (f"{QWEN}Model.get_placeholder_mask", "n_image_tokens = special_image_mask.sum()"),
    "checkpointing": (
        "transformers.modeling_utils:PreTrainedModel._set_gradient_checkpointing",
        "for module in self.modules():",
    ),
    "patch_matmul": (f"{QWEN}VisionPatchEmbed.__init__", "nn.Conv3d("),
    "chunked_loss": ("transformers.loss.loss_utils:ForCausalLMLoss", "logits = logits.float()"),
    "compiled": ("transformers.modeling_layers:GradientCheckpointingLayer", "self._gradient_checkpointing_func("),
    "four_bits": ("bitsandbytes.nn:Linear4bit.__init__", "support_avx512bf16_for_cpu"),
    "adapter_precision": ("peft.tuners.tuners_utils:cast_adapter_dtype", "submodule[adapter_name] = "),
    "_mark_longest_dynamic": ("torch.compiler.config", "dynamic_sources"),
    "_try_graphs_in_order": ("torch._C._dynamo.eval_frame", "_set_lru_cache"),
}


def state(model: Any) -> list[Any]:
    """What each module has of its own, and what runs beside it."""
    return [
        (name, sorted(set(one.__dict__) - _KEPT), len(one._forward_pre_hooks), one._compiled_call_impl)
        for name, one in model.named_modules()
    ]


def patches_of(model: Any) -> dict[str, int]:
    """The patches that are on a model, with the number of modules."""
    return dict(Counter(name for module in model.modules() for name in PATCHES if is_on(module, name)))


def test_a_model_is_as_it_was_when_all_are_taken_off(tmp_path: Path) -> None:
    model = load_model("tiny:qwen3_vl", cache_dir=tmp_path)
    before = state(model)
    prepare_model(model, attn_implementation="sdpa")
    avoid_host_sync(model)
    use_patch_matmul(model)
    compile_layers(model)
    split_vision(model, 64)
    checkpoint_parts(model, language=True, vision=True)
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
                isinstance(one, ast.Attribute) and one.attr in _REPLACED for one in node.targets
            )
            changing |= {path.stem} if hooked or replaced else set()
    assert changing <= allowed
    assert folder != "modeling" or len(changing) >= 4, "else nothing was found"


def test_each_patch_is_put_by_the_module_that_the_list_names() -> None:
    for name, patch in PATCHES.items():
        text = (SOURCE / "modeling" / f"{patch.module}.py").read_text(encoding="utf-8")
        assert f', "{name}", ' in text, f"{patch.module} does not put {name}"
    for function, patch in PROCESS_PATCHES.items():
        assert hasattr(import_module(f"packtrain.modeling.{patch.module}"), function)


@pytest.mark.contract
@pytest.mark.parametrize("name", [*PATCHES, *PROCESS_PATCHES])
def test_upstream_still_needs_the_patch(name: str) -> None:
    """Fails with the release that no longer has the cause: then look whether the patch can go."""
    patch = {**PATCHES, **PROCESS_PATCHES}[name]
    assert (patch.until is None) == (name not in STILL_NEEDED), "what stays until something changes says what"
    if patch.until is None:
        return
    package, _ = patch.against.split()
    place, cause = STILL_NEEDED[name]
    module, _, path = place.partition(":")
    pytest.importorskip(package)
    value: Any = import_module(module)
    for part in path.split(".") if path else ():
        value = getattr(value, part)
    assert hasattr(value, cause) if not path else cause in getsource(value), patch.until


@pytest.mark.contract
@pytest.mark.parametrize("against", sorted({one.against for one in (*PATCHES.values(), *PROCESS_PATCHES.values())}))
def test_the_list_was_checked_against_what_is_installed(against: str) -> None:
    """A newer release: read the list with it, and then put it there."""
    package, newest = against.split()
    try:
        installed = version(package)
    except PackageNotFoundError:
        pytest.skip(f"{package} is not installed")
    assert release(installed) <= release(newest)


def release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
