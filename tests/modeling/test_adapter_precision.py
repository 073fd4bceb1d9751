"""Adapters in the precision of the model: nothing is cast for them, and they stay so when they are loaded and saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from encoded import VISION, fresh_model, gradients, logits, loss_of, packed, sample
from torch import Tensor

from packtrain.modeling.adapters import set_trainable
from packtrain.modeling.export import save_final
from packtrain.modeling.load import load_model
from packtrain.modeling.model_parts import decoder_layers
from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.vision import checkpoint_parts

HALF, WIDE = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def settings(method: str = "lora", **given: Any) -> ModelSettings:
    return ModelSettings(name="tiny:here", method=method, lora_rank=4, **given)  # type: ignore[arg-type]


def adapted(
    family: str = "llama", method: str = "lora", *, half: bool = True, dtype: torch.dtype = HALF, **given: Any
) -> Any:
    model = fresh_model(family).to(dtype).train()
    torch.manual_seed(0)
    return set_trainable(model, settings(method, **given), half_adapters=half)


def shaken(model: Any) -> Any:
    """As if it had learned."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in adapters(model).values():
            weight.add_(0.05 * torch.randn_like(weight))
    return model


def adapters(model: Any) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.named_parameters() if "lora_" in name}


def types(model: Any) -> set[torch.dtype]:
    return {weight.dtype for weight in adapters(model).values()}


def batch_of(family: str, dtype: torch.dtype = HALF) -> Any:
    return packed(family, sample(family, *(("image",) if family in VISION else ()), seed=1), dtype=dtype)


# ---- which they have


@pytest.mark.contract
def test_they_are_as_the_weights_where_masters_are_promised() -> None:
    assert types(adapted()) == {HALF}
    assert types(adapted(dtype=torch.float16)) == {torch.float16}
    assert types(adapted(dtype=WIDE)) == {WIDE}
    assert types(adapted(half=False)) == {WIDE}
    assert types(adapted(method="dora")) == {WIDE}, "norms of weights are too coarse in half precision"


@pytest.mark.contract
def test_they_begin_where_fp32_ones_begin() -> None:
    half, wide = adapters(adapted()), adapters(adapted(half=False))
    assert all(torch.equal(half[name].float(), wide[name]) for name in wide)
    assert any(weight.abs().max() > 0 for weight in half.values())


def test_parts_that_are_trained_whole_stay_as_they_are() -> None:
    model = adapted("qwen3_vl", train_projector=True)
    assert {weight.dtype for weight in model.parameters() if weight.requires_grad} == {HALF}


# ---- what they keep


