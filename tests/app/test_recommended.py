"""recommended.yaml as it is trained: a step has as many samples on any number of processes, packed or padded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Run
from made_runs_data import write_chats

from packtrain.app.measure import measure
from packtrain.app.plan import plan
from packtrain.app.train.prepare import prepare
from packtrain.app.train.resolve import resolve_run
from packtrain.app.train.run_numbers import RunNumbers
from packtrain.config.run_config import load_config
from packtrain.config.steps import StepSize
from packtrain.planning.study_values import Simulation

WORLDS = (1, 2, 4)


def wanted(config: Path) -> int:
    """Samples per step, as the config says them."""
    return int(load_config(config).training.effective_batch_size or 0)


@pytest.fixture(scope="module")
def recommended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Simulation]:
    """A config that was made for two GPUs, and the packing that it stands for."""
    folder = tmp_path_factory.mktemp("recommended")
    data = write_chats(folder / "train.jsonl", 240)
    costs = measure(data, model="tiny:llama", out=folder / "costs", workers=1, check=0)
    made = plan(
        costs,
        model="tiny:llama",
        out=folder / "report",
        gpu="h100",
        gpus=2,
        lengths=(512,),
        baseline={"effective_batch_size": 24},
    )
    assert made.study.recommendation.packing
    assert wanted(made.files["recommended.yaml"]) == pytest.approx(24, rel=0.1)
    assert "warmup_ratio" not in made.study.recommendation.config["training"], "none was set"
    return made.files["recommended.yaml"], made.study.simulations[made.study.recommendation.simulation]


def numbers(config: Path, cache: Path, world_size: int, *overrides: str) -> RunNumbers:
    """Everything that follows from a config, without training."""
    said = (*overrides, f"data.cache_dir={cache}", "training.use_cpu=true")
    return prepare(resolve_run(load_config(config), world_size=world_size, overrides=said)).numbers


@pytest.mark.parametrize("world_size", WORLDS)
def test_a_step_keeps_its_samples(
    recommended: tuple[Path, Simulation], tmp_path_factory: pytest.TempPathFactory, world_size: int
) -> None:
    config, planned = recommended
    cache = tmp_path_factory.getbasetemp() / "recommended-cache"
    packed = numbers(config, cache, world_size)
    assert packed.mode == "packed"
    assert packed.samples_per_pack > 2, "something is packed"
    assert packed.samples_per_pack == pytest.approx(planned.samples_per_pack)
    rounding = max(packed.samples_per_pack / 2, 0.1 * wanted(config))
    assert packed.samples_per_step == pytest.approx(wanted(config), abs=rounding)
    if world_size == 2:
        assert packed.packs_per_step == planned.packs_per_step, "what was recommended for two GPUs"
    padded = numbers(config, cache, world_size, "data.packing=false")
    assert (padded.mode, padded.samples_per_step) == ("padded", wanted(config))
    assert padded.rows_per_batch > 1, "batches as usual, not of one row as packs are"
    alike = numbers(config, cache, world_size, "data.packing=false", "data.pad_packs=true")
    assert (alike.mode, alike.packs_per_step, alike.steps) == ("padded", packed.packs_per_step, packed.steps)


def test_the_samples_of_a_step_are_printed(
    run: Run, recommended: tuple[Path, Simulation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = recommended
    monkeypatch.chdir(tmp_path)
    code, out, err = run("train", config, "--dry-run", "training.use_cpu=true")
    assert code == 0, err
    assert f"{wanted(config)} requested" in " ".join(out.replace("│", " ").split())
    code, out, err = run("train", config, "--dry-run", "--json", "training.use_cpu=true", "data.packing=false")
    assert code == 0, err
    assert json.loads(out)["numbers"]["samples_per_step"] == wanted(config)


@pytest.mark.parametrize("samples", [1, 8, 100, 128, 1000])
@pytest.mark.parametrize("per_pack", [1.0, 3.7, 14.2, 90.0])
def test_more_processes_do_not_make_larger_steps(samples: int, per_pack: float) -> None:
    """To a whole pack, or to a tenth where all processes then have as many."""
    for world_size in (1, 2, 3, 4, 8, 64):
        packs = StepSize(packs=None, samples=samples).packs_for(per_pack, world_size)
        assert packs >= 1
        apart = abs(packs * per_pack - samples)
        assert apart <= max(per_pack / 2, 0.1 * samples) or packs == 1, (world_size, packs)
