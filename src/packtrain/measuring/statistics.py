"""The numbers that describe a cost table: counts, spread and totals, overall and by source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from packtrain.measuring.measure_summary import MeasureSummary, SourceTotals, TableStatistics, UnreadName

if TYPE_CHECKING:
    from packtrain.measuring.table import CostTable

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


_FEW_SUPERVISED = 0.02  # of all tokens: less is said
_NAMED = 8  # columns and keys that nothing reads
_MANY_COPIES = 0.01  # of all records: more are said


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


def unread_note(unread: Mapping[str, UnreadName]) -> tuple[str, ...]:
    """Which columns and keys of the data nothing reads.

    >>> unread_note({"mood": UnreadName(records=2, example="a7")})[0].partition(";")[0]
    'unused columns or keys in the data: mood (2 records, first a7)'
    """
    if not unread:
        return ()
    named = [f"{name} ({one.records:,} records, first {one.example})" for name, one in unread.items()]
    more = f" and {len(named) - _NAMED:,} more" if len(named) > _NAMED else ""
    return (
        f"unused columns or keys in the data: {', '.join(named[:_NAMED])}{more}; "
        "--columns maps them, --strict-columns refuses records that have any",
    )


def data_notes(summary: MeasureSummary) -> tuple[str, ...]:
    """What a user should know about what is trained."""
    counts, columns, copies = summary.counts, summary.statistics.columns, summary.copies
    rows, notes = counts.rows, []
    learned, tokens = columns["supervised_tokens"]["total"], columns["tokens"]["total"]
    if learned < _FEW_SUPERVISED * tokens:
        notes.append(
            f"only {learned / tokens:.1%} of all tokens carry loss ({learned:,.0f} of {tokens:,.0f}): "
            "answers are short compared to prompts and media"
        )
    if copies > _MANY_COPIES * rows:
        notes.append(f"{copies:,} of {rows:,} records have the same text as another one")
    if number := counts.without_end:
        whose = "any sample" if number == rows else f"{number:,} of {rows:,} samples"
        notes.append(
            f"no supervised text in {whose} ends with an EOS token, so the model is not trained to stop: "
            "add_eos appends one, except to input_ids"
        )
    if number := counts.shortened:
        notes.append(
            f"the chat template drops part of the answer (usually reasoning) in {number:,} of {rows:,} samples: "
            "that part is not trained"
        )
    return (*notes, *unread_note(summary.unread))


def table_statistics(table: CostTable) -> TableStatistics:
    """Statistics of every described column, one column in memory at a time, and the sources' shares."""
    tokens = table.column("tokens")
    sources = table.source_codes()
    by_source = {
        name: SourceTotals(rows=int((sources.codes == code).sum()), tokens=int(tokens[sources.codes == code].sum()))
        for code, name in enumerate(sources.names)
    }
    return TableStatistics(columns={name: describe(table.column(name)) for name in DESCRIBED}, sources=by_source)


def count_copies(checks: np.ndarray, tokens: np.ndarray) -> int:
    """Rows whose text another one has, by their checksums of 32 bits and their tokens; some have no checksum.

    >>> count_copies(np.array([7, 7, 9, 7, 0, 0]), np.array([5, 5, 5, 6, 5, 5]))
    1
    """
    known = (checks + (tokens.astype(np.int64) << 32))[checks != 0]
    return len(known) - len(np.unique(known))
