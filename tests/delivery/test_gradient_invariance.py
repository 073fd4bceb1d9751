"""The gradient of a step does not depend on how its samples are laid out: padded, packed or streamed, in one batch or
several, on one rank or two. All of them equal the gradient of the samples one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from processes import run_ranks
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from packtrain import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.delivery.collate.batch_values import Batch
from packtrain.delivery.encode.encoded_sample import IGNORED
from packtrain.delivery.trainers.token_loss import step_tokens, token_loss
from packtrain.families.contracts import contract_for
from packtrain.modeling.attention import set_attention
from packtrain.modeling.load import load_model
from packtrain.modeling.vision import add_empty_media_hook
from packtrain.packing.schedule import Schedule

pytestmark = pytest.mark.contract
SAMPLES = 32
LAYOUTS = ("padded", "packed", "streamed")
ACCUMULATIONS = (1, 4)
FAMILIES = ("qwen3_vl", pytest.param("internvl", marks=pytest.mark.more))
TOLERANCE = 1e-5
Gradients = dict[str, Tensor]
Weigh = Callable[[Any, Tensor, Schedule, Batch], Tensor]


def write_samples(folder: Path) -> None:
    """Answers of very different lengths, so that a mean of means is far from the mean; every third has a picture."""
    lines = []
    for number in range(SAMPLES):
        content: list[dict[str, str]] = []
        if number % 3 == 0:
            colour, side = (number * 7 % 256, number * 31 % 256, 90), 40 + 8 * (number % 4)
            Image.new("RGB", (side, side), colour).save(folder / f"{number}.png")  # square: one tile
            content.append({"type": "image", "image": f"{number}.png"})
        content.append({"type": "text", "text": f"question {number}"})
        answer = " ".join(f"word{number * 5 + place}" for place in range(1 + number**2 % 23))
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"r{number}", "messages": messages}))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")


def data_config(folder: Path, family: str, **settings: Any) -> DatasetConfig:
    return DatasetConfig(
        dataset_path=str(folder / "data.jsonl"),
        model=f"tiny:{family}",
        cache_dir=str(folder / "cache"),
        workers=1,
        check=0,
        **settings,
    )


def padded_dataset(folder: Path, family: str) -> MultiModalDataset:
    dataset = MultiModalDataset(data_config(folder, family, packing=False, packing_length=2048, packs_per_step=SAMPLES))
    dataset.build()
    assert dataset.schedule.num_steps() == 1
    return dataset


def padded_batches(folder: Path, family: str, accumulation: int, rank: int, world_size: int) -> Iterator[Batch]:
    """Rows of one sample each, as many of them in a batch as the number of batches asks for."""
    rows = SAMPLES // (accumulation * world_size)
    assert rows > 1, "several rows, so that there is padding"
    batches = list(padded_dataset(folder, family).loader(rows_per_batch=rows, rank=rank, world_size=world_size))
    assert len(batches) == accumulation
    assert sum(batch.info.samples for batch in batches) == SAMPLES // world_size
    yield from batches


def packed_config(folder: Path, family: str, packs: int) -> DatasetConfig:
    """All samples in one step of this many packs."""
    rows = padded_dataset(folder, family).plan.epoch(0)
    lengths = rows.load("tokens")
    length = max(int(lengths.sum()) // packs + int(lengths.max()) // 2, int(lengths.max()))
    return data_config(folder, family, packing_length=length, packs_per_step=packs)


def packed_batches(
    kind: type[Any], folder: Path, family: str, accumulation: int, rank: int, world_size: int
) -> Iterator[Batch]:
    dataset = kind(packed_config(folder, family, accumulation * world_size))
    dataset.build()
    assert dataset.schedule.num_steps() == 1
    assert (accumulation - 1) * world_size < len(dataset.plan.epoch(0).ends) <= accumulation * world_size
    collate = dataset.get_collator()
    if kind is MultiModalIterableDataset:
        yield from (collate([row]) for row in dataset)
    else:
        yield from dataset.loader(collate, rank=rank, world_size=world_size)


def batches_of(
    layout: str, folder: Path, family: str, accumulation: int, rank: int, world_size: int
) -> tuple[Schedule, list[Batch]]:
    if layout == "padded":
        schedule = padded_dataset(folder, family).schedule
        return schedule, list(padded_batches(folder, family, accumulation, rank, world_size))
    kind = MultiModalDataset if layout == "packed" else MultiModalIterableDataset
    dataset = MultiModalDataset(packed_config(folder, family, accumulation * world_size))
    dataset.build()
    return dataset.schedule, list(packed_batches(kind, folder, family, accumulation, rank, world_size))


def fresh_model(folder: Path, family: str) -> Any:
    model = load_model(f"tiny:{family}", cache_dir=folder / "models").train()
    contract = contract_for(model.config.to_dict())
    set_attention(model, "sdpa", contract)
    add_empty_media_hook(model, contract)
    return model


def by_tokens(outputs: Any, labels: Tensor, schedule: Schedule, batch: Batch) -> Tensor:
    return token_loss(outputs, labels, step_tokens(schedule, batch))


def by_means(outputs: Any, labels: Tensor, schedule: Schedule, batch: Batch) -> Tensor:
    """The fault that this is about: the mean of the means of 4 batches."""
    return token_loss(outputs, labels) / 4


def gradients(
    layout: str,
    folder: Path,
    family: str,
    accumulation: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    weigh: Weigh = by_tokens,
) -> tuple[Gradients, list[str]]:
    """The gradients after one step, and the samples that this rank had."""
    schedule, batches = batches_of(layout, folder, family, accumulation, rank, world_size)
    assert len(batches) == accumulation
    model = fresh_model(folder, family)
    trained = DistributedDataParallel(model) if world_size > 1 else model
    for batch in batches:
        last = batch.info.keys[0].last
        labels = batch.pop("labels")
        with trained.no_sync() if world_size > 1 and not last else nullcontext():
            (weigh(trained(**batch), labels, schedule, batch) * world_size).backward()
    ids = [name for batch in batches for name in batch.info.ids]
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}, ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("invariance")
    write_samples(made)
    return made


@cache
def alone(folder: Path, family: str) -> Gradients:
    """Sample by sample, with a loss written out here."""
    dataset, model = padded_dataset(folder, family), fresh_model(folder, family)
    collate, tokens = dataset.get_collator(), 0
    for pack in range(SAMPLES):
        batch = collate([dataset[pack]])
        targets = batch.pop("labels")[0, 1:]
        logits = model(**batch).logits[0, :-1]
        cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").backward()
        tokens += int((targets != IGNORED).sum())
    found = {name: weight.grad / tokens for name, weight in model.named_parameters()}
    assert max(float(grad.abs().max()) for grad in found.values()) > 0.01, "there is something to compare"
    vision = [name for name in found if "visual" in name or "vision" in name]
    assert max(float(found[name].abs().max()) for name in vision) > TOLERANCE, "pictures matter"
    return found


def difference(left: Gradients, right: Gradients) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.mark.parametrize("accumulation", ACCUMULATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank(folder: Path, family: str, layout: str, accumulation: int) -> None:
    found, ids = gradients(layout, folder, family, accumulation)
    assert sorted(ids) == sorted(f"r{number}" for number in range(SAMPLES))
    assert difference(found, alone(folder, family)) < TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mean_of_means_would_be_seen(folder: Path, family: str) -> None:
    found, _ = gradients("packed", folder, family, 4, weigh=by_means)
    assert difference(found, alone(folder, family)) > 10 * TOLERANCE


def train_rank(rank: int, folder: str, family: str) -> list[str]:
    """Every layout in one start of the processes, since that is what takes long."""
    torch.set_num_threads(1)
    seen = []
    for layout in LAYOUTS:
        for accumulation in ACCUMULATIONS:
            found, ids = gradients(
                layout, Path(folder), family, accumulation, rank=rank, world_size=dist.get_world_size()
            )
            torch.save(found, Path(folder, f"{family}-{layout}-{accumulation}-{rank}.pt"))
            seen.append(f"{layout} {accumulation}: {' '.join(ids)}")
    return seen


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("internvl", marks=pytest.mark.more)])
def test_two_ranks(folder: Path, family: str, tmp_path: Path) -> None:
    answers = run_ranks(2, train_rank, str(folder), family, folder=tmp_path)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    for lines in zip(*answers, strict=True):
        seen = [name for line in lines for name in line.split(": ")[1].split()]
        assert sorted(seen) == sorted(f"r{number}" for number in range(SAMPLES)), lines
    for layout in LAYOUTS:
        for accumulation in ACCUMULATIONS:
            for rank in range(2):
                found = torch.load(folder / f"{family}-{layout}-{accumulation}-{rank}.pt")
                assert difference(found, alone(folder, family)) < TOLERANCE, (layout, accumulation, rank)
