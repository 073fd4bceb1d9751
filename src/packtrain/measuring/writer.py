"""Finished units in, the table's files out: in dataset order, the same bytes however they were measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.core.artifacts import atomic_path
from packtrain.core.errors import ArtifactError
from packtrain.core.values import LedgerEntry
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA, Content, from_ipc, ledger_lines, shifted, to_ipc
from packtrain.measuring.journal import Journal, UnitResult
from packtrain.measuring.measure_summary import EntryCounts, UnreadName
from packtrain.measuring.table import COSTS, LEDGER, MEDIA, DataFile
from packtrain.records.open import loses_more
from packtrain.records.shards.decompression import SPOILT

_ROW_GROUP = 65_536
_PIECES = 256  # tables that are held before they are joined


@dataclass(kw_only=True, slots=True)
class TableCounts:
    """How many entries were read and what became of them."""

    entries: int = 0
    rows: int = 0
    ledger: int = 0
    failed: int = 0
    filtered: int = 0
    cut_short: int = 0  # ledger lines that stand for a whole file, or for the rest of one
    without_end: int = 0  # rows in which nothing that carries loss ends in an end token
    shortened: int = 0  # rows with an answer of which the chat template leaves something out
    unread: dict[str, list[Any]] = field(default_factory=dict)  # as the units have it
    schemas: Counter[str] = field(default_factory=Counter)  # what records were read as
    reasons: Counter[str] = field(default_factory=Counter)  # "stage: reason" -> ledger lines
    unit_entries: list[int] = field(default_factory=list)
    files: dict[DataFile, int] = field(default_factory=dict)  # those that rows stand in, numbered as they come
    content: Content = field(default_factory=Content)

    def file_number(self, unit: UnitResult) -> int:
        """The number of a unit's file; a new one where it is the first of its file."""
        return self.files.setdefault(DataFile(unit.source, unit.file), len(self.files))

    def take_unread(self, unit: UnitResult) -> None:
        """Add what nothing reads in a unit; the first record of each name stays."""
        for name, (records, example) in unit.unread.items():
            known = self.unread.setdefault(name, [0, example])
            known[0] += records

    def unread_by_name(self) -> dict[str, UnreadName]:
        """The most frequent first."""
        found = sorted(self.unread.items(), key=lambda item: (-item[1][0], item[0]))
        return {name: UnreadName(records=records, example=example) for name, (records, example) in found}

    def check(self) -> None:
        """Entries read = rows + ledger lines, or something was lost."""
        if self.entries != self.rows + self.ledger or self.ledger != self.reasons.total():
            raise ArtifactError(
                "ledger", got=f"{self.rows} rows + {self.ledger} ledger lines", expected=f"{self.entries} entries read"
            )

    def totals(self) -> EntryCounts:
        """For measure.json."""
        return EntryCounts(
            entries=self.entries,
            rows=self.rows,
            ledger=self.ledger,
            failed=self.failed,
            filtered=self.filtered,
            cut_short=self.cut_short,
            without_end=self.without_end,
            shortened=self.shortened,
            reasons=dict(sorted(self.reasons.items())),
        )


def write_table(out: Path, journal: Journal) -> TableCounts:
    """Write costs.parquet, media.parquet and ledger.jsonl."""
    counts = TableCounts()
    with ExitStack() as stack:
        costs_path, media_path, ledger_path = (
            stack.enter_context(atomic_path(out / name)) for name in (COSTS, MEDIA, LEDGER)
        )
        costs = stack.enter_context(_Groups(costs_path, COST_SCHEMA))
        media = stack.enter_context(_Groups(media_path, MEDIA_SCHEMA))
        ledger = stack.enter_context(ledger_path.open("wb"))
        for unit in deliverable(journal):
            rows = shifted(from_ipc(unit.costs), "index", counts.entries)
            rows = shifted(rows, "file", counts.file_number(unit)) if unit.rows else rows
            seen = shifted(from_ipc(unit.media), "record", counts.entries)
            costs.write(rows)
            media.write(seen)
            counts.content.add(rows, seen)
            ledger.write(unit.ledger)
            counts.entries += unit.entries
            counts.rows += unit.rows
            counts.failed += unit.failed
            counts.without_end += unit.without_end
            counts.shortened += unit.shortened
            counts.take_unread(unit)
            counts.schemas.update(unit.schemas)
            counts.unit_entries.append(unit.entries)
            for line in unit.ledger.decode().split("\n"):
                if line:
                    entry = json.loads(line)
                    counts.ledger += 1
                    counts.filtered += entry["filtered"]
                    counts.cut_short += loses_more(entry["stage"], entry["reason"])
                    counts.reasons[f"{entry['stage']}: {entry['reason']}"] += 1
        counts.check()
    return counts


def write_ledger(out: Path, journal: Journal) -> None:
    """Write the ledger.jsonl of a run that was stopped, from the units that are complete."""
    with atomic_path(out / LEDGER) as temporary, temporary.open("wb") as ledger:
        for unit in deliverable(journal):
            ledger.write(unit.ledger)


def deliverable(journal: Journal) -> Iterator[UnitResult]:
    """The units in order. Rows of a compressed file that has a fault are ledger lines: none of it can be delivered."""
    for unit in journal.in_order():
        yield _given_up(unit) if unit.rows and (unit.source, unit.file) in journal.spoilt else unit


def _given_up(unit: UnitResult) -> UnitResult:
    rows = from_ipc(unit.costs).select(["id", "origin"]).to_pylist()
    lines = (LedgerEntry(**row, stage="read", reason=SPOILT, detail="before the fault") for row in rows)
    return replace(
        unit,
        rows=0,
        unread={},
        failed=unit.failed + unit.rows,
        costs=to_ipc({name: [] for name in COST_SCHEMA.names}, COST_SCHEMA),
        media=to_ipc({name: [] for name in MEDIA_SCHEMA.names}, MEDIA_SCHEMA),
        ledger=ledger_lines(lines) + unit.ledger,
    )


class _Groups:
    """A parquet file in row groups of one fixed size, whatever the sizes of the pieces that come."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._writer = pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)
        self._held: list[pa.Table] = []
        self._rows = 0

    def write(self, table: pa.Table) -> None:
        self._held.append(table)
        self._rows += len(table)
        if len(self._held) >= _PIECES:  # a table of one row takes kilobytes
            self._held = [pa.concat_tables(self._held).combine_chunks()]
        while self._rows >= _ROW_GROUP:
            self._flush(_ROW_GROUP)

    def _flush(self, rows: int) -> None:
        whole = pa.concat_tables(self._held).combine_chunks()
        self._writer.write_table(whole.slice(0, rows), row_group_size=_ROW_GROUP)
        self._held, self._rows = [whole.slice(rows)], self._rows - rows

    def __enter__(self) -> _Groups:
        return self

    def __exit__(self, *_: object) -> None:
        if self._rows:
            self._flush(self._rows)
        self._writer.close()
