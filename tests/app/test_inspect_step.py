"""`packtrain inspect RUN --step N`: the samples it names are those that the loader delivers in that step."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Run
from lengths import lvis_like
from made_runs_data import write_chats
from tables import write_table

from packtrain.app.inspect_plan import inspect_step
from packtrain.app.measure import measure
from packtrain.app.pack import pack
from packtrain.core.artifacts import write_json
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.delivery.loader.sampler import PackSampler
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.schedule import EMPTY_PACK, Schedule

LAYOUTS = [
    {"world_size": 1, "rows_per_batch": 1, "balance": "sorted"},
    {"world_size": 3, "rows_per_batch": 1, "balance": "strict"},
    {"world_size": 2, "rows_per_batch": 3, "balance": "random"},
]


def write_run(folder: Path, plan: Path, **about: Any) -> Path:
    """A run folder with what is needed to know its steps."""
    facts = {"model": "m", "mode": "packed", "plan": str(plan), "packs_per_step": 5, "seed": 11, **about}
    write_json(folder / "run.json", "run", 1, {"world_size": 1, "rows_per_batch": 1, "balance": "sorted", **facts})
    step = {"kind": "step", "step": 2, "samples_seen": 30, "loss": 1.25, "step_seconds": 0.5, "mfu": None}
    warning = {"kind": "warning", "step": 2, "warning": "loss_spike", "message": "a spike", "advice": "look"}
    lines = [{"kind": "metrics", "version": 1}, step, warning, {**step, "step": 3, "loss": "NaN"}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, Path]:
    """A plan of two epochs over a synthetic table."""
    write_table(tmp_path / "costs", lvis_like(90, 1))
    pack(tmp_path / "costs", PackingConfig(packing_length=8192, epochs=2), tmp_path / "plan")
    return tmp_path / "costs", tmp_path / "plan"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packs_of_a_step_are_those_that_ranks_get(tmp_path: Path, made: tuple[Path, Path], layout: Any) -> None:
    """Against the sampler that really deals them out, over all steps of all epochs."""
    run = write_run(tmp_path / "run", made[1], **layout)
    schedule = Schedule(PackPlan.load(made[1]), packs_per_step=5, seed=11, balance=layout["balance"])
    dealt: dict[tuple[int, int], set[tuple[int, int, int]]] = {}
    for rank in range(layout["world_size"]):
        sampler = PackSampler(schedule, rank, layout["world_size"], span="run", rows_per_batch=layout["rows_per_batch"])
        for keys in sampler:
            for key in keys:
                if key.pack != EMPTY_PACK:
                    dealt.setdefault((key.epoch, key.step), set()).add((key.micro_batch, rank, key.pack))
    assert len(dealt) == schedule.num_steps() > 4
    seen = 0
    for number, (epoch, _) in enumerate(sorted(dealt), 1):
        found = inspect_step(run, number)
        assert found.epoch == epoch
        assert {(one.micro_batch, one.rank, one.pack) for one in found.packs} == dealt[sorted(dealt)[number - 1]]
        seen += sum(len(one.samples) for one in found.packs)
    plan = schedule.plan
    assert seen == sum(plan.epoch(epoch).num_entries for epoch in range(2)), "every sample in exactly one step"


def test_what_was_logged_stands_beside_it(tmp_path: Path, made: tuple[Path, Path]) -> None:
    run = write_run(tmp_path / "run", made[1])
    two, three, four = (inspect_step(run, number) for number in (2, 3, 4))
    assert two.logged == {"loss": 1.25, "samples_seen": 30.0, "step_seconds": 0.5}
    assert two.warnings == ("loss_spike: a spike",)
    assert np.isnan(three.logged["loss"])
    assert four.logged == {}


def test_the_command_names_samples_without_their_data(run: Run, tmp_path: Path, made: tuple[Path, Path]) -> None:
    folder = write_run(tmp_path / "run", made[1])
    code, out, _ = run("inspect", folder, "--step", 2, "--json")
    assert code == 0
    said, found = json.loads(out), inspect_step(folder, 2)
    ids = [sample["id"] for one in said["packs"] for sample in one["samples"]]
    assert ids == [sample.id for one in found.packs for sample in one.samples]
    assert said["packs"][0]["tokens"] == found.packs[0].total("tokens") > 0
    code, out, _ = run("inspect", folder, "--step", 2)
    assert code == 0
    assert all(name in out for name in ids)
    assert "loss 1.250" in out
    assert "Warning: loss_spike" in out
    assert "NaN" in run("inspect", folder, "--step", 3)[1] or "nan" in run("inspect", folder, "--step", 3)[1]
    assert "does not have this step" in run("inspect", folder, "--step", 4)[1]


def test_steps_are_those_of_the_run(run: Run, tmp_path: Path, made: tuple[Path, Path]) -> None:
    """A run that ends before its plan does has no later steps."""
    planned = inspect_step(write_run(tmp_path / "whole", made[1]), 1).steps
    folder = write_run(tmp_path / "run", made[1], derived={"steps": 3})
    assert planned > 3
    assert inspect_step(folder, 3).steps == 3
    assert "Step 2 of 3" in run("inspect", folder, "--step", 2)[1]
    with pytest.raises(ConfigError, match="from 1 to 3"):
        inspect_step(folder, 4)


def test_rows_of_a_padded_run_are_no_packs(run: Run, tmp_path: Path, made: tuple[Path, Path]) -> None:
    alone = PackingConfig(packing_length=8192, packing_strategy="none")
    pack(made[0], alone, tmp_path / "alone")
    padded = run("inspect", write_run(tmp_path / "padded", tmp_path / "alone", mode="padded"), "--step", 1)[1]
    assert ": 5 rows, 5 samples" in padded
    assert "pack" not in padded
    padded_packs = write_run(tmp_path / "padded_packs", made[1], mode="padded")
    for folder in (write_run(tmp_path / "packed", made[1]), padded_packs):
        assert ": 5 packs" in run("inspect", folder, "--step", 1)[1]


@pytest.mark.parametrize("options", [(), ("--pack", 0), ("--sample", "sample-7"), ("--blocked",)], ids=str)
def test_a_run_stands_for_its_plan(run: Run, tmp_path: Path, made: tuple[Path, Path], options: tuple[Any, ...]) -> None:
    folder = write_run(tmp_path / "run", made[1])
    for more in ((), ("--json",)):
        code, out, err = run("inspect", folder, *options, *more)
        assert (code, err) == (0, "")
        assert out == run("inspect", made[1], *options, *more)[1]


def test_a_step_batch_by_batch(run: Run, tmp_path: Path) -> None:
    """As --pack shows each of its packs, for the attention that the run has."""
    data = write_chats(tmp_path / "train.jsonl", 12)
    table = measure(data, model="tiny:llama", out=tmp_path / "costs", workers=1, check=0)
    pack(table, PackingConfig(packing_length=128), tmp_path / "plan")
    about: dict[str, Any] = {"packs_per_step": 2, "derived": {"attn_implementation": "varlen-loop"}}
    folder = write_run(tmp_path / "run", tmp_path / "plan", **about)
    code, out, err = run("inspect", folder, "--step", 1, "--batch", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert len(said["packs"]) == len(said["batches"]) == 2
    for one, batch in zip(said["packs"], said["batches"], strict=True):
        alone = run("inspect", folder, "--pack", one["pack"], "--batch", "--attn-implementation", "varlen", "--json")[1]
        assert batch == json.loads(alone)
        labels = [sample["supervised_tokens"] for sample in one["samples"]]
        assert batch["supervised_tokens"] == one["supervised_tokens"] == sum(labels) > 0
    out = run("inspect", folder, "--step", 1, "--batch")[1]
    assert out.count("as llama gets it (varlen)") == 2
    assert "Micro-batch 1, rank 0:" in out
    code, _, err = run(
        "inspect", write_run(tmp_path / "padded", tmp_path / "plan", mode="padded", **about), "--step", 1, "--batch"
    )
    assert (code, "a padded run" in err) == (2, True)


def test_what_is_not_there_is_said(run: Run, tmp_path: Path, made: tuple[Path, Path]) -> None:
    folder = write_run(tmp_path / "run", made[1])
    for step in (0, -1, 10_000):
        with pytest.raises(ConfigError, match="a step of the run, from 1 to"):
            inspect_step(folder, step)
    with pytest.raises(ArtifactError, match="no valid packs_per_step"):
        inspect_step(write_run(tmp_path / "bare", made[1], packs_per_step=None), 1)
    with pytest.raises(ArtifactError, match="no valid packs_per_step"):
        inspect_step(write_run(tmp_path / "odd", made[1], balance="weird"), 1)
    with pytest.raises(ConfigError, match="a run over a stream"):
        inspect_step(write_run(tmp_path / "stream", made[1], derived={"looked_at": 32}), 1)
    gone = write_run(tmp_path / "gone", tmp_path / "nowhere")
    code, _, err = run("inspect", gone, "--step", 1)
    assert code == 1
    assert "the plan that the run was trained with" in err
    assert f"run packtrain train {gone / 'run.yaml'} --dry-run to rebuild it" in err
    assert run("inspect", folder, "--step", 1, "--pack", 0)[0] == 2
    moved = tmp_path / "moved"
    shutil.move(made[0], moved)
    code, _, err = run("inspect", folder, "--step", 1)
    assert code == 1
    assert "--costs" in err
    assert run("inspect", folder, "--step", 1, "--costs", moved)[0] == 0
