"""Which units there are to measure, and which of their entries were drawn."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from packtrain.core.errors import ConfigError
from packtrain.core.seeds import stream
from packtrain.measuring.request import Request
from packtrain.measuring.worker import WorkItem
from packtrain.records.open import count_unit, iter_units


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
    found = np.ones(len(sources), bool)
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
        found[records] = False
        found[stream(request.seed, "source", spec.name).choice(records, spec.max_samples, replace=False)] = True
    return np.flatnonzero(found)


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
