"""What learns: the parts that were asked for and nothing else, as whole parts or with adapters beside them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from encoded import TEXT_ONLY, VISION, contract, fresh_model, gradients, logits, loss_of, packed, sample
from torch import Tensor, nn

from packtrain.core.errors import ConfigError
from packtrain.modeling.adapters import decoder_linear_pattern, describe_trainable, set_trainable
from packtrain.modeling.load import keep_four_bits, load_model, quiet_libraries
from packtrain.modeling.model_parts import PARTS, decoder_layers, model_parts, part_of_weight
from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.preparation import prepare_model
from packtrain.modeling.vision import add_empty_media_hook, checkpoint_parts, split_vision
from packtrain.predicting.weights import part_of

SLOW = ("idefics3", "smolvlm", "llava_onevision", "internvl")
FAMILIES = [pytest.param(family, marks=pytest.mark.more) if family in SLOW else family for family in VISION]


def settings(**given: Any) -> ModelSettings:
    return ModelSettings(name="tiny:here", **{"lora_rank": 4, **given})


def batch_of(family: str) -> Any:
    media = ("image",) if family in VISION else ()
    return packed(family, sample(family, *media, seed=1))


def moved(model: Any, batch: Any, *, steps: int = 1) -> set[str]:
    """The parts whose weights are others after some optimizer steps."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.SGD(weights, lr=1e-2)
    for _ in range(steps):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {part_of_weight(name) for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}


# ---- parts


@pytest.mark.parametrize("family", [*VISION, *TEXT_ONLY])
def test_every_weight_belongs_to_one_part(family: str) -> None:
    """The parts that modules show are the parts that checkpoints are counted by."""
    model = fresh_model(family)
    parts = model_parts(model)
    of_encoder = {id(p) for p in parts.vision.parameters()} if parts.vision is not None else set()
    beside = {id(p) for p in parts.projector()}
    found = dict.fromkeys(PARTS, 0)
    for name, weight in model.named_parameters():
        part = part_of_weight(name)
        found[part] += weight.numel()
        assert (part == "language") == (part_of(name) in ("embedding", "layers", "head"))
        if part == "language":
            assert id(weight) not in of_encoder | beside
        elif part == "vision":
            assert id(weight) in of_encoder
        else:
            assert id(weight) in beside or "merger" in name
    assert all((found[name] > 0) == (family in VISION) for name in ("vision", "projector"))
    described = describe_trainable(model)
    assert {part.name: part.weights for part in described} == {name: size for name, size in found.items() if size}


@pytest.mark.parametrize("family", ["qwen3_vl", "llava_next", "gemma3"])
@pytest.mark.parametrize("whole", [("language",), ("vision",), ("projector",), ("vision", "projector"), PARTS])
def test_only_the_chosen_parts_move(family: str, whole: tuple[str, ...]) -> None:
    chosen = {f"train_{name}": name in whole for name in PARTS}
    model = set_trainable(fresh_model(family).train(), settings(**chosen))
    described = describe_trainable(model)
    assert {part.name for part in described if part.trained} == set(whole)
    assert moved(model, batch_of(family)) == set(whole)


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_learns_gets_gradients(family: str) -> None:
    """Also in a batch of text: no rank waits for a gradient that does not come."""
    model = set_trainable(fresh_model(family).train(), settings())
    learning = {name for name, weight in model.named_parameters() if weight.requires_grad}
    loss_of(model, batch_of(family)).backward()
    assert set(gradients(model)) == learning
    model.zero_grad()
    add_empty_media_hook(model, contract(family))
    loss_of(model, packed(family, sample(family))).backward()
    assert set(gradients(model)) == learning


def test_layers_behind_the_features_are_frozen() -> None:
    """LLaVA takes the features before the last layer: nothing that follows can learn."""
    model = fresh_model("llava").train()
    loss_of(model, batch_of("llava")).backward()
    unreached = {name for name, weight in model.named_parameters() if weight.grad is None}
    assert len(unreached) > 10
    model = set_trainable(fresh_model("llava"), settings())
    assert {name for name, weight in model.named_parameters() if not weight.requires_grad} == unreached
    beside = set_trainable(fresh_model("llava"), settings(method="lora", train_vision=True))
    trained = {name for name, weight in beside.named_parameters() if weight.requires_grad and "lora_" not in name}
    names = {name.replace("base_model.model.", "").replace(".modules_to_save.default", "") for name in trained}
    assert len(names) > 10
    assert not names & unreached


# ---- adapters


