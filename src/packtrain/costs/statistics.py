"""The numbers that describe a cost table: counts, spread and totals, overall and by source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from packtrain.costs.table import CostTable

DESCRIBED = (
    "tokens",
    "text_tokens",
    "image_tokens",
    "video_tokens",
    "images",
    "videos",
    "frames",
    "objects",
    "patches",
    "supervised_tokens",
)


def describe(values: np.ndarray) -> dict[str, float]:
    """Mean, spread and percentiles of one column.

    >>> describe(np.array([1, 2, 3]))["median"]
    2.0
    """
    if len(values) == 0:
        return {}
    p50, p95, p99 = np.percentile(values, [50, 95, 99])
    return {
        "mean": float(values.mean()),
        "median": float(p50),
        "std": float(values.std()),
        "min": float(values.min()),
        "max": float(values.max()),
        "p95": float(p95),
        "p99": float(p99),
        "total": float(values.sum()),
    }


def summarise(table: CostTable) -> dict[str, Any]:
    """Statistics of every described column, one column in memory at a time, and the sources' shares."""
    tokens = table.column("tokens")
    sources = table.source_codes()
    by_source = {
        name: {"rows": int((sources.codes == code).sum()), "tokens": int(tokens[sources.codes == code].sum())}
        for code, name in enumerate(sources.names)
    }
    return {"columns": {name: describe(table.column(name)) for name in DESCRIBED}, "sources": by_source}
