"""Loading models: weights come back as they were saved, and only from safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from packtrain.core.errors import ConfigError
from packtrain.families import tiny
from packtrain.modeling import load
from packtrain.modeling.load import load_model


@pytest.mark.contract
@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_saved_weights_come_back(family: str, tmp_path: Path) -> None:
    made = load_model(f"tiny:{family}", cache_dir=tmp_path / "cache", seed=3)
    made.save_pretrained(tmp_path / "saved")
    again = load_model(str(tmp_path / "saved"), cache_dir=tmp_path / "cache")
    wanted = made.state_dict()
    assert set(again.state_dict()) == set(wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in again.state_dict().items())
    assert not again.training
    half = load_model(str(tmp_path / "saved"), cache_dir=tmp_path / "cache", dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}


def test_seeds_make_tiny_models_differ(tmp_path: Path) -> None:
    one, same, other = (load_model("tiny:llama", cache_dir=tmp_path, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    folder = tiny.write("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match="no weights"):
        load_model(str(folder), cache_dir=tmp_path)
    assert load_model(str(folder), cache_dir=tmp_path, random_weights=True).config.model_type == "llama"
    (folder / "pytorch_model.bin").write_bytes(b"not looked into")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin"):
        load_model(str(folder), cache_dir=tmp_path)


@pytest.mark.contract
@pytest.mark.parametrize("fault", ["lost", "cut", "beside"])
def test_weights_are_never_drawn_for_those_that_a_folder_lacks(tmp_path: Path, fault: str) -> None:
    folder = tiny.write("qwen2_5_vl", tmp_path / "model")
    load_model("tiny:qwen2_5_vl", cache_dir=tmp_path / "cache").save_pretrained(folder)
    path = folder / "model.safetensors"
    weights = load_file(path)
    if fault == "lost":
        del weights["visual.merger.mlp.0.weight"]
    elif fault == "beside":
        weights["another_head.weight"] = torch.zeros(3)
    save_file(weights, path, metadata={"format": "pt"})
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    if fault == "beside":
        assert load_model(str(folder), cache_dir=tmp_path).config.model_type == "qwen2_5_vl"
        return
    with pytest.raises(ConfigError, match="merger" if fault == "lost" else "SafetensorError"):
        load_model(str(folder), cache_dir=tmp_path)


@pytest.mark.parametrize("whole", [True, False])
def test_a_folder_with_adapters_is_refused(tmp_path: Path, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers would add them to the model without a word."""
    peft = pytest.importorskip("peft")
    model, folder = load_model("tiny:llama", cache_dir=tmp_path / "cache"), tmp_path / "model"
    model.save_pretrained(tmp_path / "base")
    if whole:
        model.save_pretrained(folder)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(folder)
    with pytest.raises(ConfigError, match="merge_and_unload") as error:
        load_model(str(folder))
    assert "adapter_config.json" in str(error.value)
    if whole:
        monkeypatch.setattr(load, "require_weights", lambda folder: None)  # as of the hub
        with pytest.raises(ConfigError, match="merge_and_unload"):
            load_model(str(folder))
        (folder / "adapter_config.json").unlink()
        assert not any("lora_" in name for name, _ in load_model(str(folder)).named_parameters())


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no folder of that name"):
        load_model("nowhere", cache_dir=tmp_path)