def wide_inputs(model: Any, batch: Any) -> list[tuple[str, Tensor]]:
    """What adapted matrices of the decoder keep in fp32 for the backward pass, as wide as a row."""
    running, found, known = [""], dict[int, tuple[str, Tensor]](), {id(weight) for weight in model.parameters()}
    for name, module in decoder_layers(model).named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: running.append(name))
        module.register_forward_hook(lambda *_: (running.pop(), None)[1])

    def keep(tensor: Tensor) -> Tensor:
        of_matrix = "_proj" in running[-1] and id(tensor) not in known
        if of_matrix and tensor.dtype == WIDE and tensor.numel() >= batch["input_ids"].numel():
            found.setdefault(tensor.untyped_storage()._cdata, (running[-1], tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(model, batch)
    loss.backward()
    assert all(weight.grad is not None for weight in adapters(model).values())
    return list(found.values())


@pytest.mark.contract
@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_no_input_of_a_matrix_is_kept_in_fp32(family: str) -> None:
    batch = batch_of(family)
    assert not wide_inputs(adapted(family), batch)
    wide = wide_inputs(adapted(family, half=False), batch)
    matrices = len(adapters(adapted(family))) // 2
    assert len(wide) >= matrices, "each casts its own, or nothing was tested"


@pytest.mark.contract
@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_recomputed_layers_give_the_same_gradients(family: str) -> None:
    batch, found = batch_of(family), list[dict[str, Tensor]]()
    for recompute in (False, True):
        model = shaken(adapted(family))
        checkpoint_parts(model, language=recompute, vision=False)
        loss_of(model, batch).backward()
        found.append(gradients(model))
    assert set(found[0]) == set(adapters(model)) == set(found[1])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert all(one.dtype == HALF and one.abs().max() > 0 for one in found[0].values())


# ---- loaded and saved


@pytest.mark.contract
def test_loading_does_not_replace_them(tmp_path: Path) -> None:
    """As Trainer resumes: peft would make them fp32, and others than the optimizer has."""
    model = shaken(adapted())
    model.save_pretrained(str(tmp_path))
    again = adapted()
    before = adapters(again)
    again.load_adapter(str(tmp_path), "default", is_trainable=True)
    after = adapters(again)
    assert all(after[name] is before[name] for name in before)
    assert all(torch.equal(weight, adapters(model)[name]) for name, weight in after.items())
    assert types(again) == {HALF}
    del again.base_model._cast_adapter_dtype
    again.load_adapter(str(tmp_path), "default", is_trainable=True)
    assert types(again) == {WIDE}, "peft leaves them alone now: keep_adapter_precision is not needed any more"


@pytest.mark.contract
def test_saved_adapters_come_back_on_the_original(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model, batch = shaken(adapted()).eval(), batch_of("llama")
    save_final(model, tmp_path / "final")
    again = peft.PeftModel.from_pretrained(fresh_model("llama").to(HALF), str(tmp_path / "final"))
    exact = fresh_model("llama").to(HALF).float()
    exact = peft.PeftModel.from_pretrained(exact, str(tmp_path / "final"))
    with torch.no_grad():
        wanted, found, plain = (logits(one, batch).float() for one in (model, again, fresh_model("llama").to(HALF)))
        reference = logits(exact, batch)
    assert types(again) == {WIDE}, "as peft makes them"
    assert all(torch.equal(weight, adapters(model)[name].float()) for name, weight in adapters(again).items())
    error, learned = (float((one - reference).abs().max()) for one in (wanted, plain))
    assert float((found - wanted).abs().max()) <= 2 * error
    assert error < 0.1 * learned, "nothing was learned, so nothing was tested"


@pytest.mark.contract
@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_merged_they_are_the_weights_rounded_once(family: str, tmp_path: Path) -> None:
    model, batch = shaken(adapted(family)).eval(), batch_of(family)
    save_final(model, tmp_path / "final", merge_adapters=True)
    again = load_model(str(tmp_path / "final"), dtype=HALF).state_dict()
    matrices = 0
    for name, module in model.base_model.model.named_modules():
        if hasattr(module, "lora_A"):
            up, down = (getattr(module, f"lora_{side}")["default"].weight.detach().float() for side in "BA")
            wanted = module.base_layer.weight.detach().float() + module.scaling["default"] * (up @ down)
            assert torch.equal(again[f"{name}.weight"], wanted.to(HALF))
            assert not torch.equal(again[f"{name}.weight"], module.base_layer.weight)
            matrices += 1
    assert matrices == len(adapters(model)) // 2
    with torch.no_grad():
        wanted, untrained = (logits(one, batch).float() for one in (model, fresh_model(family).to(HALF)))
        found = logits(load_model(str(tmp_path / "final"), dtype=HALF), batch).float()
    assert float((found - wanted).abs().max()) < 0.1 * float((untrained - wanted).abs().max())


# ---- in 4 bits


def test_beside_four_bits_they_have_the_type_that_is_computed_in(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    batch = batch_of("llama")
    for half in (True, False):
        model = load_model("tiny:llama", cache_dir=tmp_path, quantize=True, dtype=HALF, seed=3)
        torch.manual_seed(0)
        model = set_trainable(model, settings("qlora"), half_adapters=half).train()
        assert types(model) == {HALF if half else WIDE}
        assert bool(wide_inputs(model, batch)) != half
        assert all(weight.grad.dtype == weight.dtype for weight in adapters(model).values() if weight.grad is not None)
