"""What a cost table holds, as one hash that is the same wherever, whenever and in however many pieces it was made."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.core.fingerprint import digest
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA
from packtrain.measuring.measure_summary import MeasureSummary, TableContent

_UNCHECKED = 0  # the check of a row that was made by `load_dataset`, which has none


class Content:
    """Takes the rows of a table piece by piece. Every column has a hash of its own, so that pieces leave no trace."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}
        self._unchecked = 0

    def add(self, costs: pa.Table, media: pa.Table) -> None:
        """The next rows."""
        self._unchecked += int((costs["check"].to_numpy() == _UNCHECKED).sum())
        for kind, table in (("costs", costs), ("media", media)):
            for name in table.column_names:
                for chunk in table[name].chunks:
                    self._take(f"{kind}.{name}", chunk)

    def summary(self) -> TableContent:
        """One hash of what was added."""
        columns = {name: found.hexdigest() for name, found in self._hashes.items()}
        return TableContent(digest=digest(columns), unchecked=self._unchecked)

    def _take(self, name: str, column: pa.Array) -> None:
        if not len(column):  # nor has it a hash: whether empty pieces came must not be seen
            return
        found = self._hashes.setdefault(name, hashlib.sha256())
        if pa.types.is_string(column.type):
            offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
            self._hashes.setdefault(f"{name} lengths", hashlib.sha256()).update(np.diff(offsets).tobytes())
            text = column.buffers()[2]
            found.update(memoryview(text)[int(offsets[0]) : int(offsets[-1])] if text is not None else b"")
            return
        values = column.to_numpy(zero_copy_only=False)
        found.update(np.ascontiguousarray(values).tobytes())


def content_of(costs: Path, media: Path) -> TableContent:
    """The content of a table's files, row group by row group."""
    found = Content()
    rows, seen = (pq.ParquetFile(file, page_checksum_verification=True) for file in (costs, media))
    for number in range(rows.num_row_groups):
        found.add(rows.read_row_group(number), MEDIA_SCHEMA.empty_table())
    for number in range(seen.num_row_groups):
        found.add(COST_SCHEMA.empty_table(), seen.read_row_group(number))
    return found.summary()


def identity_of(summary: MeasureSummary) -> dict[str, Any]:
    """What was measured, and how: the inputs of a table without where its media lay and when its files were written.

    Rows carry a checksum of their text, so that their hash stands for the data. Where some do not, as rows that
    `load_dataset` makes, the states of the data files stay as they are.
    """
    inputs, content = summary.inputs, summary.content
    if content is None:
        return dict(inputs)
    request, data = inputs["request"], inputs["data"]
    specs = [{name: value for name, value in spec.items() if name != "media_root"} for spec in request["specs"]]
    if not content.unchecked:
        data = {name: {"size": state["size"]} if "size" in state else state for name, state in data.items()}
    return {**inputs, "request": {**request, "specs": specs}, "data": data, "content": content.digest}
