"""Two ranks under Trainer: each pack on exactly one of them, and what the obvious ways do instead."""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_packs import plan_of, reads
from processes import run_ranks
from small_training import Model, Packs, PackTrainer, PlainTrainer, arguments, trainer_of, weights
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import default_collate

from packtrain.delivery.trainers.mixin import trainer_arguments
from packtrain.delivery.trainers.token_loss import token_loss

pytestmark = [pytest.mark.contract, pytest.mark.full]
EPOCHS = (10, 7)  # with 4 packs a step: 3 and 2 steps
PACKS = Counter((epoch, pack) for epoch, packs in enumerate(EPOCHS) for pack in range(packs))
NUM_PACKS = 12  # of the obvious ways


def launch(world_size: int, target: Any, *args: Any, folder: Path) -> list[Any]:
    answers = run_ranks(world_size, target, world_size, *args, folder=folder)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers


@functools.cache
def _restore_to_cpu() -> None:
    """Ranks on CPUs are "cpu:0" to accelerate, and torch 2.11 restores checkpoints to "cpu" only."""
    torch.serialization.register_package(
        5, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
    )


def as_launched(rank: int, world_size: int) -> None:
    """The environment that a launcher sets; the process group is there already."""
    torch.set_num_threads(1)
    _restore_to_cpu()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "ACCELERATE_USE_CPU": "true"}


def train_packs(rank: int, world_size: int, folder: str, checkpoint: str | None, workers: int = 0) -> Any:
    as_launched(rank, world_size)
    data = Packs(plan_of(*EPOCHS), log=Path(folder) / f"log-{rank}")
    trainer = trainer_of(data, Path(folder), ddp_backend="gloo", dataloader_num_workers=workers)
    trainer.train(resume_from_checkpoint=checkpoint)
    found = [weight.tolist() for weight in weights(trainer)]
    return trainer.trained, found, reads(Path(folder) / f"log-{rank}")


def evaluate_packs(rank: int, world_size: int, folder: str) -> float:
    as_launched(rank, world_size)
    trainer = trainer_of(Packs(plan_of(*EPOCHS)), Path(folder), ddp_backend="gloo")
    return trainer.evaluate(Packs(plan_of(7)))["eval_loss"]


def real(trained: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [key for key in trained if key[1] >= 0]


# ---- the obvious ways


class Mine(IterableDataset):
    """Packs of this rank only, as a rank-aware stream would give them."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for pack in range(self.rank, NUM_PACKS, self.world_size):
            ids = torch.arange(4) + pack
            yield {"input_ids": ids, "labels": ids, "pack": torch.tensor(pack)}


def train_stream(rank: int, world_size: int, folder: str, dispatch: bool) -> Any:
    as_launched(rank, world_size)
    args = arguments(
        Path(folder),
        ddp_backend="gloo",
        per_device_train_batch_size=1,
        max_steps=3,
        save_strategy="no",
        remove_unused_columns=False,
        accelerator_config={"dispatch_batches": dispatch},
    )
    trainer = PlainTrainer(
        model=Model(), args=args, train_dataset=Mine(rank, world_size), data_collator=default_collate
    )
    trainer.train()
    return trainer.trained


class Prepared(PackTrainer):
    """Our loader handed to accelerate, as Trainer does with its own."""

    def get_train_dataloader(self) -> DataLoader:
        return self.accelerator.prepare(super().get_train_dataloader())


def train_prepared(rank: int, world_size: int, folder: str) -> Any:
    as_launched(rank, world_size)
    data = Packs(plan_of(*EPOCHS))
    options = {**trainer_arguments(data.schedule), "max_steps": 2, "save_strategy": "no", "ddp_backend": "gloo"}
    trainer = Prepared(model=Model(), args=arguments(Path(folder), **options), train_dataset=data, data_collator=None)
    trainer.train()
    return trainer.trained


# ---- one start of two processes for all of them, since that is what takes long

RESUMED = ((2, 0), (3, 2), (4, 0))  # after this step, with this many workers


def train_all(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {"whole": train_packs(rank, world_size, f"{folder}/whole", None)}
    found["evaluated"] = evaluate_packs(rank, world_size, f"{folder}/evaluated")
    for step, workers in RESUMED:
        checkpoint = f"{folder}/whole/checkpoint-{step}"
        found[f"resumed {step}"] = train_packs(rank, world_size, f"{folder}/resumed-{step}", checkpoint, workers)
    for dispatch in (True, False):
        found[f"stream {dispatch}"] = train_stream(rank, world_size, f"{folder}/stream", dispatch)
    return {**found, "prepared": train_prepared(rank, world_size, f"{folder}/prepared")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What both ranks say of every run."""
    return launch(2, train_all, str(folder), folder=folder / "meeting")


def test_each_pack_is_trained_on_one_rank(ranks: list[dict[str, Any]]) -> None:
    (first, weights_first, _), (second, weights_second, _) = (rank["whole"] for rank in ranks)
    assert len(first) == len(second) == 10
    assert Counter(real(first)) + Counter(real(second)) == PACKS
    assert weights_first == weights_second


def test_an_evaluation_is_over_the_tokens_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    """The last of seven packs stands beside one that fills up."""
    model, batches = Model().eval(), list(Packs(plan_of(7)).loader(rank=0, world_size=1))
    total = sum(token_loss(model(batch["input_ids"]), batch["labels"], 1).item() for batch in batches)
    wanted = total / sum(batch.info.supervised_tokens for batch in batches)
    assert [rank["evaluated"] for rank in ranks] == pytest.approx([wanted, wanted], abs=1e-5)


@pytest.mark.parametrize("step", [step for step, _ in RESUMED])
def test_resumed_it_is_the_same_run_bit_by_bit(ranks: list[dict[str, Any]], step: int) -> None:
    for rank in ranks:
        (trained, found, read), (all_trained, all_found, _) = rank[f"resumed {step}"], rank["whole"]
        assert trained == all_trained[2 * step :]
        assert found == all_found
        assert sorted(read) == sorted(pack for _, pack in real(trained)), "nothing that is skipped is read"


def test_saved_on_two_ranks_and_resumed_on_one(ranks: list[dict[str, Any]], folder: Path, tmp_path: Path) -> None:
    checkpoint = str(folder / "whole" / "checkpoint-2")
    again = launch(1, train_packs, str(tmp_path), checkpoint, folder=tmp_path / "meeting")
    done = [key for rank in ranks for key in real(rank["whole"][0][:4])]
    assert Counter(done) + Counter(real(again[0][0])) == PACKS


def test_a_stream_that_is_dispatched_serves_the_packs_of_one_rank_only(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stream True"] for rank in ranks] == [[0, 4, 8], [2, 6, 10]], "1, 3, 5, ... are never trained"


def test_a_stream_that_is_not_dispatched_is_shared_out_twice(ranks: list[dict[str, Any]]) -> None:
    assert [rank["stream False"] for rank in ranks] == [[0, 4, 8], [3, 7, 11]], "half of them are never trained"


def test_a_loader_that_accelerate_prepares_is_shared_out_twice(ranks: list[dict[str, Any]]) -> None:
    trained = [key for rank in ranks for key in real(rank["prepared"])]
    wanted = [key for rank in ranks for key in real(rank["whole"][0][:4])]
    assert len(set(trained)) < len(wanted), "in the same two steps"
