"""A real model under transformers.Trainer on a dataset of packs: trained, saved, resumed, bit by bit the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

from packtrain import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.batches.trainer import PackedTraining, trainer_arguments
from packtrain.models.tiny import build_model, write

pytestmark = [pytest.mark.full, pytest.mark.contract]


class PackTrainer(PackedTraining, Trainer):
    """As a user writes it."""

    def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        self.seen = [*getattr(self, "seen", []), inputs.info]
        return super().training_step(model, inputs, *more, **options)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> DatasetConfig:
    folder = tmp_path_factory.mktemp("data")
    turns = [
        [
            {"role": "user", "content": " ".join(f"word{number}" for _ in range(1 + number % 7))},
            {"role": "assistant", "content": f"it is {number}"},
        ]
        for number in range(30)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return DatasetConfig(
        dataset_path=str(folder / "data.jsonl"),
        model="tiny:qwen3_vl",
        packing_length=160,
        packs_per_step=3,
        epochs=2,
        measuring={"workers": 1, "check": 0},
        cache_dir=str(folder / "cache"),
    )


def train(dataset: Any, folder: Path, checkpoint: Path | None = None, workers: int = 0) -> PackTrainer:
    torch.manual_seed(0)
    args = TrainingArguments(
        output_dir=str(folder),
        learning_rate=1e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_steps=1,
        logging_steps=1,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
        **trainer_arguments(dataset.schedule),
    )
    model = build_model(write("qwen3_vl", folder / "model"))
    trainer = PackTrainer(model=model, args=args, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None)
    return trainer


def weights(trainer: PackTrainer) -> list[torch.Tensor]:
    return [weight.detach() for weight in trainer.model.parameters()]


def test_trained_and_resumed_over_both_ways(config: DatasetConfig, tmp_path: Path) -> None:
    mapped, streamed = MultiModalDataset(config), MultiModalIterableDataset(config)
    for dataset in (mapped, streamed):
        dataset.build()
    whole = train(mapped, tmp_path / "whole")
    assert whole.state.global_step == mapped.schedule.num_steps() > 4
    rows = sorted(row for info in whole.seen for row in info.rows)
    assert rows == sorted([*range(30), *range(30)])
    first, last = (line["loss"] for line in (whole.state.log_history[0], whole.state.log_history[-2]))
    assert last < first
    for dataset, step, workers in ((mapped, 2, 0), (streamed, 4, 2)):
        again = train(dataset, tmp_path / f"again-{step}", tmp_path / "whole" / f"checkpoint-{step}", workers)
        assert [info.keys for info in again.seen] == [info.keys for info in whole.seen[3 * step :]]
        assert all(torch.equal(one, other) for one, other in zip(weights(again), weights(whole), strict=True))
