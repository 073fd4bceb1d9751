"""What a run's config has made in the cache: removed on request, so that everything is made again."""

from __future__ import annotations

from pathlib import Path

from packtrain.app.cache.cached import Cached, clear_cache, list_cache
from packtrain.app.cache.made import in_cache
from packtrain.app.train.resolve import ResolvedRun
from packtrain.config.dataset_config import DatasetConfig
from packtrain.core.errors import PacktrainError
from packtrain.core.fingerprint import digest
from packtrain.core.numbers import counted
from packtrain.delivery.encode.row_table import fingerprint_of
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import PLAN, PackPlan, plan_inputs


def clear_run(run: ResolvedRun) -> tuple[str, ...]:
    """Remove the cost tables, plans, rows and tokens of a run; what was removed, in words."""
    removed: list[Cached] = []
    for config in (run.data, run.evaluation):
        if config is not None:
            root = Path(str(config.cache_dir))
            entries = _made_by(config, root)
            clear_cache(entries, root)
            removed += entries
    if not removed:
        return ("--clear-cache: nothing of this config was in the cache",)
    size = sum(entry.bytes for entry in removed)
    return (f"--clear-cache: {counted(len(removed), 'entry', 'entries')} of this config removed, {size:,} bytes",)


def _made_by(config: DatasetConfig, root: Path) -> list[Cached]:
    """Its cost table with rows and tokens, its plans of this mode, whatever their length; the other mode's stay."""
    name = digest(config.measured_by())
    table, tokens = (in_cache(root, kind, name, of=config.dataset_path) for kind in ("measure", "tokens"))
    own = (table, *((tokens,) if config.caches_tokens else ()))
    measured = _measured(table)
    rows = f"rows-{fingerprint_of(measured)}.arrow" if measured is not None else ""
    inputs = plan_inputs(measured) if measured is not None else None
    found = list_cache(root, ("measure", "plans", "rows", "tokens"), look=False)
    plans = [one for one in found if one.kind == "plans" and _is_plan(one, table, inputs, config)]
    return [one for one in found if one.path in own or one.path.name == rows or one in plans]


def _measured(table: Path) -> CostTable | None:
    try:
        return CostTable.load(table)
    except (PacktrainError, OSError):
        return None


def _is_plan(entry: Cached, table: Path, inputs: dict[str, object] | None, config: DatasetConfig) -> bool:
    """A plan of this table, or of one with the same content that lies elsewhere."""
    try:
        plan = PackPlan.load(entry.path / PLAN, checked=False)
    except (PacktrainError, OSError):
        return False
    padded = plan.config.packing_strategy == "none"
    of_table = plan.summary.cost_table == str(table.resolve()) or plan.summary.inputs == inputs
    return of_table and padded == (not config.has_packs)
