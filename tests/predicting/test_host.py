"""What the node needs: every number by hand, and nothing twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from packtrain.core.errors import ConfigError
from packtrain.core.numbers import GIB
from packtrain.families.shape import LanguageShape, VisionShape
from packtrain.predicting.host_memory import PROCESS_BYTES, HostNeeds, batch_bytes, host_needs
from packtrain.predicting.values import Load, ModelShape, ParameterCounts, TrainingSetup

SHAPE = ModelShape(
    model_type="qwen3_vl",
    language=LanguageShape(
        hidden=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=128,
        vocabulary=1000,
        tied=False,
        context_length=4096,
    ),
    vision=VisionShape(
        hidden=32, layers=2, heads=2, intermediate=64, gated=False, patch_elements=1536, full_attention_layers=2
    ),
    parameters=ParameterCounts(embedding=64_000, layers=74_112, head=64_000, vision=90_000, projector=10_000),
    counted_from="config",
)
LOAD = Load(tokens=20_000, squared_tokens=1, longest=4000, patches=30_000, vision_tokens=7_500)
TOTAL = SHAPE.parameters.total
SMALL = TrainingSetup(method="lora", lora_rank=4, train_vision=False, train_projector=False)


def needs(setup: TrainingSetup | None = None, **changes: Any) -> HostNeeds:
    given = {"workers": 4, "prefetch": 2, "gpus_per_node": 8, **changes}
    return host_needs(shape=SHAPE, setup=setup or TrainingSetup(), load=LOAD, **given)


def sizes(parts: Any) -> dict[str, int]:
    assert all(part.why for part in parts)
    return {part.name: part.bytes for part in parts}


def test_batches_that_wait_lie_in_shared_memory() -> None:
    batch = 20_000 * 64 + 30_000 * 1536 * 4
    assert batch_bytes(SHAPE, LOAD) == batch
    found = needs()
    assert found.shared_memory_bytes == 8 * 4 * 2 * batch
    assert found.shared_memory_bytes > 10 * GIB
    assert needs(pixel_bytes=2).shared_memory_bytes < 0.51 * found.shared_memory_bytes
    assert needs(workers=0).shared_memory_bytes == 0


def test_memory_by_hand() -> None:
    batch = batch_bytes(SHAPE, LOAD)
    assert sizes(needs(plan_bytes=5).memory) == {
        "training processes": 8 * PROCESS_BYTES,
        "loader workers": 32 * (PROCESS_BYTES + 2 * batch),
        "pinned batches": 16 * batch,
        "weights": 2 * TOTAL,
        "plan": 5,
    }
    found = needs()
    assert found.memory_bytes == sum(sizes(found.memory).values()) + found.shared_memory_bytes


def test_disk_of_full_training() -> None:
    found = sizes(needs(cost_table_bytes=11, plan_bytes=7, cache_bytes=10 * GIB, checkpoints_kept=3).disk)
    checkpoint = 2 * TOTAL + 12 * TOTAL  # weights; masters and two states in fp32
    assert found == {
        "cost table": 11,
        "plan": 7,
        "cache": 10 * GIB,
        "checkpoints": 4 * checkpoint,
        "final weights": 2 * TOTAL,
    }
    assert sizes(needs(checkpoints_kept=0).disk)["checkpoints"] == 0


def test_sharding_does_not_change_what_lies_on_disk() -> None:
    one, eight = (sizes(needs(TrainingSetup(sharding="fsdp", gpus=gpus)).disk) for gpus in (1, 8))
    assert one == eight
    held = sizes(needs(TrainingSetup(sharding="fsdp", gpus=8)).memory)
    assert held["weights"] == 2 * TOTAL, "all of them, when they are loaded or gathered"
    frozen = (replace(SMALL, sharding="fsdp", gpus=gpus) for gpus in (1, 8))
    assert len({sizes(needs(setup).memory)["weights"] for setup in frozen}) == 1
    assert one["checkpoints"] == 2 * 14 * TOTAL  # weights; masters and two states in fp32
    masters = sizes(needs(TrainingSetup(sharding="zero2", gpus=8)).disk)
    assert masters["checkpoints"] == 2 * 14 * TOTAL


def test_adapters_save_only_themselves() -> None:
    layer = 4 * (2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 128) + (128 + 64))
    adapters = 2 * layer
    found = sizes(needs(SMALL, checkpoints_kept=1).disk)
    assert found["final weights"] == 2 * adapters
    assert found["checkpoints"] == 2 * (2 + 12) * adapters
    wide = sizes(needs(replace(SMALL, master_weights=False), checkpoints_kept=1).disk)
    assert (wide["final weights"], wide["checkpoints"]) == (4 * adapters, 2 * (4 + 8) * adapters)
    beside = sizes(needs(replace(SMALL, train_vision=True)).disk)
    assert beside["final weights"] == 2 * adapters + 2 * 90_000


@pytest.mark.parametrize("name", ["workers", "prefetch", "gpus_per_node", "checkpoints_kept"])
def test_negative_numbers_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        needs(**{name: -1})
