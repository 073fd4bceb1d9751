"""Datasets with `packing: false`: several samples a batch, grouped by length or not, and what the config refuses."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from packtrain import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.core.errors import ConfigError, DataError
from packtrain.delivery.collate.join import count_patches
from packtrain.delivery.encode.encoded_sample import IGNORED

SAMPLES = 30
KEPT, SILENT = "kept answer that is learned", "silent answer that is not learned"


def record(number: int) -> dict[str, Any]:
    """A first answer that carries no loss, a second one that does, of very different lengths; some have pictures."""
    words = " ".join(f"w{place}" for place in range(1 + number * number % 37))
    question: list[dict[str, str]] = [{"type": "image", "image": f"{number}.png"}] if number % 5 == 0 else []
    return {
        "id": f"r{number}",
        "messages": [
            {"role": "user", "content": [*question, {"type": "text", "text": f"first {number}"}]},
            {"role": "assistant", "content": SILENT, "train": False},
            {"role": "user", "content": "second"},
            {"role": "assistant", "content": f"{KEPT} {words}"},
        ],
    }


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("padded")
    for number in range(0, SAMPLES, 5):
        Image.new("RGB", (48 + 16 * (number % 3), 40), (number, 90, 200)).save(folder / f"{number}.png")
    (folder / "data.jsonl").write_text("\n".join(json.dumps(record(number)) for number in range(SAMPLES)) + "\n")
    return folder / "data.jsonl"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def config(path: Path, cache: Path, **settings: Any) -> DatasetConfig:
    usual: dict[str, Any] = {
        "dataset_path": str(path),
        "model": "tiny:qwen3_vl",
        "packing": False,
        "packing_length": 256,
        "rows_per_batch": 4,
        "packs_per_step": 12,
        "seed": 5,
        "workers": 1,
        "check": 0,
        "cache_dir": str(cache),
    }
    return DatasetConfig(**{**usual, **settings})


def built(given: DatasetConfig, kind: type[Any] = MultiModalDataset) -> Any:
    dataset = kind(given)
    dataset.build()
    return dataset


# ---- batches


def test_every_sample_is_a_row_of_some_batch(lines: Path, cache: Path) -> None:
    batches = list(built(config(lines, cache)).loader())
    assert [len(batch["input_ids"]) for batch in batches] == [4, 4, 4, 4, 4, 4, 2, 4]
    assert Counter(row for batch in batches for row in batch.info.rows) == Counter(range(SAMPLES))
    assert sum(batch.info.padding for batch in batches) > 0
    for batch in batches:
        assert batch["attention_mask"].sum() == batch.info.tokens
        assert batch["input_ids"].numel() == batch.info.tokens + batch.info.padding


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_both_ways_deliver_the_same_rows(lines: Path, cache: Path, workers: int) -> None:
    given = config(lines, cache)
    mapped, streamed = built(given), built(given, MultiModalIterableDataset)
    whole = list(mapped.loader())
    plain = DataLoader(streamed, batch_size=4, collate_fn=streamed.get_collator(), num_workers=workers)
    for other in (streamed.loader(num_workers=workers), plain):
        for one, again in zip(whole, other, strict=True):
            assert one.info == again.info
            assert torch.equal(one["input_ids"], again["input_ids"])
    assert len(streamed) == 4 * len(whole)


def test_packed_and_padded_hold_the_same_samples_in_the_same_tokens(lines: Path, cache: Path) -> None:
    packed, padded = (
        list(built(config(lines, cache, **more)).loader())
        for more in ({"packing": True, "rows_per_batch": 1, "packs_per_step": 3}, {})
    )
    assert max(batch.info.samples for batch in packed) > 1
    for name in ("tokens", "supervised_tokens", "images", "patches", "tiles", "squared_tokens", "squared_patches"):
        assert sum(getattr(b.info, name) for b in packed) == sum(getattr(b.info, name) for b in padded) > 0, name


def test_padded_packs_hold_the_samples_of_packs_step_by_step(lines: Path, cache: Path) -> None:
    of_packs = {"rows_per_batch": 1, "packs_per_step": 3}
    packed = built(config(lines, cache, packing=True, **of_packs))
    padded = built(config(lines, cache, pad_packs=True, **of_packs))
    assert padded.plan.fingerprint == packed.plan.fingerprint
    assert padded.schedule.hash == packed.schedule.hash
    computed = 0
    for one, other in zip(packed.loader(), padded.loader(), strict=True):
        assert (other.info.rows, other.info.keys) == (one.info.rows, one.info.keys)
        assert len(one["input_ids"]) == 1
        assert len(other["input_ids"]) == other.info.samples == one.info.samples
        computed += other["input_ids"].numel()
    assert max(batch.info.samples for batch in padded.loader()) > 1
    tokens = int(padded.plan.epoch(0).load("tokens").sum())
    assert 0 < padded.schedule.padding_share(1) == pytest.approx(1 - tokens / computed)
    assert padded.describe().padding == padded.schedule.padding_share(1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"packing": True, "rows_per_batch": 1}, "pad_packs: true with packing: true"),
        ({"rows_per_batch": 4}, "rows_per_batch: 4 with pad_packs: true"),
        ({"rows_per_batch": 1, "group_by_length": True}, "group_by_length: true with pad_packs: true"),
        ({"rows_per_batch": 1, "pad_packs": "yes"}, "pad_packs: 'yes' instead of true or false"),
    ],
)
def test_what_padded_packs_contradict(lines: Path, cache: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(lines, cache, **{"pad_packs": True, **settings})
    assert words in str(caught.value)


# ---- order


def test_the_order_follows_from_packing_and_grouping(lines: Path, cache: Path) -> None:
    orders = {
        (packing, grouped, balance): config(
            lines, cache, packing=packing, group_by_length=grouped, balance=balance, rows_per_batch=1
        ).order
        for packing, grouped, balance in (
            (True, False, None),
            (True, False, "strict"),
            (False, False, None),
            (False, False, "sorted"),
            (False, True, None),
            (False, True, "length"),
        )
    }
    assert list(orders.values()) == ["sorted", "strict", "random", "sorted", "length", "length"]


def test_grouping_saves_padding_and_biases_steps(lines: Path, cache: Path) -> None:
    found = {}
    for grouped in (False, True):
        dataset = built(config(lines, cache, group_by_length=grouped, packs_per_step=4))
        batches = list(dataset.loader())
        assert Counter(row for batch in batches for row in batch.info.rows) == Counter(range(SAMPLES))
        padding, tokens = (sum(getattr(batch.info, name) for batch in batches) for name in ("padding", "tokens"))
        share = padding / (padding + tokens)
        assert dataset.describe().padding == pytest.approx(share)
        found[grouped] = share, float(np.std([np.mean(batch.info.lengths) for batch in batches]))
    assert found[True][0] < 0.5 * found[False][0], "similar lengths share a batch"
    assert found[True][1] > 1.3 * found[False][1], "and steps differ more from each other than random ones do"


@pytest.mark.parametrize(("world_size", "rows", "size"), [(1, 4, 12), (2, 3, 10), (3, 2, 7), (1, 1, 5)])
def test_the_padding_of_a_schedule_is_that_of_its_batches(
    lines: Path, cache: Path, world_size: int, rows: int, size: int
) -> None:
    dataset = built(config(lines, cache, rows_per_batch=rows, packs_per_step=size))
    batches = [
        batch
        for rank in range(world_size)
        for batch in dataset.loader(rank=rank, world_size=world_size)
        if batch.info.samples
    ]
    padding, tokens = (sum(getattr(batch.info, name) for batch in batches) for name in ("padding", "tokens"))
    assert dataset.schedule.padding_share(rows, world_size=world_size) == pytest.approx(padding / (padding + tokens))


# ---- messages without loss


@pytest.mark.parametrize("packing", [True, False])
def test_a_message_that_is_not_to_be_trained_carries_no_loss(lines: Path, cache: Path, packing: bool) -> None:
    more: dict[str, Any] = {"packing": True, "rows_per_batch": 1, "packs_per_step": 3} if packing else {}
    dataset = built(config(lines, cache, **more))
    tokenizer = Tokenizer.from_file(str(Path(dataset.encoder.request.settings().folder) / "tokenizer.json"))
    measured = [dataset.source._rows.row(number).supervised_tokens for number in range(SAMPLES)]
    seen = 0
    for batch in dataset.loader():
        labels = batch["labels"]
        assert batch.info.supervised_tokens == int((labels != IGNORED).sum())
        assert batch.info.supervised_tokens == sum(measured[row] for row in batch.info.rows)
        learned = tokenizer.decode(labels[labels != IGNORED].tolist())
        shown = tokenizer.decode(batch["input_ids"].flatten().tolist())
        assert "silent" in shown
        assert "silent" not in learned
        assert learned.count("kept answer") == batch.info.samples
        seen += batch.info.samples
    assert seen == SAMPLES


# ---- counts of every family


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_vl", "llava_next"),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("idefics3", "internvl", "gemma3", "llava")),
    ],
)
def test_patches_and_tiles_are_known_without_asking(lines: Path, tmp_path: Path, family: str) -> None:
    dataset = built(config(lines, tmp_path, model=f"tiny:{family}", packing_length=8192))
    patch = {"qwen3_vl": 16}.get(family) or _patch_side(dataset)
    for batch in dataset.loader():
        samples = [sample for key in batch.info.keys for sample in dataset[key].samples]
        assert batch.info.patches == count_patches(samples, patch)
        assert (batch.info.tiles > 0) == (batch.info.images > 0)
        if family == "qwen3_vl" and batch.info.images:
            areas = batch["image_grid_thw"][:, 1:].prod(-1)
            assert batch.info.squared_patches == int((areas**2).sum())
            assert batch.info.tiles == batch.info.images
        elif batch.info.tiles:
            assert batch.info.squared_patches == batch.info.patches**2 // batch.info.tiles, "tiles are of one size"


def _patch_side(dataset: Any) -> int:
    side = dataset.encoder.request.settings().config["vision_config"]["patch_size"]
    return int(side[0] if isinstance(side, list) else side)


# ---- weights of the loss


@pytest.mark.parametrize("packing", [True, False])
def test_weights_of_the_loss_come_with_the_batch(lines: Path, cache: Path, packing: bool) -> None:
    more: dict[str, Any] = {"packing": True, "rows_per_batch": 1, "packs_per_step": 3} if packing else {}
    dataset = built(config(lines, cache, **more))
    batches = list(dataset.loader(dataset.get_collator(loss_weighting="sample")))
    assert sum(batch.info.loss_total for batch in batches) == pytest.approx(SAMPLES)
    assert all(float(batch["loss_weights"].sum()) == pytest.approx(batch.info.loss_total) for batch in batches)
    plain = list(dataset.loader())
    assert all("loss_weights" not in batch for batch in plain)
    assert [batch.info.loss_total for batch in plain] == [batch.info.supervised_tokens for batch in plain]


# ---- some samples


def test_a_trial_run_draws_samples_by_the_seed_and_has_its_own_caches(lines: Path, cache: Path) -> None:
    drawn = {}
    for number, seed in ((7, 5), (7, 6), (9, 5), (10_000, 5), (None, 5)):
        dataset = built(config(lines, cache, max_samples=number, seed=seed))
        ids = {one for batch in dataset.loader() for one in batch.info.ids}
        drawn[number, seed] = ids, dataset.plan.folder, dataset
    assert [len(ids) for ids, _, _ in drawn.values()] == [7, 7, 9, SAMPLES, SAMPLES]
    assert len({frozenset(drawn[7, seed][0]) for seed in (5, 6)}) == 2
    assert len({folder for _, folder, _ in drawn.values()}) == len(drawn)
    again = built(config(lines, cache, max_samples=7))
    assert again.plan.folder == drawn[7, 5][1]
    assert again.describe().left_out == {"filter: not drawn by max_samples": SAMPLES - 7}


# ---- what is printed


def test_a_dataset_describes_itself(lines: Path, cache: Path) -> None:
    padded = built(config(lines, cache, epochs=2, packing_length=150)).describe()
    kept = SAMPLES - sum(padded.left_out.values())
    assert 0 < kept < SAMPLES
    assert len(padded.left_out) == 1
    assert (padded.samples, padded.packs, padded.samples_per_pack) == (kept, kept, 1.0)
    assert padded.longest == padded.tokens_per_pack[2] <= 150
    assert padded.steps == 2 * -(-kept // 12)
    assert padded.tokens_per_pack[1] == pytest.approx(padded.tokens / kept)
    assert 0 < padded.supervised_tokens < padded.tokens
    assert padded.padding > 0
    packed = built(config(lines, cache, packing=True, rows_per_batch=1, packs_per_step=3)).describe()
    assert packed.samples == SAMPLES > packed.packs
    assert packed.fill == pytest.approx(packed.tokens / (packed.packs * 256))
    assert (packed.padding, packed.left_out, packed.order) == (0.0, {}, "sorted")


# ---- what is refused


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"packing": True}, "rows_per_batch: 4 with packing: true. A pack is a whole row already"),
        ({"packs_per_step": 3}, "rows_per_batch: 4 with packs_per_step: 3. A step of fewer samples never fills"),
        ({"group_by_length": True, "balance": "sorted"}, "Both set the order"),
        ({"group_by_length": "yes"}, "group_by_length: 'yes' instead of true or false"),
        ({"rows_per_batch": 0}, "rows_per_batch: 0 instead of a positive integer"),
        ({"rows_per_batch": 2.0}, "rows_per_batch: 2.0 instead of a positive integer"),
        ({"max_samples": 0}, "max_samples: 0 instead of a positive integer"),
        ({"balance": "lenght"}, "did you mean 'length'"),
    ],
)
def test_contradictions_are_refused_with_the_way_out(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path / "data.jsonl", tmp_path, **settings)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_long_samples_of_models_with_dynamic_frequencies_are_refused_beside_others(lines: Path, tmp_path: Path) -> None:
    from packtrain.app.datasets import _require_rotary_lengths

    plan = built(config(lines, tmp_path)).plan
    longest = int(plan.epoch(0).load("longest").max())
    _require_rotary_lengths(plan, longest - 1, 1)
    _require_rotary_lengths(plan, longest, 4)
    with pytest.raises(DataError, match="rotary positions"):
        _require_rotary_lengths(plan, longest - 1, 4)
