"""The final weights: loaded again with transformers or peft they compute the same, and nothing of training is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from encoded import TEXT_ONLY, VISION, contract, folder, fresh_model, logits, packed, sample
from safetensors.torch import load_file
from torch import Tensor

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.core.values import MediaLimits
from packtrain.families.registry import load_rule
from packtrain.families.settings import read_settings
from packtrain.modeling import export
from packtrain.modeling.adapters import set_trainable
from packtrain.modeling.attention import set_attention
from packtrain.modeling.export import copy_input_files, limited_parts, save_final, write_limits
from packtrain.modeling.load import load_model
from packtrain.modeling.model_settings import ModelSettings

SLOW = ("idefics3", "smolvlm", "llava_onevision", "internvl", "qwen2_vl")
FAMILIES = [pytest.param(f, marks=pytest.mark.more) if f in SLOW else f for f in (*VISION, *TEXT_ONLY)]
METHODS = ("lora", pytest.param("dora", marks=pytest.mark.full))


def settings(**given: Any) -> ModelSettings:
    return ModelSettings(name="tiny:here", lora_rank=4, **given)


def batch_of(family: str) -> Any:
    media = ("image",) if family in VISION else ()
    return packed(family, sample(family, *media, seed=1))


def scores(model: Any, family: str) -> Tensor:
    with torch.no_grad():
        return logits(model.eval(), batch_of(family))


def shaken(model: Any, *, seed: int = 1) -> Any:
    """Other weights wherever something learns, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
    return model


def used(family: str) -> Any:
    """A model as training leaves it: other weights, no caching, an attention of ours."""
    model = shaken(fresh_model(family))
    if family not in ("gemma3",):
        set_attention(model, "varlen", contract(family))
    for config in (model.config, model.config.get_text_config()):
        config.use_cache = False
    return model


def keys_of(config: Any) -> set[str]:
    found = set(config) if isinstance(config, dict) else set()
    return found.union(*(keys_of(value) for value in config.values())) if isinstance(config, dict) else found


@pytest.mark.contract
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_model_comes_back(family: str, tmp_path: Path) -> None:
    model = used(family)
    wanted = scores(model, family)
    save_final(model, tmp_path / "final", processor_folder=folder(family))
    again = load_model(str(tmp_path / "final"))
    assert torch.allclose(scores(again, family), wanted, atol=1e-5)
    kept = model.state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in again.state_dict().items())
    assert again.config.get_text_config().use_cache
    found = keys_of(json.loads((tmp_path / "final" / "config.json").read_text()))
    assert not {key for key in found if "attn_implementation" in key or key == "use_cache"}
    assert not model.config.get_text_config().use_cache, "the trained model is left as it was"


@pytest.mark.contract
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3", "llama"])
def test_tokenizer_and_processor_come_along(family: str, tmp_path: Path) -> None:
    from transformers import AutoProcessor, AutoTokenizer

    save_final(fresh_model(family), tmp_path / "final", processor_folder=folder(family))
    auto = AutoProcessor if family in VISION else AutoTokenizer
    found, wanted = (auto.from_pretrained(str(path)) for path in (tmp_path / "final", folder(family)))
    assert type(found) is type(wanted)
    assert found.chat_template == wanted.chat_template
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert {"tokenizer.json", "config.json", "model.safetensors"} <= names
    modes = {path.stat().st_mode for path in (tmp_path / "final").iterdir()}
    (tmp_path / "new").touch()
    assert modes == {(tmp_path / "new").stat().st_mode}, "others may read weights as they may read any new file"
    assert not {name for name in names if name.startswith((".", "optimizer", "trainer", "README"))}


