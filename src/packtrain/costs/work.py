"""Which units there are to measure, and which of their entries were drawn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from packtrain.core.seeds import stream
from packtrain.costs.request import Request
from packtrain.costs.worker import WorkItem
from packtrain.records.open import count_unit, iter_units


def work_items(request: Request) -> tuple[Iterator[WorkItem], int | None]:
    """The items in order, and their number where it can be known without reading compressed files through."""
    if request.filters.limit is not None:
        return _drawn(request, request.filters.limit)
    units = iter_units(request.specs)
    listed = []
    for unit in units:
        listed.append(unit)
        if unit.payload is not None:  # it carries its records, so no more of them can be held
            return map(WorkItem, itertools.chain(listed, units)), None
    return map(WorkItem, listed), len(listed)


def _drawn(request: Request, limit: int) -> tuple[Iterator[WorkItem], int]:
    """A sample without replacement from the selected sources; a first pass counts, a second one measures."""
    names = [spec.name for spec in request.specs]
    wanted = [not request.filters.sources or name in request.filters.sources for name in names]
    units = iter_units(request.specs)
    counts = [count_unit(request.specs, unit) if wanted[unit.source] else 0 for unit in units]
    bounds = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    total = int(bounds[-1])
    drawn = np.sort(stream(request.seed, "limit").choice(total, min(limit, total), replace=False))
    cuts = np.searchsorted(drawn, bounds)

    def items() -> Iterator[WorkItem]:
        for at, unit in enumerate(iter_units(request.specs)):
            yield WorkItem(unit, frozenset((drawn[cuts[at] : cuts[at + 1]] - bounds[at]).tolist()))

    return items(), len(counts)
