"""`pack`: a cost table and a packing config in, a pack plan out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from packtrain.app.reuse import reusable_folder
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ArtifactError, ConfigError, PacktrainError
from packtrain.core.fingerprint import differences, digest
from packtrain.core.numbers import percent
from packtrain.delivery.encode.from_transformers import packing_notes
from packtrain.families.registry import load_plugins
from packtrain.families.settings import read_settings
from packtrain.measuring.table import CostTable
from packtrain.packing.arrays import packer_source
from packtrain.packing.pack_plan import PACKER_VERSION, PLAN, VERSION, PackPlan, plan_inputs
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.plan_builder import PackProgress, build_plan
from packtrain.predicting.flops import WorkModel, work_model
from packtrain.predicting.shapes import read_shape
from packtrain.predicting.values import TrainingSetup

# Of a model with two billion parameters, for tables whose model is not available: only ratios matter.
GENERIC_WORK = WorkModel(
    per_token=1.13e10, per_squared_token=4.6e5, per_supervised_token=1.9e9, per_patch=2.6e9, per_squared_patch=3.9e5
)


_MANY = 0.05  # of the samples


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOutcome:
    """A plan, and whether it was reused."""

    plan: PackPlan
    reused: bool
    work_from: str  # the model whose shape predicts the work of packs
    notes: tuple[str, ...] = ()  # on the model, and on many samples that fit no pack


def pack(costs: CostTable | str | Path, config: PackingConfig, out: str | Path | None = None) -> PackPlan:
    """Pack a measured dataset; a plan in folder `out` is reused if nothing has changed."""
    return pack_outcome(costs, config, out).plan


def pack_outcome(
    costs: CostTable | str | Path,
    config: PackingConfig,
    out: str | Path | None = None,
    progress: Callable[[PackProgress], None] = lambda _: None,
    *,
    cache: Path | None = None,
) -> PackOutcome:
    """Pack, or reuse a plan. With `cache` plans are looked up and kept there."""
    table = costs if isinstance(costs, CostTable) else CostTable.load(costs)
    load_plugins(table.plugins)
    work, work_from = choose_work_model(table)
    mode = "padded" if config.packing_strategy == "none" else f"packed-{config.packing_length}"
    dataset = table.user_config.get("data", {}).get("dataset_path")
    reusable = reusable_folder("plans", _name(table, config, work), cache or cache_dir(), dataset=dataset, mode=mode)

    def pack_into(folder: Path | None, again: bool) -> PackOutcome:
        if folder is not None and (folder / PLAN).exists():
            plan = _load_matching_plan(folder, table, config, work)
            return PackOutcome(plan=plan, reused=True, work_from=work_from, notes=(*notes, *_dropped(plan, table)))
        if not again:
            raise ArtifactError(str(folder), got="no plan")
        plan = build_plan(table, config, work, folder, progress)
        return PackOutcome(plan=plan, reused=False, work_from=work_from, notes=(*notes, *_dropped(plan, table)))

    notes = _notes(table)
    if out is None:
        return reusable.open(pack_into) if cache is not None else pack_into(None, again=True)
    folder = Path(out)
    if folder.resolve() == Path.cwd() and not (folder / PLAN).exists():
        # It is replaced by the finished plan: a shell whose working directory it is would lose it.
        raise ConfigError("out", got=f"{folder}, the current folder", fix="choose a new folder below this one")
    outcome = pack_into(folder, again=True)
    reusable.remember(folder)
    return outcome


def _name(table: CostTable, config: PackingConfig, work: WorkModel) -> str:
    """The fingerprint of a plan in the cache."""
    own = packer_source(config.packing_strategy)
    return digest([config.given(), plan_inputs(table), PACKER_VERSION, VERSION, asdict(work), *([own] if own else [])])


def _notes(table: CostTable) -> tuple[str, ...]:
    """Notes on packing this model; none where its settings are not available."""
    try:
        return packing_notes(read_settings(table.places.model))
    except PacktrainError:
        return ()


def _dropped(plan: PackPlan, table: CostTable) -> tuple[str, ...]:
    """Many samples fit no pack."""
    counts, length, longest = plan.summary.epochs[0], plan.config.packing_length, int(table.column("tokens").max())
    unfit = counts.dropped - counts.unlabelled
    if unfit < _MANY * counts.drawn:
        return ()
    fix = f"use --packing-length {longest} or more, or --overlong split" if longest > length else "raise its limits"
    share = f"{unfit:,} of {counts.drawn:,} samples ({percent(unfit / counts.drawn)})"
    return (f"{share} fit no pack; the longest sample has {longest:,} tokens: {fix}",)


def choose_work_model(table: CostTable) -> tuple[WorkModel, str]:
    """The model that predicts the work of a pack: by the shape of the measured model, or a generic one."""
    try:
        shape = read_shape(table.places.model)
    except PacktrainError as error:
        return GENERIC_WORK, f"a generic shape, since {error.where} has no readable one"
    return work_model(shape, TrainingSetup()), f"the shape of {shape.model_type}"


def _load_matching_plan(folder: Path, table: CostTable, config: PackingConfig, work: WorkModel) -> PackPlan:
    """The plan in that folder; its cost table may have been moved."""
    plan = PackPlan.load(folder)
    expected: dict[str, object] = {
        "config": config.describe(),
        "inputs": plan_inputs(table),
        "packer_version": PACKER_VERSION,
        "packer_source": packer_source(config.packing_strategy),
    }
    if work is not GENERIC_WORK:  # deleting the model does not change the packs
        expected["work"] = asdict(work)
    before = asdict(plan.summary)
    changed = differences({name: before[name] for name in expected}, expected)
    if changed:
        raise ArtifactError(
            str(folder),
            got="a plan made from other inputs: " + "; ".join(changed[:5]),
            expected="a new folder: plans are never overwritten",
            fix="choose another folder, or delete this one",
        )
    return plan.at_table(table)
