"""The columns of costs.parquet and media.parquet, how rows become them, and a hash of what they hold."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.core.fingerprint import digest
from packtrain.core.values import Cost, LedgerEntry, Measured
from packtrain.measuring.measure_summary import JsonObject, MeasureSummary, TableContent
from packtrain.records.source import Entry

COST_SCHEMA = pa.schema(
    [("index", pa.int64()), ("id", pa.string()), ("origin", pa.string()), ("source", pa.string())]
    + [("file", pa.int32()), ("at", pa.int64()), ("check", pa.int64())]
    + [(name, pa.int64()) for name in ("tokens", "text_tokens", "image_tokens", "video_tokens", "audio_tokens")]
    + [(name, pa.int32()) for name in ("images", "videos", "frames")]
    + [("audio_seconds", pa.float64()), ("objects", pa.int32())]
    + [(name, pa.int64()) for name in ("patches", "max_patches_per_image", "supervised_tokens", "tail_tokens")]
    + [("tail_runs", pa.string())]
)
MEDIA_SCHEMA = pa.schema(
    [
        ("record", pa.int64()),
        ("kind", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("frames", pa.int32()),
        ("fps", pa.float64()),
        ("seconds", pa.float64()),
        ("supervised", pa.bool_()),
        ("limits", pa.string()),
    ]
)
COST_FIELDS = tuple(f.name for f in fields(Cost))


@dataclass
class UnitRows:
    """Rows of one unit of work, collected column by column; `index` counts from the unit's first entry.

    A unit is a piece of one file. `file` is 0 here: which number that file has is known only when all units are.
    """

    costs: dict[str, list[object]] = field(default_factory=lambda: {name: [] for name in COST_SCHEMA.names})
    media: dict[str, list[object]] = field(default_factory=lambda: {name: [] for name in MEDIA_SCHEMA.names})
    ledger: list[LedgerEntry] = field(default_factory=list)
    entries: int = 0
    without_end: int = 0  # rows in which nothing that carries loss ends in an end token
    shortened: int = 0  # rows with an answer of which the chat template leaves something out
    _places: deque[tuple[int, int]] = field(default_factory=deque)  # of entries whose results are still to come

    def passing(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """The entries themselves; where they stand is noted for their results, which come later in the same order."""
        for entry in entries:
            self._places.append((entry.at, entry.check))
            yield entry

    def add(self, result: Measured | LedgerEntry) -> None:
        """Take the next entry's result."""
        at, check = self._places.popleft()
        position, self.entries = self.entries, self.entries + 1
        if isinstance(result, LedgerEntry):
            self.ledger.append(result)
            return
        costs, media = self.costs, self.media
        costs["index"].append(position)
        costs["id"].append(result.record_id)
        costs["origin"].append(result.origin)
        costs["source"].append(result.source)
        costs["file"].append(0)
        costs["at"].append(at)
        costs["check"].append(check)
        self.without_end += not result.supervision.ended
        self.shortened += result.supervision.shortened
        for name in COST_FIELDS:
            costs[name].append(getattr(result.cost, name))
        for header, supervised in zip(result.media, result.supervision.media, strict=True):
            media["record"].append(position)
            media["supervised"].append(supervised)
            media["limits"].append("" if header.limits is None else header.limits.text())
            for name in ("kind", "width", "height", "frames", "fps", "seconds"):
                media[name].append(getattr(header, name))


def ledger_lines(entries: Iterable[LedgerEntry]) -> bytes:
    """Entries of a ledger as JSON lines."""
    text = "".join(json.dumps(asdict(entry), ensure_ascii=False) + "\n" for entry in entries)
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate becomes the escape that JSON has for it


def to_ipc(columns: dict[str, list[object]], schema: pa.Schema) -> bytes:
    """Columns as an Arrow stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(pa.table(columns, schema=schema))
    return sink.getvalue().to_pybytes()


def from_ipc(data: bytes) -> pa.Table:
    """The table of an Arrow stream."""
    return pa.ipc.open_stream(data).read_all()


def shifted(table: pa.Table, column: str, base: int) -> pa.Table:
    """The table with `base` added to one column, so that positions in a unit become positions in the dataset."""
    at = table.schema.get_field_index(column)
    values = pa.compute.add(table[column], pa.scalar(base, table.schema.field(at).type))
    return table.set_column(at, table.schema.field(at), values)


_UNCHECKED = 0  # the check of a row that was made by `load_dataset`, which has none


class ContentHash:
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
        columns = {name: hashed.hexdigest() for name, hashed in self._hashes.items()}
        return TableContent(digest=digest(columns), unchecked=self._unchecked)

    def _take(self, name: str, column: pa.Array) -> None:
        if not len(column):  # nor has it a hash: whether empty pieces came must not be seen
            return
        hashed = self._hashes.setdefault(name, hashlib.sha256())
        if pa.types.is_string(column.type):
            offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
            self._hashes.setdefault(f"{name} lengths", hashlib.sha256()).update(np.diff(offsets).tobytes())
            text = column.buffers()[2]
            hashed.update(memoryview(text)[int(offsets[0]) : int(offsets[-1])] if text is not None else b"")
            return
        values = column.to_numpy(zero_copy_only=False)
        hashed.update(np.ascontiguousarray(values).tobytes())


def content_of(costs: Path, media: Path) -> TableContent:
    """The content of a table's files, row group by row group."""
    content = ContentHash()
    rows, headers = (pq.ParquetFile(file, page_checksum_verification=True) for file in (costs, media))
    for number in range(rows.num_row_groups):
        content.add(rows.read_row_group(number), MEDIA_SCHEMA.empty_table())
    for number in range(headers.num_row_groups):
        content.add(COST_SCHEMA.empty_table(), headers.read_row_group(number))
    return content.summary()


def identity_of(summary: MeasureSummary) -> JsonObject:
    """What was measured, and how: the inputs of a table without where its media lay and when its files were written.

    Rows carry a checksum of their text, so that their hash stands for the data. Where some do not, as rows that
    `load_dataset` makes, the states of the data files stay as they are.
    """
    inputs, content = summary.inputs, summary.content
    if content is None:
        return inputs
    request, data = inputs["request"], inputs["data"]
    specs = [{name: value for name, value in spec.items() if name != "media_root"} for spec in request["specs"]]
    if not content.unchecked:
        data = {name: {"size": state["size"]} if "size" in state else state for name, state in data.items()}
    return {**inputs, "request": {**request, "specs": specs}, "data": data, "content": content.digest}
