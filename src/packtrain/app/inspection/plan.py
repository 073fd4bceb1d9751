"""Looking into a pack plan: its summary, one pack, one sample, what each limit stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from packtrain.core.errors import ArtifactError, ConfigError, nearest
from packtrain.core.modality import VISION_TOKENS
from packtrain.measuring.table import COSTS, CostTable
from packtrain.packing.overlong import supervised_in
from packtrain.packing.pack_plan import PLAN, PackPlan
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
    """A plan; of the folder of a run, the one that it is trained with."""
    is_run = (Path(folder) / RUN).exists() and not (Path(folder) / PLAN).exists()
    return PackPlan.load(plan_of_run(read_run(folder)) if is_run else folder)


def plan_of_run(run: TrainingRun) -> Path:
    """The folder of the plan that a run is trained with."""
    if run.about.derived.get("looked_at"):
        raise ConfigError(
            str(run.folder),
            got="a run over a stream (data.online), whose packs are not stored",
            expected="a run over data that were measured first",
        )
    if run.about.plan is None:
        expected = "what packtrain train writes before its first step"
        raise ArtifactError(str(run.folder / RUN), got="no plan", expected=expected)
    plan = Path(run.about.plan)
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
    found = load_plan(plan)
    folder = Path(costs) if costs is not None else Path(found.summary.cost_table)
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
    limits = found.summary.inputs["limits"]
    table = table.with_limits(**limits) if limits else table
    found.check_inputs(table)
    return found, table


def pack_samples(plan: PackPlan, table: CostTable, number: int, epoch: int = 0) -> list[PackedSample]:
    """The samples of one pack, in order."""
    _check("--epoch", epoch, plan.num_epochs)
    packs = plan.epoch(epoch)
    _check("--pack", number, packs.num_packs)
    pack = packs.pack(number)
    rows = np.unique(pack.rows)
    columns = table.rows(_SHOWN, rows)
    found = []
    for row, start, used in zip(pack.rows.tolist(), pack.starts.tolist(), pack.tokens.tolist(), strict=True):
        at = int(np.searchsorted(rows, row))
        values = {name: columns[name][at] for name in _SHOWN}
        first, whole = start == 0, int(values["tokens"])
        used = whole if used < 0 else used
        found.append(
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
                supervised_tokens=_supervised(values, start, start + used),
            )
        )
    return found


def _supervised(values: Mapping[str, Any], start: int, end: int) -> int:
    """Tokens with loss of a piece of a row."""
    tokens, supervised = int(values["tokens"]), int(values["supervised_tokens"])
    if (start, end) == (0, tokens):
        return supervised
    piece = np.array([start]), np.array([end])
    return int(supervised_in(str(values["tail_runs"]), tokens, supervised, int(values["tail_tokens"]), *piece)[0])


def find_sample(plan: PackPlan, table: CostTable, name: str) -> tuple[list[PackPlace], list[int]]:
    """Where the samples with this id went, and the rows of the table that bear it."""
    rows = _rows_named(table, name)
    if not len(rows):
        known = [str(one) for one in table.rows(("id",), np.arange(min(len(table), 20_000)))["id"]]
        expected = f"the id of a measured sample, such as {known[0]!r}"
        raise ConfigError("--sample", got=name, expected=expected, fix=nearest(name, known))
    lengths = dict(zip(rows.tolist(), table.rows(("tokens",), rows)["tokens"].tolist(), strict=True))
    found = []
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
            found.append(place)
    return found, rows.tolist()


def _rows_named(table: CostTable, name: str) -> np.ndarray:
    """Rows of the table with this id; the file is read row group by row group."""
    found, start = [], 0
    with pq.ParquetFile(table.folder / COSTS) as file:
        for group in range(file.num_row_groups):
            ids = file.read_row_group(group, columns=["id"])["id"]
            found.append(start + np.flatnonzero(pc.equal(ids, name).to_numpy(zero_copy_only=False)))
            start += len(ids)
    positions = np.concatenate(found) if found else np.zeros(0, np.int64)
    return table.positions_of(positions)


def _check(option: str, number: int, count: int) -> None:
    if not 0 <= number < count:
        raise ConfigError(option, got=number, expected=f"a number from 0 to {count - 1}")
