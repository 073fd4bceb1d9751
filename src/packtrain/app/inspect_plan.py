"""Looking into a pack plan (one pack, one sample) and into an optimizer step of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from packtrain.core.errors import ArtifactError, ConfigError, nearest
from packtrain.core.modality import VISION_TOKENS
from packtrain.measuring.table import COSTS, CostTable
from packtrain.packing.cutting import supervised_in
from packtrain.packing.pack_plan import PLAN, PackPlan
from packtrain.packing.schedule import EMPTY_PACK, Balance, Schedule
from packtrain.runs.run_folder import CONFIG, RUN
from packtrain.runs.training_run import TrainingRun, read_run

_SHOWN = (
    *("id", "source", "origin", "tokens", *VISION_TOKENS, "images", "videos", "patches"),
    *("supervised_tokens", "tail_tokens", "tail_runs"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedSample:
    """One sample of a pack, with its costs."""

    row: int
    id: str
    source: str
    origin: str
    start: int  # first token of the sample that is used, 0 unless it is split
    tokens: int  # used in this pack
    vision_tokens: int
    images: int
    videos: int
    patches: int
    supervised_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PackPlace:
    """Where a sample went in one epoch."""

    epoch: int
    pack: int
    row: int
    start: int  # first token that is used
    tokens: int  # used in this pack
    whole: bool  # neither truncated nor split


def load_plan(folder: str | Path) -> PackPlan:
    """The plan in a folder; for the folder of a run, the plan that it is trained with."""
    is_run = (Path(folder) / RUN).exists() and not (Path(folder) / PLAN).exists()
    return PackPlan.load(plan_of_run(read_run(folder)) if is_run else folder)


def plan_of_run(run: TrainingRun) -> Path:
    """The folder of the plan that a run is trained with."""
    if run.facts.derived is not None and run.facts.derived.looked_at:
        raise ConfigError(
            str(run.folder),
            got="a run over a stream (data.online), whose packs are not stored",
            expected="a run over data that were measured first",
        )
    if run.facts.plan is None:
        expected = "what packtrain train writes before its first step"
        raise ArtifactError(str(run.folder / RUN), got="no plan", expected=expected)
    plan = Path(run.facts.plan)
    if not plan.is_absolute() and not plan.exists():
        plan = run.folder / plan
    if not plan.exists():
        raise ArtifactError(
            str(plan),
            got="no such folder",
            expected="the plan that the run was trained with",
            fix=f"run packtrain train {run.folder / CONFIG} --dry-run to rebuild it",
        )
    return plan


def open_plan(plan: str | Path, costs: str | Path | None = None) -> tuple[PackPlan, CostTable]:
    """A plan and the cost table it was made from; a table that has changed since is refused."""
    pack_plan = load_plan(plan)
    folder = Path(costs) if costs is not None else Path(pack_plan.summary.cost_table)
    try:
        table = CostTable.load(folder)
    except ArtifactError as error:
        if costs is not None:
            raise
        raise ArtifactError(
            str(folder),
            got=f"not the cost table that the plan was made from ({error.got})",
            fix="pass its folder with --costs",
        ) from error
    limits = pack_plan.summary.inputs["limits"]
    table = table.with_limits(**limits) if limits else table
    pack_plan.check_inputs(table)
    return pack_plan, table


def pack_samples(plan: PackPlan, table: CostTable, number: int, epoch: int = 0) -> list[PackedSample]:
    """The samples of one pack, in order."""
    _check("--epoch", epoch, plan.num_epochs)
    packs = plan.epoch(epoch)
    _check("--pack", number, packs.num_packs)
    pack = packs.pack(number)
    rows = np.unique(pack.rows)
    columns = table.rows(_SHOWN, rows)
    samples = []
    for row, start, used in zip(pack.rows.tolist(), pack.starts.tolist(), pack.tokens.tolist(), strict=True):
        at = int(np.searchsorted(rows, row))
        values = {name: columns[name][at] for name in _SHOWN}
        first, whole = start == 0, int(values["tokens"])
        used = whole if used < 0 else used
        samples.append(
            PackedSample(
                row=row,
                id=str(values["id"]),
                source=str(values["source"]),
                origin=str(values["origin"]),
                start=start,
                tokens=used,
                vision_tokens=sum(int(values[name]) for name in VISION_TOKENS) * first,
                images=int(values["images"]) * first,
                videos=int(values["videos"]) * first,
                patches=int(values["patches"]) * first,
                supervised_tokens=_supervised_tokens(values, start, start + used),
            )
        )
    return samples


def _supervised_tokens(values: Mapping[str, Any], start: int, end: int) -> int:
    """Tokens with loss of a piece of a row."""
    tokens, supervised = int(values["tokens"]), int(values["supervised_tokens"])
    if (start, end) == (0, tokens):
        return supervised
    piece = np.array([start]), np.array([end])
    return int(supervised_in(str(values["tail_runs"]), tokens, supervised, int(values["tail_tokens"]), *piece)[0])


def find_sample(plan: PackPlan, table: CostTable, name: str) -> tuple[list[PackPlace], list[int]]:
    """The packs that have samples with this id, and their rows in the cost table."""
    rows = _rows_named(table, name)
    if not len(rows):
        ids = [str(one) for one in table.rows(("id",), np.arange(min(len(table), 20_000)))["id"]]
        expected = f"the id of a measured sample, such as {ids[0]!r}"
        raise ConfigError("--sample", got=name, expected=expected, fix=nearest(name, ids))
    lengths = dict(zip(rows.tolist(), table.rows(("tokens",), rows)["tokens"].tolist(), strict=True))
    places = []
    for epoch in range(plan.num_epochs):
        packs = plan.epoch(epoch)
        for entry in np.flatnonzero(np.isin(packs.rows, rows)).tolist():
            number = int(np.searchsorted(packs.ends, entry, side="right"))
            pack = packs.pack(number)
            at = entry - int(packs.offsets[number])
            row, used = int(pack.rows[at]), int(pack.tokens[at])
            whole = used < 0 or used == lengths[row]
            place = PackPlace(
                epoch=epoch,
                pack=number,
                row=row,
                start=int(pack.starts[at]),
                tokens=lengths[row] if used < 0 else used,
                whole=whole,
            )
            places.append(place)
    return places, rows.tolist()


def _rows_named(table: CostTable, name: str) -> np.ndarray:
    """Rows of the table with this id; the file is read row group by row group."""
    positions_of_parts, start = [], 0
    with pq.ParquetFile(table.folder / COSTS) as file:
        for group in range(file.num_row_groups):
            ids = file.read_row_group(group, columns=["id"])["id"]
            positions_of_parts.append(start + np.flatnonzero(pc.equal(ids, name).to_numpy(zero_copy_only=False)))
            start += len(ids)
    positions = np.concatenate(positions_of_parts) if positions_of_parts else np.zeros(0, np.int64)
    return table.positions_of(positions)


def _check(option: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise ConfigError(option, got=number, expected=f"a number from 0 to {count - 1}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPack:
    """One pack of a step, with its micro-batch and rank."""

    micro_batch: int
    rank: int
    pack: int
    samples: tuple[PackedSample, ...]

    def total(self, name: str) -> int:
        """The sum of a number over its samples."""
        return sum(getattr(sample, name) for sample in self.samples)


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectedStep:
    """One optimizer step of a run."""

    step: int  # counted from 1, over the whole run
    steps: int  # of the run, which may end before its plan does
    epoch: int
    packing_length: int
    unit: str  # "pack", or "row" in a padded run without packs
    world_size: int
    packs: tuple[StepPack, ...]  # by micro-batch and rank, without empty ones
    logged: Mapping[str, float]  # from metrics.jsonl; empty if it has not been trained
    warnings: tuple[str, ...]


def inspect_step(run: str | Path, step: int, costs: str | Path | None = None) -> InspectedStep:
    """The samples of a step, from the plan of the run and its cost table, without reading the data."""
    training_run = read_run(run)
    schedule, table = run_schedule(training_run, costs)
    steps = _steps(training_run, schedule)
    if not 1 <= step <= steps:
        raise ConfigError("--step", got=step, expected=f"a step of the run, from 1 to {steps}")
    before = schedule.state_after(step - 1)
    world_size, rows = training_run.facts.world_size, training_run.facts.rows_per_batch
    strategy = schedule.plan.config.packing_strategy
    number = before.next_pack // schedule.packs_per_step
    placed = schedule.micro_batches(before.epoch, number, world_size, rows_per_batch=rows)
    packs = tuple(
        StepPack(
            micro_batch=int(micro_batch),
            rank=int(column) // rows,
            pack=int(placed[micro_batch, column]),
            samples=tuple(pack_samples(schedule.plan, table, int(placed[micro_batch, column]), before.epoch)),
        )
        for micro_batch, column in np.argwhere(placed != EMPTY_PACK)
    )
    return InspectedStep(
        step=step,
        steps=steps,
        epoch=before.epoch,
        packing_length=schedule.plan.config.packing_length,
        unit="row" if training_run.facts.mode == "padded" and strategy == "none" else "pack",
        world_size=world_size,
        packs=packs,
        logged=_logged_values(training_run, step),
        warnings=tuple(f"{one.kind}: {one.message}" for one in training_run.warnings if one.step == step),
    )


def run_schedule(run: TrainingRun, costs: str | Path | None) -> tuple[Schedule, CostTable]:
    """The order in which a run takes its packs, and the cost table of its plan."""
    facts = run.facts
    if facts.packs_per_step is None or facts.balance not in get_args(Balance):
        raise ArtifactError(
            str(run.folder / RUN),
            got="no valid packs_per_step and balance",
            expected="what packtrain train writes before its first step",
        )
    plan, table = open_plan(plan_of_run(run), costs)
    balance: Balance = facts.balance  # type: ignore[assignment]
    return Schedule(plan, packs_per_step=facts.packs_per_step, seed=facts.seed, balance=balance), table


def _steps(run: TrainingRun, schedule: Schedule) -> int:
    """Steps of the run, from run.json, or else all of its plan."""
    planned, derived = schedule.num_steps(), run.facts.derived
    return min(derived.steps, planned) if derived is not None and derived.steps else planned


def _logged_values(run: TrainingRun, step: int) -> dict[str, float]:
    steps = run.steps
    at = np.flatnonzero(steps["step"] == step).tolist()
    if not at:
        return {}
    values = {name: float(column[at[0]]) for name, column in steps.columns.items() if name != "step"}
    values |= {f"learning_rate/{part}": float(rates[at[0]]) for part, rates in steps.rates.items()}
    broken = "loss" if values["supervised_tokens"] else ""  # a loss that is NaN is shown, other NaN are gaps
    return {name: value for name, value in values.items() if not math.isnan(value) or name == broken}
