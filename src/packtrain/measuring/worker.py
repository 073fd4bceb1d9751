"""What runs in a worker process: one unit of the dataset in, its rows out. No torch, no transformers."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass

from packtrain.core.values import LedgerEntry
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA, UnitRows, ledger_lines, to_ipc
from packtrain.measuring.journal import UnitResult
from packtrain.measuring.measurer import Measurer
from packtrain.measuring.request import Request
from packtrain.records.open import read_unit
from packtrain.records.source import Unit

FAMILY_RULE = "packtrain.measuring.measurer:FamilyRule"
_FILTER, _LIMIT, _OTHER = "filter", "not drawn by max_samples", "in the other part of eval_size"
NOT_DRAWN, OTHER_PART = (f"{_FILTER}: {reason}" for reason in (_LIMIT, _OTHER))  # as counts of reasons name them


@dataclass(frozen=True, slots=True)
class Task:
    """What every unit of one run has in common."""

    request: Request
    rule: str = FAMILY_RULE  # "module:class" of the CostRule; the processor's own is imported only where it is needed
    inputs: str = ""  # digest of the inputs, so that a process that lives on notices a changed template


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One unit, and which of its entries were drawn (None: all of them)."""

    unit: Unit
    drawn: frozenset[int] | None = None
    other: frozenset[int] = frozenset()  # entries of the other part, where some are held out


_latest: list[tuple[Task, Measurer]] = []  # one process measures one task, so its tokenizer is loaded once


def measurer_for(task: Task) -> Measurer:
    """This process's measurer for a task."""
    if not _latest or _latest[0][0] != task:
        module, _, name = task.rule.partition(":")
        rule = getattr(importlib.import_module(module), name)(task.request)
        _latest[:] = [(task, Measurer(task.request, rule))]
    return _latest[0][1]


def measure_unit(task: Task, item: WorkItem) -> UnitResult:
    """Measure every entry of one unit."""
    measurer, rows = measurer_for(task), UnitRows()
    measurer.unread(), measurer.schemas()  # of whatever it has looked at before
    entries = rows.passing(read_unit(task.request.specs, item.unit))
    if item.drawn is None:
        for result in measurer.measure(entries, item.unit.source):
            rows.add(result)
    else:
        for position, entry in enumerate(entries):
            if position in item.drawn:
                rows.add(next(measurer.measure([entry], item.unit.source)))
            else:
                rows.add(_not_drawn(entry.origin, _OTHER if position in item.other else _LIMIT))
    failures = [entry for entry in rows.ledger if not entry.filtered]
    return UnitResult(
        number=item.unit.number,
        source=item.unit.source,
        file=item.unit.file,
        entries=rows.entries,
        rows=len(rows.costs["index"]),
        failed=len(failures),
        without_end=rows.without_end,
        shortened=rows.shortened,
        unread=measurer.unread(),
        schemas=measurer.schemas(),
        reasons=dict(Counter(f"{entry.stage}: {entry.reason}" for entry in failures)),
        costs=to_ipc(rows.costs, COST_SCHEMA),
        media=to_ipc(rows.media, MEDIA_SCHEMA),
        ledger=ledger_lines(rows.ledger),
    )


def _not_drawn(origin: str, reason: str) -> LedgerEntry:
    return LedgerEntry(id=origin, origin=origin, stage=_FILTER, reason=reason, filtered=True)
