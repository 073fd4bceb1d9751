"""The numbers that describe a cost table: counts, spread and totals, overall and by source."""

from __future__ import annotations

from collections.abc import Mapping
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


def label_notes(counts: Mapping[str, Any]) -> tuple[str, ...]:
    """What a user should know about what is trained; `counts` as measure.json has them.

    >>> label_notes({"rows": 9, "without_end": 0, "shortened": 0})
    ()
    """
    rows, notes = counts["rows"], []
    if number := counts.get("without_end", 0):
        whose = "any sample" if number == rows else f"{number:,} of {rows:,} samples"
        notes.append(
            f"nothing that carries loss in {whose} ends in an end token, so it does not teach the model to stop: "
            "add_eos appends one"
        )
    if number := counts.get("shortened", 0):
        notes.append(
            f"the chat template leaves out a part of answers (reasoning, as a rule) in {number:,} of {rows:,} samples: "
            "that part is not trained"
        )
    return tuple(notes)


def summarise(table: CostTable) -> dict[str, Any]:
    """Statistics of every described column, one column in memory at a time, and the sources' shares."""
    tokens = table.column("tokens")
    sources = table.source_codes()
    by_source = {
        name: {"rows": int((sources.codes == code).sum()), "tokens": int(tokens[sources.codes == code].sum())}
        for code, name in enumerate(sources.names)
    }
    return {"columns": {name: describe(table.column(name)) for name in DESCRIBED}, "sources": by_source}
