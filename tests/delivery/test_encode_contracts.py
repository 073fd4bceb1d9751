"""Which models may be packed: the contract of each, and the reason for every refusal."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from encoding import IMAGE_FAMILIES, QWEN, TEXT_FAMILIES, request_for
from transformers import AutoConfig

from packtrain.app.measure import measure_outcome
from packtrain.app.pack import pack_outcome
from packtrain.app.plan import plan
from packtrain.core.errors import ConfigError
from packtrain.delivery.encode import from_transformers
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.delivery.encode.from_transformers import model_contract, packing_notes
from packtrain.delivery.encode.unlisted import sample_encoder
from packtrain.families import tiny
from packtrain.families.contracts import contract_for
from packtrain.families.settings import read_settings
from packtrain.modeling.load import build_model
from packtrain.packing.packing_config import PackingConfig

Folder = Callable[[str], Path]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "paligemma": ({"model_type": "paligemma", "vision_config": {}}, "4-D mask"),
    "qwen3_5": ({"model_type": "qwen3_5"}, "carry state"),
    "qwen3_next": ({"model_type": "qwen3_next"}, "carry state"),
    "lfm2": ({"model_type": "lfm2"}, "carry state"),
    "lfm2_vl": ({"model_type": "lfm2_vl", "vision_config": {}}, "carry state"),
    "mamba": ({"model_type": "mamba"}, "carry state"),
    "jamba": ({"model_type": "jamba"}, "carry state"),
    "linear layers": (
        {"model_type": "new", "layer_types": ["full_attention", "linear_attention"]},
        "linear_attention layers.*carry state",
    ),
    "convolutions": ({"model_type": "new", "layer_types": ["conv"]}, "conv layers.*carry state"),
    "chunks": ({"model_type": "new", "layer_types": ["chunked_attention"]}, "chunks start at the row"),
    "unknown layers": ({"model_type": "new", "layer_types": ["magic"]}, "not known to separate"),
    "state space": ({"model_type": "new", "mamba_d_state": 16}, "mamba_d_state.*carry state"),
    "inner layers": (
        {"model_type": "internvl", "vision_config": {}, "text_config": {"layer_types": ["mamba"]}},
        "mamba layers",
    ),
    "inner type": ({"model_type": "llava", "text_config": {"model_type": "jamba"}}, "carry state"),
    "audio": ({"model_type": "qwen2_audio", "audio_config": {}}, "audio, which has no token rule"),
    "two stacks": ({"model_type": "t5", "is_encoder_decoder": True}, "encoder besides its decoder"),
    "nanovlm": ({"model_type": "nanovlm"}, "not in transformers"),
    "positions from a mask": ({"model_type": "opt"}, "does not separate samples"),
    "balanced experts": ({"model_type": "qwen3_moe", "output_router_logits": True}, "load balancing loss"),
    "inner experts": (
        {"model_type": "qwen3_vl", "vision_config": {}, "text_config": {"output_router_logits": True}},
        "text_config.output_router_logits: true",
    ),
    "no positions": ({"model_type": "bloom"}, "does not separate samples"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str, tmp_path: Path) -> None:
    config, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=rf"(?s){config['model_type']}.*{reason}"):
        contract_for(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"(?s){config['model_type']}.*{reason}"):
        contract_for(read_settings(tmp_path))


@pytest.mark.parametrize("family", [*IMAGE_FAMILIES, *TEXT_FAMILIES])
def test_what_is_taken(family: str, model: Folder) -> None:
    settings = read_settings(model(family))
    contract = contract_for(settings)
    assert contract == contract_for(settings.config), "folder and config agree"
    assert contract.model_type == family
    assert contract.positions == ("mrope" if family in QWEN else "restart")
    assert bool(contract.media) == (family in IMAGE_FAMILIES)
    assert pickle.loads(pickle.dumps(contract)) == contract


def test_gemma_needs_what_flash_attention_cannot_do() -> None:
    assert set(contract_for({"model_type": "gemma3"}).refused_backends) == {
        "varlen",
        "flash_attention_2",
        "flash_attention_3",
    }
    assert contract_for({"model_type": "gemma3"}).token_types == "token_type_ids"
    assert not contract_for({"model_type": "gemma3_text"}).refused_backends


def test_a_text_model_that_nobody_listed() -> None:
    contract = contract_for({"model_type": "olmo9", "layer_types": ["sliding_attention", "full_attention"]})
    assert (contract.model_type, contract.positions, dict(contract.media)) == ("olmo9", "restart", {})


@pytest.mark.contract
@pytest.mark.parametrize("family", IMAGE_FAMILIES)
def test_names_are_arguments_of_the_model(family: str, model: Folder) -> None:
    import inspect

    contract = contract_for({"model_type": family})
    takes = inspect.signature(build_model(model(family)).forward).parameters
    named = {*contract.media, contract.token_types, contract.per_sample_images} - {None}
    assert named <= set(takes), f"{named - set(takes)} are no arguments of {family}"


@pytest.mark.parametrize("model_type", ["glm4v", "qwen3_vl_moe"])
def test_media_that_nobody_listed_are_left_to_the_processor(model_type: str) -> None:
    contract = contract_for({"model_type": model_type, "vision_config": {}})
    assert contract.unlisted
    assert not contract.media
    assert not contract_for({"model_type": "qwen3_vl", "vision_config": {}}).unlisted


@pytest.mark.parametrize("name", ["qwen3_5", "mamba", "chunks", "paligemma", "positions from a mask", "unknown layers"])
def test_what_cannot_be_packed_may_be_padded(name: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.packing=false"):
        contract_for(REFUSED[name][0])
    assert contract_for(REFUSED[name][0], packing=False).model_type == REFUSED[name][0]["model_type"]


@pytest.mark.parametrize("name", ["audio", "two stacks", "nanovlm", "balanced experts", "inner experts"])
def test_what_cannot_be_trained_at_all(name: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[name][1]):
        contract_for(REFUSED[name][0], packing=False)


def test_experts_of_a_fixed_capacity_are_shared_by_the_batch() -> None:
    for packing in (True, False):
        with pytest.raises(ConfigError, match="expert_capacity: 64: its experts drop tokens"):
            contract_for({"model_type": "new", "expert_capacity": 64}, packing=packing)


def test_an_encoder_refuses_before_anything_is_read(tmp_path: Path) -> None:
    folder = tiny.write("nanovlm", tmp_path / "nanovlm")
    with pytest.raises(ConfigError, match="cannot be trained here: its model is not in transformers"):
        SampleEncoder(request_for(folder, tmp_path))


def test_a_processor_without_a_rule_is_refused(tmp_path: Path) -> None:
    folder = tiny.write("qwen3_vl", tmp_path / "qwen3_vl")
    path = folder / "processor_config.json"
    config = json.loads(path.read_text())
    config["image_processor"]["do_resize"] = False
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="whose costs are only known by running it"):
        sample_encoder(request_for(folder, tmp_path))


# ---- the config as transformers loads it

LOADED: dict[str, tuple[dict[str, Any], int | str]] = {
    **{
        name: (
            {
                **{"model_type": "phi3", "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 512},
                "original_max_position_embeddings": 64,
                "rope_scaling": {
                    **{"type": name, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
                    "original_max_position_embeddings": 64,
                },
            },
            64,
        )
        for name in ("su", "yarn", "longrope")
    },
    "lists that are made": (
        {"model_type": "deepseek_v32", "num_hidden_layers": 2},
        "attention layers: not known to separate",
    ),
    "no model of transformers": ({"model_type": "olmo9"}, "transformers cannot load"),
}


@pytest.mark.contract
@pytest.mark.parametrize("name", LOADED)
def test_a_model_is_judged_by_its_loaded_config(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    config, expected = LOADED[name]
    if config["model_type"] == "deepseek_v32":
        pytest.importorskip("transformers.models.deepseek_v32")
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = read_settings(tmp_path)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            model_contract(settings)
        assert expected in packing_notes(settings)[0]
        return
    assert model_contract(settings).longest_together == expected
    assert model_contract(settings) == contract_for(AutoConfig.from_pretrained(str(tmp_path)).to_dict())
    assert packing_notes(settings) == ()


def test_a_loaded_config_is_kept_for_other_processes(
    model: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(from_transformers, "_loaded", {})
    settings = read_settings(model("llama"))
    contract = model_contract(settings)
    (kept,) = (tmp_path / "cache" / "configs").iterdir()
    whole = kept.read_text()
    config = json.dumps(json.loads(whole)["config"])
    for text, loads in ((whole, 0), (whole[:50], 1), ("[]", 1), (whole.replace('"llama"', '"gemma"'), 1)):
        kept.write_text(text)
        calls: list[str] = []
        monkeypatch.setattr(from_transformers, "_loaded", {})
        monkeypatch.setattr(from_transformers, "_load", lambda folder, calls=calls: calls.append(folder) or config)
        assert model_contract(settings) == contract
        assert len(calls) == loads, "a damaged one is loaded again"


@pytest.mark.full
def test_another_process_loads_what_this_one_would(model: Folder) -> None:
    folder = str(model("qwen2_5_vl"))
    said = from_transformers.in_another_process(folder)
    assert json.loads(said) == json.loads(from_transformers._load(folder))


def test_a_worker_gets_the_verdict_with_the_encoder(
    model: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = SampleEncoder(request_for(model("llama"), tmp_path))
    monkeypatch.setattr("packtrain.delivery.encode.encode.model_contract", None)
    assert pickle.loads(pickle.dumps(encoder)).contract == encoder.contract


@pytest.mark.full
def test_without_transformers_it_is_said_that_nothing_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(from_transformers, "_transformers", lambda: None)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": "word " * count}) + "\n" for count in (3, 5, 40)))
    measured = measure_outcome(data, model="tiny:llama", dataset_type="fineweb_edu", workers=1, check=0)
    packed = pack_outcome(measured.table, PackingConfig(packing_length=256))
    planned = plan(measured.table, out=tmp_path / "report", lengths=[256])
    for notes in (measured.notes, packed.notes, planned.notes):
        assert from_transformers.NOT_CHECKED in notes
    monkeypatch.setattr(from_transformers, "_transformers", lambda: "0")
    assert pack_outcome(measured.table, PackingConfig(packing_length=256)).notes == ()
