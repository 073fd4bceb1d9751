"""Models whose rotary frequencies follow the longest sample of a row: a long sample must not stand beside others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from packtrain import DatasetConfig, MultiModalDataset
from packtrain.batches.collate import PackCollator
from packtrain.core.errors import DataError
from packtrain.families.contracts import BatchContract, contract_for
from packtrain.models.tiny import write
from packtrain.packs.made_up import made_sample
from packtrain.packs.values import EncodedSample, PackedRow, PackKey

ORIGINAL = 32
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10_000.0}


def sample(name: str, tokens: int) -> EncodedSample:
    return made_sample(name, (torch.arange(tokens) * 7 + len(name)) % 90, supervised=tokens - 1)


def logits(model: Any, contract: BatchContract, *samples: EncodedSample) -> torch.Tensor:
    batch = dict(PackCollator(contract, pad_id=0)([PackedRow(key=PackKey(0, 0), samples=samples)]))
    del batch["labels"]
    with torch.no_grad():
        return model(**batch).logits[0]


def test_a_long_neighbour_is_refused_because_it_would_change_the_others() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=ORIGINAL,
        rope_parameters=DYNAMIC,
        initializer_range=0.1,
    )
    model = LlamaForCausalLM(config).eval()
    contract = contract_for(config.to_dict())
    assert contract.longest_together == ORIGINAL
    short, other, long = sample("short", 12), sample("other", 20), sample("long", ORIGINAL + 8)
    alone = logits(model, contract, short)
    assert (logits(model, contract, short, other)[:12] - alone).abs().max() < 1e-5
    with pytest.raises(DataError, match=r"(?s)sample long of 40 tokens.*packing_length 32"):
        logits(model, contract, short, long)
    assert len(logits(model, contract, long)) == len(long), "alone it is as it is meant"
    blind = BatchContract(model_type="llama")
    assert (logits(model, blind, short, long)[:12] - alone).abs().max() > 1e-3, "else there was nothing to refuse"


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
        measuring = {"workers": 1, "check": 0}
        return MultiModalDataset(
            DatasetConfig(dataset_path=str(tmp_path / "data.jsonl"), model=str(folder), measuring=measuring, **given)
        )

    with pytest.raises(DataError, match="other frequencies"):
        dataset(4096).build()
    dataset(ORIGINAL).build()
