"""A real model under transformers.Trainer on a dataset of packs: trained, saved, resumed, bit by bit the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Trainer, TrainingArguments

from packtrain import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.core.errors import DataError
from packtrain.delivery.loader.failures import FailureCounter
from packtrain.delivery.trainers.mixin import PackedTrainerMixin, trainer_arguments
from packtrain.families.tiny import write
from packtrain.modeling.load import build_model

pytestmark = pytest.mark.full


class PackTrainer(PackedTrainerMixin, Trainer):
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
        workers=1,
        check=0,
        cache_dir=str(folder / "cache"),
    )


def train(dataset: Any, folder: Path, checkpoint: Path | None = None, workers: int = 0, **options: Any) -> PackTrainer:
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
    trainer = PackTrainer(model=model, args=args, train_dataset=dataset, **options)
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


def with_broken_images(folder: Path) -> MultiModalDataset:
    """Twelve samples with an image each, of which two were cut off after they had been measured."""
    folder.mkdir()
    lines = []
    for number in range(12):
        Image.effect_noise((40, 36), 90).convert("RGB").save(folder / f"{number}.png")
        shown = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": f"what is {number}?"}]
        turns = [{"role": "user", "content": shown}, {"role": "assistant", "content": f"it is {number}"}]
        lines.append(json.dumps({"id": f"r{number}", "messages": turns}) + "\n")
    (folder / "data.jsonl").write_text("".join(lines))
    given = {"packing_length": 160, "packs_per_step": 2, "epochs": 2, "workers": 1, "check": 0}
    place = {"dataset_path": str(folder / "data.jsonl"), "cache_dir": str(folder / "cache")}
    dataset = MultiModalDataset(DatasetConfig(model="tiny:qwen3_vl", **place, **given))
    dataset.build()
    for number in (3, 8):
        (folder / f"{number}.png").write_bytes((folder / f"{number}.png").read_bytes()[:400])
    return dataset


def test_what_cannot_be_decoded_is_in_the_ledger_once(tmp_path: Path) -> None:
    dataset = with_broken_images(tmp_path / "data")
    lenient = {"failures": FailureCounter(max_failure_rate=0.5, ledger_path=tmp_path / "out" / "ledger.jsonl")}
    whole = train(dataset, tmp_path / "out", **lenient)
    seen = [identity for info in whole.seen for identity in info.ids]
    assert sorted(seen) == sorted(2 * [f"r{number}" for number in range(12) if number not in (3, 8)])
    written = (tmp_path / "out" / "ledger.jsonl").read_text()
    assert sorted(json.loads(line)["id"] for line in written.splitlines()) == ["r3", "r3", "r8", "r8"]
    again = {"failures": FailureCounter(max_failure_rate=0.5, ledger_path=tmp_path / "out" / "ledger.jsonl")}
    train(dataset, tmp_path / "out", tmp_path / "out" / "checkpoint-2", **again)
    assert (tmp_path / "out" / "ledger.jsonl").read_text() == written, "no line is there twice"


def test_too_many_stop_at_the_end_of_a_step(tmp_path: Path) -> None:
    dataset = with_broken_images(tmp_path / "data")
    strict = FailureCounter(max_failure_rate=0.0, judged_after=0)
    with pytest.raises(DataError, match="could not be delivered"):
        train(dataset, tmp_path / "out", failures=strict)
    assert strict.verdict.failures in (1, 2)
