"""Looking into one optimizer step of a run: its packs by micro-batch and rank, their samples, what was logged of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np

from packtrain.app.inspection.plan import PackedSample, open_plan, pack_samples, plan_of_run
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.measuring.table import CostTable
from packtrain.packing.schedule import EMPTY, Balance, Schedule
from packtrain.runs.run_folder import RUN
from packtrain.runs.training_run import TrainingRun, read_run

if TYPE_CHECKING:
    from packtrain.app.inspection.batch import SeenBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPack:
    """One pack of a step, and who trains it when."""

    micro_batch: int
    rank: int
    pack: int
    samples: tuple[PackedSample, ...]

    @property
    def tokens(self) -> int:
        return sum(sample.tokens for sample in self.samples)

    @property
    def supervised_tokens(self) -> int:
        return sum(sample.supervised_tokens for sample in self.samples)

    @property
    def images(self) -> int:
        return sum(sample.images for sample in self.samples)

    @property
    def videos(self) -> int:
        return sum(sample.videos for sample in self.samples)

    @property
    def patches(self) -> int:
        return sum(sample.patches for sample in self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeen:
    """One optimizer step of a run."""

    step: int  # counted from 1, over the whole run
    steps: int  # of the run, which may end before its plan does
    epoch: int
    packing_length: int
    unit: str  # what is dealt out: "pack", or "row" where a padded run has each sample by itself
    world: int
    packs: tuple[StepPack, ...]  # by micro-batch and rank; those that are empty are left out
    logged: Mapping[str, float]  # what metrics.jsonl says of it; empty when it has not been trained
    warnings: tuple[str, ...]


def inspect_step(run: str | Path, step: int, costs: str | Path | None = None) -> StepSeen:
    """The samples of a step, from the run's plan and the cost table it was made from; the data are not needed."""
    found = read_run(run)
    schedule, table = _schedule(found, costs)
    steps = _steps(found, schedule)
    if not 1 <= step <= steps:
        raise ConfigError("--step", got=step, expected=f"a step of the run, from 1 to {steps}")
    before = schedule.state_after(step - 1)
    world, rows = found.about.world, found.about.rows_per_batch
    strategy = schedule.plan.config.packing_strategy
    number = before.next_pack // schedule.packs_per_step
    placed = schedule.micro_batches(before.epoch, number, world, rows_per_batch=rows)
    packs = tuple(
        StepPack(
            micro_batch=int(micro_batch),
            rank=int(column) // rows,
            pack=int(placed[micro_batch, column]),
            samples=tuple(pack_samples(schedule.plan, table, int(placed[micro_batch, column]), before.epoch)),
        )
        for micro_batch, column in np.argwhere(placed != EMPTY)
    )
    return StepSeen(
        step=step,
        steps=steps,
        epoch=before.epoch,
        packing_length=schedule.plan.config.packing_length,
        unit="row" if found.about.mode == "padded" and strategy == "none" else "pack",
        world=world,
        packs=packs,
        logged=_logged(found, step),
        warnings=tuple(f"{one.kind}: {one.found}" for one in found.warnings if one.step == step),
    )


def step_batches(
    run: str | Path,
    seen: StepSeen,
    costs: str | Path | None = None,
    *,
    attn_implementation: str | None = None,
    cache: Path,
) -> Iterator[SeenBatch]:
    """The packs of a step as the model gets them, by default for the attention of the run; the data are needed."""
    from packtrain.app.inspection.batch import BACKENDS, inspect_batches

    found = read_run(run)
    if found.about.mode == "padded":
        raise ConfigError(
            "--batch",
            got="a padded run, which has no packs",
            expected="a packed run",
            fix="leave it out: --step names the samples",
        )
    schedule, table = _schedule(found, costs)
    trained = str(found.about.derived.get("attn_implementation", "")).removesuffix("-loop")
    chosen = attn_implementation or (trained if trained in BACKENDS else "sdpa")
    numbers = [one.pack for one in seen.packs]
    yield from inspect_batches(schedule.plan, table, numbers, seen.epoch, attn_implementation=chosen, cache=cache)


def _schedule(run: TrainingRun, costs: str | Path | None) -> tuple[Schedule, CostTable]:
    about = run.about
    if about.packs_per_step is None or about.balance not in get_args(Balance):
        raise ArtifactError(
            str(run.folder / RUN),
            got="no valid packs_per_step and balance",
            expected="what packtrain train writes before its first step",
        )
    found, table = open_plan(plan_of_run(run), costs)
    balance: Balance = about.balance  # type: ignore[assignment]
    return Schedule(found, packs_per_step=about.packs_per_step, seed=about.seed, balance=balance), table


def _steps(run: TrainingRun, schedule: Schedule) -> int:
    """Steps of the run: what was derived before training, or all of the plan's where run.json does not say."""
    planned, derived = schedule.num_steps(), run.about.derived.get("steps")
    return min(derived, planned) if isinstance(derived, int) and derived > 0 else planned


def _logged(run: TrainingRun, step: int) -> dict[str, float]:
    steps = run.steps
    at = np.flatnonzero(steps["step"] == step).tolist()
    if not at:
        return {}
    values = {name: float(column[at[0]]) for name, column in steps.columns.items() if name != "step"}
    values |= {f"learning_rate/{part}": float(rates[at[0]]) for part, rates in steps.rates.items()}
    broken = "loss" if values["supervised_tokens"] else ""  # no number where there should be one
    return {name: value for name, value in values.items() if not math.isnan(value) or name == broken}