@pytest.mark.contract
@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("qwen2_vl", {"max_pixels": 12_544}),
        ("qwen3_vl", {"min_pixels": 4096, "max_pixels": 16_384}),
        ("smolvlm", {"max_img_size": 64}),
        ("qwen2_vl", {"num_frames": 4}),
        ("qwen2_5_vl", {"fps": 1.0}),
        ("qwen3_vl", {"num_frames": 4}),
        ("qwen3_vl", {"fps": 1.0}),
        ("internvl", {"num_frames": 4}),
        ("llava_onevision", {"num_frames": 4}),
    ],
)
def test_the_processor_has_the_limits_that_were_trained_with(
    family: str, given: dict[str, int], tmp_path: Path
) -> None:
    from PIL import Image
    from transformers import AutoProcessor
    from transformers.video_utils import VideoMetadata

    limits, found_in = MediaLimits(**given), read_settings(folder(family))
    parts, rule = limited_parts(found_in, limits), load_rule(found_in, limits)
    assert parts is not None
    assert rule is not None
    copy_input_files(folder(family), tmp_path)
    write_limits(tmp_path, parts)
    shutil.copyfile(folder(family) / "config.json", tmp_path / "config.json")
    whole, final = (AutoProcessor.from_pretrained(str(path)) for path in (folder(family), tmp_path))
    if {"num_frames", "fps"} & given.keys():
        clip, text = torch.zeros(48, 3, 64, 96, dtype=torch.uint8), rule.placeholders["video"]
        told = VideoMetadata(total_num_frames=48, fps=12.0, duration=4.0, frames_indices=list(range(48)))
        options = {"videos": [clip], "text": text, "video_metadata": [told]}
        wanted = whole(**options, **rule.processor_kwargs())["input_ids"]
        assert final(**options)["input_ids"] == wanted
        assert whole(**options)["input_ids"] != wanted, "they have an effect"
        return
    for size in ((90, 60), (300, 400), (1000, 200)):
        picture, text = Image.new("RGB", size), rule.placeholders["image"]
        wanted = whole(images=[picture], text=text, **rule.processor_kwargs())
        assert final(images=[picture], text=text)["input_ids"] == wanted["input_ids"]
        if size == (300, 400):
            assert whole(images=[picture], text=text)["input_ids"] != wanted["input_ids"], "they have an effect"


@pytest.mark.parametrize(
    ("family", "given", "written"),
    [
        ("qwen2_vl", {"num_frames": 4}, True),
        ("qwen2_5_vl", {"fps": 1.0, "max_frames": 8, "max_pixels": 16_384}, True),
        ("internvl", {"num_frames": 4}, True),
        ("smolvlm", {"num_frames": 4}, False),  # its files keep the sampling in another place
    ],
)
def test_limits_are_written_where_files_can_say_them(family: str, given: dict[str, Any], written: bool) -> None:
    assert (limited_parts(read_settings(folder(family)), MediaLimits(**given)) is not None) == written


