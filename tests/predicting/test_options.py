"""Options change the estimate as they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from packtrain.core.numbers import GIB
from packtrain.families.shape import LanguageShape, VisionShape
from packtrain.predicting.memory import MemoryCoefficients, estimate_memory
from packtrain.predicting.options import Saving, savings
from packtrain.predicting.values import Load, ModelShape, ParameterCounts, TrainingSetup

# A encoder of tiles with pixel shuffle before a small decoder: 64 tokens and 1,024 patches per tile.
SHAPE = ModelShape(
    model_type="nanovlm",
    language=LanguageShape(
        hidden=960,
        layers=32,
        heads=15,
        kv_heads=5,
        head_dim=64,
        intermediate=2560,
        vocabulary=49218,
        tied=True,
        context_length=8192,
    ),
    vision=VisionShape(
        hidden=768,
        layers=12,
        heads=12,
        intermediate=3072,
        gated=False,
        patch_elements=768,
        full_attention_layers=12,
        patches_per_token=16,
        projector_flops_per_token=2 * 12288 * 960,
        projector_elements_per_token=12288 + 960,
    ),
    parameters=ParameterCounts(
        embedding=49218 * 960, layers=314_634_240, head=0, vision=85_797_120, projector=12288 * 960
    ),
    counted_from="config",
)
TILES = 252  # four packs of 4,096 tokens hold at most so many
LOAD = Load(
    tokens=4 * 4096,
    squared_tokens=4 * 4096 * 1000,
    longest=4096,
    samples=40,
    rows=4,
    supervised_tokens=4000,
    vision_tokens=64 * TILES,
    patches=1024 * TILES,
    squared_patches=1024**2 * TILES,
    largest_patches=1024,
    images=40,
)
BASE = TrainingSetup(
    gradient_checkpointing=False, vision_checkpointing=False, chunked_loss=False, attn_implementation="sdpa"
)


def by_option(found: tuple[Saving, ...]) -> dict[tuple[str, str], Saving]:
    table = {(one.option, one.change): one for one in found}
    assert len(table) == len(found), "an option is listed twice"
    return table


def test_every_saving_is_the_difference_of_two_estimates() -> None:
    now = estimate_memory(SHAPE, BASE, LOAD).total
    found = savings(SHAPE, BASE, LOAD)
    assert len(found) >= 8
    assert all(one.bytes == now - one.total_after and one.cost for one in found)
    assert [one.bytes for one in found] == sorted((one.bytes for one in found), reverse=True)
    table = by_option(found)
    on = replace(BASE, vision_checkpointing=True)
    assert table["vision checkpointing", "off -> on"].total_after == estimate_memory(SHAPE, on, LOAD).total
    assert found[0].option in ("vision checkpointing", "frozen vision encoder"), "tiles are what fills this GPU"
    assert table["vision checkpointing", "off -> on"].bytes > 50 * GIB


@pytest.mark.parametrize(
    ("changes", "expected", "absent"),
    [
        ({}, {"chunked loss", "attention", "LoRA", "QLoRA", "8-bit optimizer"}, {"sharding", "vision sub-batches"}),
        ({"gpus": 4}, {"sharding"}, set()),
        ({"vision_checkpointing": True}, {"vision sub-batches"}, set()),
        ({"train_vision": False}, {"vision sub-batches"}, {"frozen vision encoder", "vision checkpointing"}),
        ({"chunked_loss": True}, set(), {"chunked loss"}),
        ({"attn_implementation": "varlen"}, set(), {"attention"}),
        ({"method": "qlora"}, set(), {"LoRA", "QLoRA"}),
        ({"optimizer": "sgd"}, set(), {"8-bit optimizer", "factored optimizer"}),
        ({"weights_dtype": "fp32"}, {"weights in bf16"}, set()),
    ],
    ids=lambda value: "-".join(sorted(map(str, value))) or "none",
)
def test_only_what_is_not_yet_taken_is_offered(changes: dict[str, Any], expected: set[str], absent: set[str]) -> None:
    options = {one.option for one in savings(SHAPE, replace(BASE, **changes), LOAD)}
    assert expected <= options
    assert not absent & options


def test_a_model_of_text_has_no_vision_options() -> None:
    text = replace(SHAPE, vision=None)
    load = replace(LOAD, patches=0, vision_tokens=0, squared_patches=0, images=0)
    assert not [one for one in savings(text, BASE, load) if "vision" in one.option]


def test_recomputing_less_is_offered_as_memory_that_time_could_be_bought_with() -> None:
    setup = replace(BASE, gradient_checkpointing=True, vision_checkpointing=True)
    table = by_option(savings(SHAPE, setup, LOAD))
    assert table["gradient checkpointing", "on -> off"].bytes < 0
    assert "saves" in table["gradient checkpointing", "on -> off"].cost


def test_sharding_saves_states_only() -> None:
    setup = replace(BASE, gpus=8)
    table = by_option(savings(SHAPE, setup, LOAD, MemoryCoefficients(fragmentation=0)))
    assert table["sharding", "ddp -> fsdp over 8 GPUs"].bytes > 0
    states = estimate_memory(SHAPE, setup, LOAD)
    limit = states.states + states.part("communication buffers").bytes
    assert all(one.bytes <= limit for one in table.values() if one.option == "sharding")
