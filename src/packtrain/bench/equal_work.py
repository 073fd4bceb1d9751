"""How equal the work of ranks is under the three orders of packs, on sets that never touch the disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from packtrain.families.known_shapes import known_config
from packtrain.packing.balance import balance_table
from packtrain.packing.pack_plan import ENTRY_SCHEMA, PACK_SCHEMA, PACKER_VERSION, EpochPacks, PackPlan
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.plan_summary import EpochCounts, PlanSummary
from packtrain.packing.resources import EXTRAS, RESOURCES, Samples, Tails
from packtrain.packing.windows import pack_windows
from packtrain.predicting.flops import WorkModel, work_model
from packtrain.predicting.shapes import shape_from_config
from packtrain.predicting.values import TrainingSetup

MODEL = "Qwen3-VL-2B"


class _MemoryRows:
    """Samples in memory as the rows of a cost table."""

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def read(self, start: int, stop: int) -> tuple[Samples, Tails]:
        part = Samples({name: column[start:stop] for name, column in self._samples.columns.items()})
        return part, Tails(part["tokens"] - part["vision_tokens"])


def plan_of(samples: Samples, config: PackingConfig, work: WorkModel) -> PackPlan:
    """A plan of one epoch, without the cost table that plans are otherwise made from."""
    windows = list(pack_windows(_MemoryRows(samples), config, 0, None))
    counts = np.cumsum([0] + [len(window.entries) for window in windows])
    columns = {
        "end": [window.offsets[1:] + base for window, base in zip(windows, counts[:-1], strict=True)],
        "window": [np.full(len(window.offsets) - 1, n, np.int32) for n, window in enumerate(windows)],
        **{name: [window.loads[name] for window in windows] for name in (*RESOURCES, *EXTRAS)},
    }
    packs = pa.table({name: np.concatenate(parts) for name, parts in columns.items()}, schema=PACK_SCHEMA)
    rows = np.concatenate([window.entries.rows for window in windows])
    summary = PlanSummary(
        config=config,
        inputs={"rows": len(samples)},
        packer_version=PACKER_VERSION,
        cost_table="",
        work=work,
        files=1,
        epochs=(EpochCounts(packs=packs.num_rows, entries=len(rows)),),
    )
    return PackPlan(summary, [EpochPacks(pa.table({"row": rows}, schema=ENTRY_SCHEMA), packs)])


def equal_work(
    name: str, samples: Samples, limits: Mapping[str, int], ranks: tuple[int, ...] = (8, 64, 512)
) -> dict[str, Any]:
    """One set: the three orders for several numbers of ranks, with eight packs a step for each rank."""
    config = PackingConfig(**limits)  # type: ignore[arg-type]
    work = work_model(
        shape_from_config(known_config(MODEL.lower())), TrainingSetup(), longest=int(samples["tokens"].max())
    )
    plan = plan_of(samples, config, work)
    predicted = plan.predicted_work(0)
    return {
        "set": name,
        "limits": dict(limits),
        "samples": plan.epoch(0).num_entries,
        "packs": plan.num_packs,
        "work_spread": float(predicted.std() / predicted.mean()),
        "lines": [asdict(line) for line in balance_table(plan, ranks)],
    }
