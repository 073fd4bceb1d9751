"""How many samples a second the loader delivers, and a plain DataLoader with the HF processor from the same records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from packtrain.app.datasets import MultiModalDataset, MultiModalIterableDataset
from packtrain.bench.printing import column
from packtrain.config.dataset_config import DatasetConfig

ROUNDS = 3
PLAIN = "plain DataLoader"
WAYS = ("map-style", "streaming", PLAIN)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedTask:
    """The same records twice, and how they are delivered."""

    lines: DatasetConfig  # for map-style access and the plain loader
    shards: DatasetConfig  # for streaming: compressed archives
    folder: str  # of the model
    capacity: int  # tokens of a pack
    workers: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delivered:
    """One epoch of one loader."""

    batches: int
    samples: int
    images: int
    tokens: int
    places: int  # of tokens, padding among them
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedLine:
    """One way with one number of workers: medians over the rounds, and its speed over that of the plain loader."""

    way: str = column("", "{}")
    workers: int = column("workers", "{}")
    batches: int = column("batches")
    padding: float = column("padding", "percent")
    samples_per_second: float = column("samples /s", "{:,.1f}")
    images_per_second: float = column("images /s", "{:,.1f}")
    batches_per_second: float = column("batches /s", "{:,.2f}")
    tokens_per_second: float
    ratio: float = column("x plain", "{:.2f}")
    ratio_lowest: float = column("range", lambda row: f"{row.ratio_lowest:.2f}-{row.ratio_highest:.2f}")
    ratio_highest: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The same samples, delivered every way."""

    capacity: int  # tokens of a pack
    samples: int
    images: int
    tokens: int
    rounds: int
    lines: tuple[SpeedLine, ...]


Count = Callable[[Any], tuple[int, int, int, int]]  # samples, images, tokens, places of a batch


def speed(task: SpeedTask) -> Speed:
    """Every way with every number of workers, one after the other, several rounds, after one that is not counted.

    Workers stay from round to round, so that what is measured is delivery and not the start of processes.
    """
    torch.set_num_threads(1)
    loaders = _loaders(task)
    rounds = [{key: _epoch(loader, count) for key, (loader, count) in loaders.items()} for _ in range(ROUNDS + 1)]
    first = next(iter(rounds[0].values()))
    for delivered in (one for each in rounds for one in each.values()):
        same = (delivered.samples, delivered.images, delivered.tokens) == (first.samples, first.images, first.tokens)
        assert same, "all variants deliver the same samples"
    return Speed(
        capacity=task.capacity,
        samples=first.samples,
        images=first.images,
        tokens=first.tokens,
        rounds=ROUNDS,
        lines=tuple(_line(way, workers, rounds[1:]) for workers in task.workers for way in WAYS),
    )


def epochs_needed() -> int:
    """Epochs that a plan must have for all rounds."""
    return ROUNDS + 1


def _loaders(task: SpeedTask) -> dict[tuple[str, int], tuple[Iterable[Any], Count]]:
    mapped, streamed = MultiModalDataset(task.lines), MultiModalIterableDataset(task.shards)
    mapped.build()
    streamed.build()
    epoch = mapped.plan.epoch(0)
    batch_size = max(1, round(epoch.num_entries / epoch.num_packs))  # as many tokens a batch as a pack has
    loaders: dict[tuple[str, int], tuple[Iterable[Any], Count]] = {}
    for workers in task.workers:
        loaders["map-style", workers] = (mapped.loader(num_workers=workers), _count_pack)
        loaders["streaming", workers] = (streamed.loader(num_workers=workers), _count_pack)
        path = Path(str(task.lines.dataset_path))
        plain = plain_loader(path, task.folder, batch_size=batch_size, workers=workers)
        loaders[PLAIN, workers] = (plain, _count_padded)
    return loaders


def _count_pack(batch: Any) -> tuple[int, int, int, int]:
    info = batch.info
    return info.samples, info.images, info.tokens, info.tokens + info.padding


def _count_padded(batch: Any) -> tuple[int, int, int, int]:
    return batch["samples"], batch["images"], int(batch["attention_mask"].sum()), batch["input_ids"].numel()


def _epoch(loader: Iterable[Any], count: Count) -> Delivered:
    begun = time.perf_counter()
    counts = [count(batch) for batch in loader]
    seconds = time.perf_counter() - begun
    samples, images, tokens, places = (sum(column) for column in zip(*counts, strict=True))
    return Delivered(batches=len(counts), samples=samples, images=images, tokens=tokens, places=places, seconds=seconds)


def _line(way: str, workers: int, rounds: Sequence[dict[tuple[str, int], Delivered]]) -> SpeedLine:
    mine = [each[way, workers] for each in rounds]
    # Each round beside the plain loader of the same round: both had the same neighbours on the machine.
    ratios = [each[PLAIN, workers].seconds / each[way, workers].seconds for each in rounds]
    return SpeedLine(
        way=way,
        workers=workers,
        batches=mine[0].batches,
        samples_per_second=median(one.samples / one.seconds for one in mine),
        images_per_second=median(one.images / one.seconds for one in mine),
        batches_per_second=median(one.batches / one.seconds for one in mine),
        tokens_per_second=median(one.tokens / one.seconds for one in mine),
        padding=1 - mine[0].tokens / mine[0].places,
        ratio=median(ratios),
        ratio_lowest=min(ratios),
        ratio_highest=max(ratios),
    )


# ---- the yardstick: a plain DataLoader whose collate function calls the HF processor

Messages = list[dict[str, Any]]


class PlainRecords(Dataset[Messages]):
    """The lines of a file, held in memory as such datasets do; pictures are decoded when they are asked for."""

    def __init__(self, path: Path) -> None:
        self._root = path.parent
        self._lines = path.read_bytes().splitlines()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, number: int) -> Messages:
        messages: Messages = json.loads(self._lines[number])["messages"]
        for message in messages:
            for part in message["content"]:
                if part["type"] == "image":
                    with Image.open(self._root / part["image"]) as picture:
                        part["image"] = picture.convert("RGB")
        return messages


class ProcessorCollate:
    """A padded batch, its labels, and nothing else."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoProcessor
        from transformers.utils import logging

        logging.set_verbosity_error()
        self._processor: Any = AutoProcessor.from_pretrained(folder)
        # A processor ignores a template that only its tokenizer has.
        self._template = getattr(self._processor, "chat_template", None) or self._processor.tokenizer.chat_template

    def __call__(self, batch: list[Messages]) -> dict[str, Any]:
        outputs = self._processor.apply_chat_template(
            batch,
            chat_template=self._template,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        )
        labels = outputs["input_ids"].masked_fill(outputs["attention_mask"] == 0, -100)
        images = sum(part["type"] == "image" for messages in batch for turn in messages for part in turn["content"])
        return {**outputs, "labels": labels, "samples": len(batch), "images": images}


def plain_loader(path: Path, folder: str, *, batch_size: int, workers: int) -> DataLoader[Any]:
    """Shuffled batches of a given number of records."""
    return DataLoader(
        PlainRecords(path),
        batch_size=batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(0),
        collate_fn=ProcessorCollate(folder),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
