"""The columns of costs.parquet and media.parquet, and how rows become them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields

import pyarrow as pa

from packtrain.core.values import Cost, LedgerEntry, Measured
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
