"""LoRA in half precision on two ranks, as DDP and sharded by FSDP2: masters, checkpoints and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import dataset, losses, model_of, shared, trainer_of, weights, whole, write_samples
from test_trainer_sharded import FAMILY, answered, as_launched, fresh, launch, options_of, packs

from packtrain.training.masters import MASTER, masters_of

pytestmark = pytest.mark.full
STEPS = 4


def train(place: str, folder: str, way: str, checkpoint: str | None = None) -> Any:
    """What was found of a run: losses, adapters and their masters, and how many are sharded."""
    model = model_of(FAMILY, dropout=0.0, method="lora", lora_rank=4).to(torch.bfloat16)
    trainer = trainer_of(
        packs(place), Path(folder), model, parts={"watch_deadline": 30.0}, save_steps=2, max_steps=STEPS,
        learning_rate=1e-3, **options_of(way),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=checkpoint)
    optimizer = masters_of(trainer.optimizer)
    assert optimizer is not None
    named = {id(weight): name for name, weight in trainer.accelerator.unwrap_model(trainer.model).named_parameters()}
    masters = {named[id(weight)]: state[MASTER] for weight, state in optimizer.state.items()}
    sharded = sum(hasattr(master, "full_tensor") for master in masters.values())
    adapters = {name: weight for name, weight in weights(trainer).items() if "lora_" in name}
    return losses(trainer), adapters, {name: whole(one).clone() for name, one in masters.items()}, sharded


def runs_of(rank: int, world_size: int, place: str, folder: str, way: str) -> str:
    as_launched(rank, world_size)
    made = {}
    for name, checkpoint in (("whole", None), ("resumed", f"{folder}/{way}-whole/checkpoint-2")):
        fresh(way)
        made[name] = train(place, f"{folder}/{way}-{name}", way, checkpoint)
    return answered(made, f"{folder}/{way}-{rank}.pt")


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_resumed_it_is_the_same_run(way: str, tmp_path: Path) -> None:
    place = shared() / "sharded"
    write_samples(place)
    dataset(FAMILY, folder=place)
    for rank in launch(2, runs_of, str(place), str(tmp_path), way, folder=tmp_path / "meeting"):
        found, adapters, masters, sharded = rank["whole"]
        assert len(found) == STEPS
        assert masters.keys() == adapters.keys(), "nothing but adapters learns"
        assert sharded == (len(masters) if way == "fsdp" else 0)
        assert all(torch.equal(adapters[name], master.to(torch.bfloat16)) for name, master in masters.items())
        assert any(not torch.equal(adapters[name].float(), master) for name, master in masters.items())
        assert rank["resumed"][0] == found
        for one, other in ((adapters, rank["resumed"][1]), (masters, rank["resumed"][2])):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)