@pytest.mark.contract
@pytest.mark.parametrize("family", [*VISION, *TEXT_ONLY])
def test_adapters_are_on_the_matrices_of_the_decoder_only(family: str) -> None:
    model = set_trainable(fresh_model(family), settings(method="lora"))
    inside = {id(module) for module in decoder_layers(model).modules()}
    adapted = [module for module in model.modules() if hasattr(module, "lora_A")]
    assert all(id(module) in inside for module in adapted)
    plain = [module for module in decoder_layers(fresh_model(family)).modules() if isinstance(module, nn.Linear)]
    assert len(adapted) == len(plain) > 0
    (learning,) = [part for part in describe_trainable(model) if part.trained]
    assert learning.name == "language"
    expected = sum(4 * (module.in_features + module.out_features) for module in plain)
    assert learning.trained == learning.adapters == expected
    assert sum(part.weights for part in describe_trainable(model)) == sum(
        part.weights for part in describe_trainable(fresh_model(family))
    )


@pytest.mark.contract
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_parts_are_trained_whole_beside_adapters(family: str, method: str) -> None:
    whole = settings(method=method, train_vision=True, train_projector=True)
    model, batch = fresh_model(family).train(), batch_of(family)
    with torch.no_grad():
        before = logits(model, batch)
    model = set_trainable(model, whole)
    with torch.no_grad():
        assert torch.allclose(logits(model, batch), before, atol=1e-5), "adapters start as nothing"
    assert {part.name for part in describe_trainable(model) if part.trained} == set(PARTS)
    learning = {name for name, weight in model.named_parameters() if weight.requires_grad}
    loss_of(model, batch).backward()
    assert set(gradients(model)) == learning
    model.zero_grad()
    assert moved(model, batch, steps=2) == set(PARTS)


def test_one_part_beside_adapters() -> None:
    model = set_trainable(fresh_model("qwen3_vl").train(), settings(method="lora", train_projector=True))
    assert moved(model, batch_of("qwen3_vl"), steps=2) == {"language", "projector"}
    names = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert any("deepstack_merger_list" in name for name in names)
    assert all("merger" in name or "lora_" in name for name in names)


@pytest.mark.contract
@pytest.mark.parametrize("family", ["llava_next", "qwen3_vl"])
def test_a_checkpoint_of_adapters_holds_everything_that_learns(family: str, tmp_path: Path) -> None:
    """As Trainer saves it and loads it again."""
    chosen, batch = settings(method="dora", train_vision=True, train_projector=True), batch_of(family)
    model = set_trainable(fresh_model(family), chosen)
    assert moved(model, batch, steps=2) == set(PARTS)
    model.save_pretrained(str(tmp_path))
    again = set_trainable(fresh_model(family), chosen)
    with torch.no_grad():
        wanted = logits(model, batch)
        assert not torch.allclose(logits(again, batch), wanted, atol=1e-4)
        learning = {name for name, weight in again.named_parameters() if weight.requires_grad}
        again.load_adapter(str(tmp_path), "default", is_trainable=True)
        assert torch.allclose(logits(again, batch), wanted, atol=1e-6)
    assert {name for name, weight in again.named_parameters() if weight.requires_grad} == learning


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_copies_follow_the_attention_of_the_model(family: str) -> None:
    """Switched after the adapters were added, as before."""
    model = set_trainable(fresh_model(family), settings(method="lora", train_vision=True))
    model.set_attn_implementation({"": "eager", "vision_config": "eager", "text_config": "eager"})
    encoder = model_parts(model).vision
    assert encoder is not None
    names = {module.config._attn_implementation for module in encoder.modules() if hasattr(module, "config")}
    assert names == {"eager"}
    assert sum("modules_to_save" in name for name, module in encoder.named_modules() if hasattr(module, "config")) > 1


def test_without_adapters_a_part_is_trained_alone() -> None:
    model = set_trainable(fresh_model("gemma3"), settings(method="lora", train_language=False, train_projector=True))
    assert not any(hasattr(module, "lora_A") for module in model.modules())
    assert moved(model, batch_of("gemma3")) == {"projector"}


def test_names_of_modules_as_peft_takes_them() -> None:
    model = set_trainable(fresh_model("llama"), settings(method="lora", lora_target_modules=("q_proj", "v_proj")))
    assert {name.split(".")[-1] for name, module in model.named_modules() if hasattr(module, "lora_A")} == {
        "q_proj",
        "v_proj",
    }
    every = set_trainable(fresh_model("llava"), settings(method="lora", lora_target_modules=("all-linear",)))
    assert "vision" in {part.name for part in describe_trainable(every) if part.trained}


def test_settings_reach_the_adapters() -> None:
    model = set_trainable(
        fresh_model("llama"), settings(method="dora", lora_rank=3, lora_alpha=12.0, lora_dropout=0.25)
    )
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].out_features == 3
    assert layer.scaling["default"] == 4.0
    assert layer.lora_dropout["default"].p == 0.25
    assert layer.use_dora["default"]
    twice = set_trainable(fresh_model("llama"), settings(method="lora"))
    assert twice.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] == 2.0


