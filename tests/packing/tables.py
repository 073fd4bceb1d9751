"""Cost tables made from arrays, as measuring would have written them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.core.checksums import file_sums
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA
from packtrain.measuring.measure_summary import EntryCounts, MeasureSummary, Places, table_statistics
from packtrain.measuring.table import COSTS, LEDGER, MEDIA, CostTable, write_summary


def spread_runs(tail: int, supervised: int, turns: int = 8) -> str:
    """The runs of a tail in which that many tokens carry loss, in turns of about equal length."""
    carrying = min(tail, supervised)
    shares = [
        (part * (at + 1) // turns - part * at // turns) for at in range(turns) for part in (tail - carrying, carrying)
    ]
    return ",".join(map(str, shares))


def write_table(
    folder: Path,
    columns: dict[str, Any],
    *,
    mixture: dict[str, Any] | None = None,
    model: str = "none",
    row_group: int = 65_536,
    inputs: dict[str, Any] | None = None,
) -> CostTable:
    """A cost table with these columns; what is not given follows from the tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.asarray(columns["tokens"], np.int64)
    count = len(tokens)
    filled: dict[str, Any] = {
        "index": np.arange(count),
        "id": [f"sample-{n}" for n in range(count)],
        "origin": [f"data.jsonl:{n + 1}" for n in range(count)],
        "source": ["data"] * count,
        "text_tokens": tokens,
        "supervised_tokens": np.maximum(tokens // 2, 1),
        "tail_tokens": tokens,
        **columns,
    }
    filled.setdefault("tail_runs", list(map(spread_runs, filled["tail_tokens"], filled["supervised_tokens"])))
    for field in COST_SCHEMA:
        filled.setdefault(field.name, np.zeros(count))
    arrays = [pa.array(filled[field.name]).cast(field.type) for field in COST_SCHEMA]
    pq.write_table(
        pa.table(arrays, schema=COST_SCHEMA),
        folder / COSTS,
        row_group_size=row_group,
        compression="zstd",
        write_page_checksum=True,
    )
    pq.write_table(MEDIA_SCHEMA.empty_table(), folder / MEDIA)
    (folder / LEDGER).write_text("")
    summary = MeasureSummary(
        inputs=inputs or {"request": {"limits": {}}, "settings": {"model_type": "text"}},
        places=Places(model=model) if inputs is None else Places(),
        mixture=mixture or {name: {"repeats": None, "weight": None} for name in sorted(set(filled["source"]))},
        counts=EntryCounts(entries=count, rows=count),
        files=((0, "data.jsonl"),),
        sums=file_sums(folder, (COSTS, MEDIA)),
    )
    if count:
        write_summary(folder, summary)
        summary = replace(summary, statistics=table_statistics(CostTable.load(folder)))
    write_summary(folder, summary)
    return CostTable.load(folder)
