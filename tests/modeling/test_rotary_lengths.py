"""Models whose positions follow the longest of a row: neither a long neighbour nor padding may change a sample."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from packtrain import DatasetConfig, MultiModalDataset
from packtrain.core.errors import DataError
from packtrain.delivery.collate.collators import PackCollator, StaticShapes
from packtrain.delivery.encode.encoded_sample import EncodedSample, PackedRow, PackKey
from packtrain.delivery.encode.synthetic_samples import synthetic_sample
from packtrain.families.contracts import contract_for
from packtrain.families.family import BatchContract
from packtrain.families.tiny import write
from packtrain.modeling.attention import set_attention

ORIGINAL = 32
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
SIZES = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, **HEADS}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 5.0, 6.0, 7.0],
}
MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
MODELS: dict[str, dict[str, Any]] = {
    "longrope": {
        "model_type": "phi3",
        "rope_parameters": LONGROPE,
        "max_position_embeddings": 512,
        "original_max_position_embeddings": ORIGINAL,
        "pad_token_id": 0,
    },
    "dynamic": {"model_type": "llama", "rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL},
    "learned": {"model_type": "gpt2", "n_positions": ORIGINAL, "attn_pdrop": 0.0},
    "plain": {"model_type": "llama"},
    "windows": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
    },
    "mrope": {"model_type": "qwen2_5_vl_text", "rope_parameters": MROPE},
}


def sample(name: str, tokens: int, position_rows: int = 1) -> EncodedSample:
    ids = (torch.arange(tokens) * 7 + len(name)) % 90
    return synthetic_sample(name, ids, supervised=tokens - 1, position_rows=position_rows)


def made(**config: Any) -> Any:
    torch.manual_seed(0)
    whole = AutoConfig.for_model(**{**SIZES, "initializer_range": 0.1, **config})
    if config["model_type"] == "qwen2_5_vl_text":
        from transformers import Qwen2_5_VLTextModel

        return Qwen2_5_VLTextModel(whole).eval()
    return AutoModelForCausalLM.from_config(whole).eval()


def outputs(model: Any, contract: BatchContract, *samples: EncodedSample, **shapes: Any) -> torch.Tensor:
    batch = dict(PackCollator(contract, pad_id=0, **shapes)([PackedRow(key=PackKey(0, 0), samples=samples)]))
    del batch["labels"]
    with torch.no_grad():
        return model(**batch)[0][0]


def test_a_long_neighbour_is_refused_because_it_would_change_the_others() -> None:
    model = made(**MODELS["dynamic"])
    contract = contract_for(model.config.to_dict())
    assert contract.longest_together == ORIGINAL
    short, other, long = sample("short", 12), sample("other", 20), sample("long", ORIGINAL + 8)
    alone = outputs(model, contract, short)
    assert (outputs(model, contract, short, other)[:12] - alone).abs().max() < 1e-5
    with pytest.raises(DataError, match=r"(?s)sample long of 40 tokens.*packing_length 32"):
        outputs(model, contract, short, long)
    assert len(outputs(model, contract, long)) == len(long), "alone it is as it is meant"
    blind = BatchContract(model_type="llama")
    assert (outputs(model, blind, short, long)[:12] - alone).abs().max() > 1e-3, "else there was nothing to refuse"


@pytest.mark.contract
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_changes_no_sample(name: str, backend: str) -> None:
    model = made(**MODELS[name]).double()
    contract = contract_for(model.config.to_dict())
    rows = 4 if contract.positions == "mrope" else 1
    samples = [sample(str(tokens), tokens, rows) for tokens in (12, 1, 20)]
    alone = [outputs(model, contract, one) for one in samples]
    set_attention(model, backend, contract)
    shapes = StaticShapes(tokens=4 * ORIGINAL)
    packed = outputs(model, contract, *samples, static_shapes=shapes)
    assert len(packed) == shapes.tokens, "else there is no padding"
    for expected, found in zip(alone, packed.split([12, 1, 20, len(packed) - 33]), strict=False):
        assert (found - expected).abs().max() < 1e-6 * expected.abs().max()
    assert outputs(model, contract, static_shapes=shapes).isfinite().all(), "a row without samples"


@pytest.mark.contract
@pytest.mark.parametrize("name", ["dynamic", "dynamic in layers", "longrope"])
def test_a_row_does_not_depend_on_a_longer_one_before_it(name: str) -> None:
    config = MODELS.get(name) or MODELS["windows"] | {
        "rope_parameters": {"sliding_attention": DYNAMIC | {"rope_type": "default"}, "full_attention": DYNAMIC},
        "max_position_embeddings": ORIGINAL,
    }
    model, fresh = made(**config), made(**config)
    contract = contract_for(model.config.to_dict())
    assert contract.longest_together == ORIGINAL
    set_attention(model, "sdpa", contract)
    for lengths in ((300,), (ORIGINAL, 20), (200,), (40,), (ORIGINAL - 1, 5)):
        samples = [sample(str(tokens), tokens) for tokens in lengths]
        packed = outputs(model, contract, *samples)
        for one, found in zip(samples, packed.split(lengths), strict=True):
            expected = outputs(copy.deepcopy(fresh), contract, one)
            assert (found - expected).abs().max() < 1e-5 * expected.abs().max(), (lengths, one.id)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_parameters": DYNAMIC, "max_position_embeddings": 64}, 64),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 128}, 128),
        (
            {
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096},
                "max_position_embeddings": 131072,
            },
            4096,
        ),
        (
            {
                "rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 8192},
                "original_max_position_embeddings": 4096,
            },
            4096,
        ),
        ({"text_config": {"rope_parameters": DYNAMIC, "max_position_embeddings": 48}}, 48),
        ({"rope_parameters": {"full_attention": DYNAMIC}, "max_position_embeddings": 96}, 96),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 96}, None),
        ({"rope_parameters": {"rope_type": "default"}, "max_position_embeddings": 96}, None),
    ],
)
def test_the_length_is_found_in_any_layout(config: dict[str, Any], expected: int | None) -> None:
    assert contract_for({"model_type": "llama", **config}).longest_together == expected


def test_a_dataset_refuses_such_packs_before_training(tmp_path: Path) -> None:
    folder = write("llama", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_parameters": DYNAMIC, "max_position_embeddings": ORIGINAL}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [{"text": " ".join(f"word{number}" for number in range(count))} for count in (3, 4, 60, 5)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def dataset(length: int) -> MultiModalDataset:
        given = {"dataset_type": "fineweb_edu", "packing_length": length, "cache_dir": str(tmp_path / "cache")}
        return MultiModalDataset(
            DatasetConfig(dataset_path=str(tmp_path / "data.jsonl"), model=str(folder), workers=1, check=0, **given)
        )

    with pytest.raises(DataError, match="rotary frequencies change"):
        dataset(4096).build()
    dataset(ORIGINAL).build()
