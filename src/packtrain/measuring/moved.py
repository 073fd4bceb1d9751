"""Data that have moved: check that records still cost what was measured, and that media did not change."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from packtrain.core.values import Measured
from packtrain.measuring.columns import COST_FIELDS
from packtrain.measuring.table import COSTS, CostTable
from packtrain.measuring.worker import Task, measurer_for
from packtrain.records.open import iter_units, read_unit

LOOKED_AT = 64  # records of a source
_MEDIA = ("images", "videos", "audio_seconds")


def others_there(task: Task, table: CostTable) -> list[str]:
    """Which sources lie elsewhere than when the table was measured, and have other records or media there.

    The states of data files say nothing of media, whose names are relative: a few records are measured again.
    """
    places = zip(table.places.sources, task.request.places().sources, strict=False)
    moved = [number for number, (before, now) in enumerate(places) if before != now]
    return [change for number in moved for change in _differing(task, table, number)]


def _differing(task: Task, table: CostTable, number: int) -> list[str]:
    """The first record at the beginning of a source that is not what the table says; those with media first."""
    spec = task.request.specs[number]
    unit = next(iter_units([spec]), None)
    entries = {entry.origin: entry for entry in read_unit([spec], unit)} if unit is not None else {}
    rows = sorted(_rows(table, spec.name, entries), key=lambda row: not any(row[name] for name in _MEDIA))[:LOOKED_AT]
    measured = measurer_for(task).measure([entries[row["origin"]] for row in rows], number)
    for row, now in zip(rows, measured, strict=True):
        if not isinstance(now, Measured):
            return [f"{row['origin']} in {spec.path}: {now.reason}"]
        same = (now.record_id, entries[row["origin"]].check) == (row["id"], row["check"])
        if not same or any(getattr(now.cost, name) != row[name] for name in COST_FIELDS):
            return [f"{row['origin']} in {spec.path}: {row['tokens']} -> {now.cost.tokens} tokens, or another text"]
    return []


def _rows(table: CostTable, source: str, origins: Collection[str]) -> list[dict[str, Any]]:
    wanted = (pc.field("source") == source) & pc.field("origin").isin(list(origins))
    found = pq.read_table(table.folder / COSTS, columns=["id", "origin", "check", *COST_FIELDS], filters=wanted)
    return found.to_pylist()  # type: ignore[no-any-return]
