"""Units of the dataset: which there are, and how a worker process measures one. No torch, no transformers."""

from __future__ import annotations

import importlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from packtrain.core.errors import ConfigError
from packtrain.core.seeds import stream
from packtrain.core.values import LedgerEntry
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA, UnitRows, ledger_lines, to_ipc
from packtrain.measuring.journal import UnitResult
from packtrain.measuring.measurer import Measurer
from packtrain.measuring.request import Request
from packtrain.records.open import count_unit, iter_units, read_unit
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
    measurer.forget_names()  # of whatever it has looked at before
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
        unread=measurer.unread.drain(),
        schemas=dict(measurer.schemas),
        reasons=dict(Counter(f"{entry.stage}: {entry.reason}" for entry in failures)),
        costs=to_ipc(rows.costs, COST_SCHEMA),
        media=to_ipc(rows.media, MEDIA_SCHEMA),
        ledger=ledger_lines(rows.ledger),
    )


def _not_drawn(origin: str, reason: str) -> LedgerEntry:
    return LedgerEntry(id=origin, origin=origin, stage=_FILTER, reason=reason, filtered=True)


def work_items(request: Request) -> tuple[Iterator[WorkItem], int | None]:
    """The items in order, and their number where it can be known without reading compressed files through."""
    if request.draws:
        return _drawn(request)
    units = iter_units(request.specs)
    listed = []
    for unit in units:
        listed.append(unit)
        if unit.payload is not None:  # it carries its records, so no more of them can be held
            return map(WorkItem, itertools.chain(listed, units)), None
    return map(WorkItem, listed), len(listed)


def _drawn(request: Request) -> tuple[Iterator[WorkItem], int]:
    """Records without replacement, from the selected sources; a first pass counts, a second one measures."""
    filters, names = request.filters, [spec.name for spec in request.specs]
    wanted = [not filters.sources or name in filters.sources for name in names]
    sources, counts = [], []
    for unit in iter_units(request.specs):
        sources.append(unit.source)
        counts.append(count_unit(request.specs, unit) if wanted[unit.source] else 0)
    bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    pool = _of_sources(request, np.repeat(np.asarray(sources, np.int64), counts))
    if filters.limit is not None:
        pool = pool[stream(request.seed, "limit").choice(len(pool), min(filters.limit, len(pool)), replace=False)]
    parts = [(part, np.searchsorted(part, bounds)) for part in _parts(request, np.sort(pool))]

    def items() -> Iterator[WorkItem]:
        for at, unit in enumerate(iter_units(request.specs)):
            yield WorkItem(
                unit,
                *(frozenset((part[cuts[at] : cuts[at + 1]] - bounds[at]).tolist()) for part, cuts in parts),
            )

    return items(), len(counts)


def _of_sources(request: Request, sources: np.ndarray) -> np.ndarray:
    """The records that the sources are to give, of those whose `sources` these are."""
    kept = np.ones(len(sources), bool)
    for number, spec in enumerate(request.specs):
        records = np.flatnonzero(sources == number)
        if spec.max_samples is None or not len(records):
            continue
        if spec.max_samples > len(records):
            raise ConfigError(
                f"max_samples of {spec.name}",
                got=f"{spec.max_samples:,} of {len(records):,} records",
                expected="at most the number of records",
                fix=f"repeats: {spec.max_samples / len(records):.6g} uses records more than once",
            )
        kept[records] = False
        kept[stream(request.seed, "source", spec.name).choice(records, spec.max_samples, replace=False)] = True
    return np.flatnonzero(kept)


def _parts(request: Request, records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The records of the part that is wanted, and those of the other: together they are all, and share none."""
    size, total = request.filters.eval_size, len(records)
    if not size:
        return records, records[:0]
    held = math.ceil(size * total) if size < 1 else int(size)
    if not held < total:
        got = f"{size:g} of {total:,} records"
        raise ConfigError("data.eval_size", got=got, expected="records left to train on")
    order = stream(request.seed, "eval").permutation(records)
    parts = np.sort(order[held:]), np.sort(order[:held])
    return parts[::-1] if request.filters.eval_part else parts
