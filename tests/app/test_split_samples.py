"""With `overlong: split` a sample counts once, wherever samples are counted: planned, packed, trained and measured."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import Run
from made_runs_data import write_config

from packtrain import DatasetConfig, MultiModalDataset, step_tokens
from packtrain.app.measure import measure
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.schedule import EMPTY_PACK
from packtrain.runs.metrics_log import read_metrics

SAMPLES, LENGTH = 40, 32  # tokens, which few of the chats fit
SPLIT = ("data.overlong=split", f"data.packing_length={LENGTH}")


def config_of(folder: Path) -> Path:
    return write_config(folder, num_train_epochs=1)


@pytest.mark.full
def test_a_plan_and_a_run_count_the_same(run: Run, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    command = ("train", config, "--dry-run", "--json", "training.packing_check=false", *SPLIT)
    numbers = json.loads(run(*command)[1])["numbers"]
    costs = measure(data=str(tmp_path / "train.jsonl"), model="tiny:llama", workers=1, check=0, out=tmp_path / "costs")
    text = config.read_text().replace("packing_length: 192", f"packing_length: {LENGTH}\n  overlong: split")
    (tmp_path / "split.yaml").write_text(text)
    code, out, err = run(
        *("plan", costs.folder, "--config", tmp_path / "split.yaml", "--lengths", LENGTH),
        *("--model", "tiny:llama", "--out", tmp_path / "report", "--json"),
    )
    assert code == 0, err
    (planned,) = json.loads(out)["simulations"]
    assert numbers["cut"] > 0, "there are pieces"
    assert planned["packs"] == numbers["packs"]
    assert planned["samples_packed"] == numbers["samples"] == SAMPLES
    assert planned["samples_per_pack"] == numbers["samples_per_pack"]
    assert planned["packs_per_step"] == numbers["packs_per_step"]
    assert planned["samples_per_step"] == numbers["samples_per_step"] == pytest.approx(8, rel=0.1)
    assert planned["steps"] == numbers["steps"]


@pytest.mark.full
@pytest.mark.parametrize("packing", ["true", "false"])
def test_a_run_has_seen_every_sample_once(run: Run, tmp_path: Path, packing: str) -> None:
    code, out, err = run("train", config_of(tmp_path), "--json", *SPLIT, f"data.packing={packing}")
    assert code == 0, err
    assert json.loads(out)["numbers"]["samples"] == SAMPLES
    steps = read_metrics(tmp_path / "out" / "metrics.jsonl").steps
    assert steps[-1].samples_seen == sum(step.samples for step in steps) == SAMPLES


def test_a_dataset_and_a_plan_say_so(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    config_of(tmp_path)
    dataset = MultiModalDataset(
        DatasetConfig(
            dataset_path=str(tmp_path / "train.jsonl"),
            model="tiny:llama",
            packing_length=LENGTH,
            overlong="split",
            workers=1,
            check=0,
        )
    )
    dataset.build()
    assert dataset.plan.folder is not None
    packs = dataset.plan.epoch(0)
    assert packs.num_entries > packs.num_samples == dataset.describe().samples == SAMPLES
    seen = [batch.info for batch in dataset.loader(num_workers=0)]
    planned = packs.load("supervised_tokens").tolist()
    assert [info.supervised_tokens for info in seen] == [planned[info.keys[0].pack] for info in seen], "to the label"
    counts = dataset.plan.summary.epochs[0]
    assert min(planned) > 0
    assert counts.unlabelled > 0, "some pieces are questions alone"
    assert "carry no loss" in (dataset.plan.folder / "ledger.jsonl").read_text()
    assert sum(info.samples for info in seen) == packs.num_entries
    assert sum(info.whole_samples for info in seen) == SAMPLES
    assert f" {SAMPLES} " in run("inspect", dataset.plan.folder)[1]
    assert PackPlan.load(dataset.plan.folder).epoch(0).num_samples == SAMPLES


@pytest.mark.parametrize(
    "given",
    [
        {"overlong": "split"},
        {"overlong": "truncate"},
        {"cutoff_len": 20, "truncate_side": "left"},
        {"packing_strategy": "wrapped"},
        {"pack_alignment": 8, "max_packs": 4, "overlong": "split"},
        {"packing": False, "overlong": "truncate", "rows_per_batch": 1, "pack_alignment": 8},
    ],
    ids=lambda given: ", ".join(map(str, given)),
)
def test_step_tokens_are_the_labels_in_the_batches_of_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    """What a loop of one's own divides by, and what Trainer counts."""
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    config_of(tmp_path)
    usual = {"packing_length": LENGTH, "packs_per_step": 3, "workers": 1, "check": 0, "model": "tiny:llama"}
    dataset = MultiModalDataset(DatasetConfig(dataset_path=str(tmp_path / "train.jsonl"), **usual, **given))
    dataset.build()
    there: Counter[int] = Counter()
    said: dict[int, set[int]] = {}
    packs = []
    for rank in range(2):
        for batch in dataset.loader(rank=rank, world_size=2, span="run"):
            key = batch.info.keys[0]
            packs.append(key.pack)
            there[key.step] += int((batch["labels"][..., 1:] != -100).sum())
            assert (batch["labels"][..., 0] == -100).all(), "so that Trainer counts the same"
            said.setdefault(key.step, set()).add(step_tokens(dataset.schedule, batch))
    assert EMPTY_PACK in packs, "packs that fill up are among them"
    assert said == {step: {count} for step, count in there.items()}