def test_what_the_original_says_about_caching_is_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = fresh_model("qwen3_vl")
    model.save_pretrained(source)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["use_cache"] = False
    (source / "config.json").write_text(json.dumps(config))
    save_final(model, tmp_path / "final", processor_folder=source)
    saved = json.loads((tmp_path / "final" / "config.json").read_text())
    assert saved["text_config"]["use_cache"] is False
    assert "use_cache" not in saved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_keep_their_type(dtype: torch.dtype, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    save_final(fresh_model("llama").to(dtype), tmp_path / "final")
    assert json.loads((tmp_path / "final" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    again = AutoModelForCausalLM.from_pretrained(str(tmp_path / "final"))
    assert {weight.dtype for weight in again.parameters()} == {dtype}


# ---- heads that are, or are not, the embeddings


def untied_in_spite_of_its_config(family: str, place: Path) -> Any:
    """A model whose config says that its head is tied, and whose file has another head."""
    model = fresh_model(family)
    for config in (model.config, model.config.get_text_config()):
        config.tie_word_embeddings = True
    model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.get_input_embeddings().weight))
    model.save_pretrained(place)
    assert any(name.endswith("lm_head.weight") for name in load_file(place / "model.safetensors"))
    loaded = load_model(str(place))
    assert loaded.config.tie_word_embeddings
    assert loaded.lm_head.weight is not loaded.get_input_embeddings().weight
    return loaded


def head_is_tied(config: Path) -> set[bool]:
    """What a config says, for the model and its text model."""
    found = json.loads(config.read_text())
    return {part.get("tie_word_embeddings") for part in (found, found.get("text_config", found))}


@pytest.mark.contract
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_differs_from_the_embeddings_is_written(family: str, tmp_path: Path) -> None:
    model = untied_in_spite_of_its_config(family, tmp_path / "source")
    wanted = scores(shaken(model), family)
    save_final(model, tmp_path / "final", processor_folder=tmp_path / "source")
    again = load_model(str(tmp_path / "final"))
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert torch.allclose(scores(again, family), wanted, atol=1e-5)
    assert head_is_tied(tmp_path / "final" / "config.json") == {False}
    assert model.config.tie_word_embeddings, "the trained model is left as it was"


@pytest.mark.contract
@pytest.mark.parametrize("family", ["gemma3_text", "gemma3"])
def test_an_adapter_on_a_tied_head_unties_it_when_merged(family: str, tmp_path: Path) -> None:
    model = set_trainable(fresh_model(family), settings(method="lora", lora_target_modules=("q_proj", "lm_head")))
    untrained = model.state_dict()["base_model.model.lm_head.base_layer.weight"].clone()
    wanted = scores(shaken(model), family)
    save_final(model, tmp_path / "final", merge_adapters=True, processor_folder=folder(family))
    again = load_model(str(tmp_path / "final"))
    assert torch.equal(again.get_input_embeddings().weight, untrained)
    assert not torch.equal(again.lm_head.weight, untrained), "its adapter has learned something"
    assert float((scores(again, family) - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    model = shaken(fresh_model("gemma3_text"))
    save_final(model, tmp_path / "final")
    assert "lm_head.weight" not in load_file(tmp_path / "final" / "model.safetensors")
    assert head_is_tied(tmp_path / "final" / "config.json") != {False}
    again = load_model(str(tmp_path / "final"))
    assert again.lm_head.weight is again.get_input_embeddings().weight


def test_a_weight_that_the_class_has_no_place_for_is_an_error(tmp_path: Path) -> None:
    model = fresh_model("llama")
    model.register_parameter("another", torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(AssertionError, match=r"no checkpoint names for .*another"):
        save_final(model, tmp_path / "final")
    assert not list(tmp_path.iterdir())


# ---- adapters


@pytest.mark.contract
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_merged_adapters_are_an_ordinary_model(family: str, method: str, tmp_path: Path) -> None:
    whole = {"train_vision": True, "train_projector": True} if family in VISION else {}
    model = shaken(set_trainable(fresh_model(family), settings(method=method, **whole)))
    wanted, untrained = scores(model, family), scores(fresh_model(family), family)
    save_final(model, tmp_path / "final", merge_adapters=True, processor_folder=folder(family))
    assert torch.equal(scores(model, family), wanted), "the trained model is left as it was"
    again = load_model(str(tmp_path / "final"))
    assert set(again.state_dict()) == set(fresh_model(family).state_dict())
    assert float((scores(again, family) - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))
    assert float((untrained - wanted).abs().max()) > 1e-2, "nothing was learned, so nothing was tested"


@pytest.mark.contract
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_come_back_on_the_original(family: str, method: str, tmp_path: Path) -> None:
    """With everything that was trained whole beside them."""
    peft = pytest.importorskip("peft")
    whole = {"train_vision": True, "train_projector": True} if family in VISION else {}
    model = shaken(set_trainable(fresh_model(family), settings(method=method, **whole)))
    wanted = scores(model, family)
    save_final(model, tmp_path / "final", processor_folder=folder(family))
    names = {path.name for path in (tmp_path / "final").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not names & {"model.safetensors", "README.md", "config.json"}
    again = peft.PeftModel.from_pretrained(fresh_model(family), str(tmp_path / "final"))
    assert torch.allclose(scores(again, family), wanted, atol=1e-5)
    merged = again.merge_and_unload()
    assert float((scores(merged, family) - wanted).abs().max()) <= 1e-4 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("merge", [True, False])
def test_weights_that_are_handed_in(merge: bool, tmp_path: Path) -> None:
    """Whole weights of a sharded model, by the names of what wraps it; its own are not looked at."""
    peft = pytest.importorskip("peft")
    chosen = settings(method="lora", train_projector=True)
    model = shaken(set_trainable(fresh_model("qwen3_vl"), chosen))
    wanted = scores(model, "qwen3_vl")
    state = {f"module.{name}" if merge else name: value.clone() for name, value in model.state_dict().items()}
    shaken(model, seed=9)
    save_final(model, tmp_path / "final", merge_adapters=merge, state_dict=state)
    if merge:
        again = load_model(str(tmp_path / "final"))
    else:
        again = peft.PeftModel.from_pretrained(fresh_model("qwen3_vl"), str(tmp_path / "final"))
    assert torch.allclose(scores(again, "qwen3_vl"), wanted, atol=1e-4)
    plain = {name: value.clone() for name, value in fresh_model("gemma3").state_dict().items()}
    save_final(shaken(fresh_model("gemma3")), tmp_path / "whole", state_dict=plain)
    assert torch.equal(load_model(str(tmp_path / "whole")).lm_head.weight, plain["lm_head.weight"])


@pytest.mark.parametrize("family", ["llama", "qwen3_vl"])
def test_four_bits_are_merged_as_the_numbers_they_stand_for(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = pytest.importorskip("bitsandbytes.nn.modules")
    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)  # whatever this CPU has
    model = load_model(f"tiny:{family}", cache_dir=tmp_path, quantize=True)
    model = shaken(set_trainable(model, settings(method="qlora", lora_target_modules=("q_proj", "up_proj"))))
    wanted = scores(model, family)
    save_final(model, tmp_path / "merged", merge_adapters=True)
    again = load_model(str(tmp_path / "merged"))
    assert {str(weight.dtype) for weight in again.parameters()} == {"torch.float32"}
    assert float((scores(again, family) - wanted).abs().max()) <= 1e-3 * float(wanted.abs().max())
    save_final(model, tmp_path / "adapters")
    assert (tmp_path / "adapters" / "adapter_model.safetensors").stat().st_size < 200_000
    with pytest.raises(ConfigError, match="4-bit weights in a sharded model"):
        save_final(model, tmp_path / "none", merge_adapters=True, state_dict=model.state_dict())


def test_an_adapter_that_cannot_be_merged_is_refused(tmp_path: Path) -> None:
    model = set_trainable(fresh_model("llama"), settings(method="lora", lora_target_modules=("embed_tokens", "q_proj")))
    with pytest.raises(ConfigError, match="embed_tokens"):
        save_final(model, tmp_path / "final", merge_adapters=True)
    assert not list(tmp_path.iterdir())


# ---- all or nothing


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    others = [tmp_path / ".final.notes.tmp", tmp_path / ".final-2.17.tmp"]
    for left in (tmp_path / ".final.17469.tmp", tmp_path / ".final.17469.old", *others):
        left.mkdir()
        (left / "model.safetensors").touch()
    save_final(fresh_model("llama"), tmp_path / "final")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["final", *(path.name for path in others)])


@pytest.mark.parametrize("moment", ["weights", "files", "place"])
def test_a_full_disk_leaves_what_was_there(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh_model("llama")
    save_final(model, tmp_path / "final", processor_folder=folder("llama"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()}

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if moment == "weights":
        monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", full)
    elif moment == "files":
        monkeypatch.setattr(export.shutil, "copyfile", full)
    else:
        rename = os.rename
        monkeypatch.setattr(os, "rename", lambda a, b: full() if str(a).endswith(".tmp") else rename(a, b))
    with pytest.raises(ArtifactError, match=r"(?s)No space left.*room for about [\d,]+ bytes; [\d,]+ are free"):
        save_final(shaken(model), tmp_path / "final", processor_folder=folder("llama"))
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    save_final(model, tmp_path / "final", processor_folder=folder("llama"))
    assert (tmp_path / "final" / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