@pytest.mark.contract
@pytest.mark.parametrize(("family", "whole"), [("qwen3_vl", None), ("qwen3_vl", True), ("llama", None)])
def test_adapters_with_checkpointing_pieces_and_attention(family: str, whole: bool | None) -> None:
    """Recomputed layers hand gradients to adapters although no input needs one, beside whole parts too."""
    batch = batch_of(family)
    chosen = settings(method="lora", train_vision=whole, train_projector=whole)
    found: list[dict[str, Tensor]] = []
    for recompute in (False, True):
        torch.manual_seed(0)
        model = set_trainable(fresh_model(family).train(), chosen)
        prepare_model(model, attn_implementation="varlen")
        if recompute:
            checkpoint_parts(model, language=True, vision=True)
            split_vision(model, 50)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.fill_(0.02)
        loss_of(model, batch).backward()
        found.append(gradients(model))
    assert set(found[0]) == set(found[1])
    assert whole or all("lora_" in name for name in found[0])
    assert max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0]) <= 1e-5


# ---- what is refused


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("llama", {"train_vision": True}, "no vision encoder"),
        ("llama", {"train_projector": True, "method": "lora"}, "no vision encoder"),
        ("llama", {"train_language": False}, "every part frozen"),
        ("gemma3", {"method": "qlora", "train_language": False, "train_vision": True}, "4-bit weights"),
        ("llama", {"method": "lora", "lora_target_modules": ("q_porj",)}, "did you mean 'q_proj'"),
        ("llama", {"method": "lora", "lora_target_modules": ("norm",)}, "lora_target_modules"),
    ],
)
def test_contradictions_are_refused(family: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        set_trainable(fresh_model(family), settings(**given))


def test_a_pattern_names_layers_by_module() -> None:
    pattern = decoder_linear_pattern(fresh_model("smolvlm"))
    assert pattern.startswith(r"model\.text_model\.layers\.\d+\.(?:")


# ---- in 4 bits


def test_a_kernel_that_is_not_used_is_not_asked_for_aloud(caplog: pytest.LogCaptureFixture) -> None:
    quiet_libraries()
    logging.getLogger("bitsandbytes.backends.cpu.ops").warning("Failed to load CPU gemm_4bit_forward")
    assert not caplog.records


def test_four_bits_are_not_rounded_for_inference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = pytest.importorskip("bitsandbytes.nn.modules")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)  # whatever this CPU has
    convert, converted = modules._convert_weight_packed_for_cpu, []
    monkeypatch.setattr(modules, "_convert_weight_packed_for_cpu", lambda *given: converted.append(convert(*given)))
    batch = batch_of("llama")

    def gradients(*, evaluated: bool) -> list[Tensor]:
        model = load_model("tiny:llama", cache_dir=tmp_path, quantize=True, seed=3)
        torch.manual_seed(0)
        model = set_trainable(model, settings(method="qlora"))
        if evaluated:
            with torch.no_grad():
                loss_of(model.eval(), batch)
        loss_of(model.train(), batch).backward()
        return [weight.grad for weight in model.parameters() if weight.grad is not None]

    wanted, found = gradients(evaluated=False), gradients(evaluated=True)
    assert wanted
    assert all(torch.equal(one, other) for one, other in zip(wanted, found, strict=True))
    assert not converted
    theirs = load_model("tiny:llama", cache_dir=tmp_path, quantize=True)
    layer = next(module for module in theirs.modules() if isinstance(module, modules.Linear4bit))
    layer.support_avx512bf16_for_cpu = True  # as a model is that was loaded by transformers
    with torch.no_grad(), pytest.raises(TypeError):
        layer.eval()(torch.ones(1, layer.in_features))
    assert converted, "without our word it is rounded"
    for refused in (prepare_model, keep_four_bits):
        with pytest.raises(ConfigError, match="rounded for inference"):
            refused(theirs)


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_a_model_in_four_bits_learns(family: str, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = load_model(f"tiny:{family}", cache_dir=tmp_path, quantize=True, seed=3)
    packed_layers = [name for name, module in model.named_modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    linear = [name for name, module in decoder_layers(model).named_modules() if isinstance(module, nn.Linear)]
    assert len(packed_layers) == len(linear) > 0
    assert all(".layers." in name and "visual" not in name for name in packed_layers)
    assert not list(tmp_path.glob(".quantize-*"))
    whole = load_model(f"tiny:{family}", cache_dir=tmp_path, seed=3)
    assert sum(part.weights for part in describe_trainable(model)) == sum(
        part.weights for part in describe_trainable(whole)
    )
    for name in packed_layers:
        weight, wanted = model.get_submodule(name).weight, whole.get_submodule(name).weight
        error = (bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state) - wanted).abs().mean()
        assert 0 < float(error.detach()) < 0.15 * float(wanted.detach().abs().mean())

    batch = batch_of(family)
    torch.manual_seed(0)
    model = set_trainable(model, settings(method="qlora", train_projector=family in VISION or None)).train()
    kept = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = loss_of(model, batch)
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.6 * losses[0]
    assert all(torch.equal(p, kept[name]) for name, p in model.named_parameters() if name in kept)


def test_four_bits_without_the_package_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'packtrain\[qlora\]'"):
        load_model("tiny:llama", cache_dir=tmp_path, quantize=True)
