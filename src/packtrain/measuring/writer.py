"""Finished units in, the table's files out: in dataset order, the same bytes however they were measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.core.artifacts import atomic_path
from packtrain.core.errors import ArtifactError
from packtrain.core.values import LedgerEntry
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA, ContentHash, from_ipc, ledger_lines, shifted, to_ipc
from packtrain.measuring.journal import Journal, UnitResult
from packtrain.measuring.measure_summary import EntryCounts, TableContent, UnreadName
from packtrain.measuring.table import COSTS, LEDGER, MEDIA, DataFile
from packtrain.records.open import loses_more
from packtrain.records.shards.decompression import SPOILT

_ROW_GROUP = 65_536
_SUMMED = ("entries", "rows", "failed", "without_end", "shortened")  # of units
_PIECES = 256  # tables that are held before they are joined


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenTable:
    """What the files of a table hold."""

    counts: EntryCounts
    unread: Mapping[str, UnreadName]  # the most frequent first
    schemas: Mapping[str, int]  # what records were read as
    content: TableContent
    files: tuple[DataFile, ...]  # those that rows are in, numbered as they come
    unit_entries: tuple[int, ...]


def write_table(out: Path, journal: Journal) -> WrittenTable:
    """Write costs.parquet, media.parquet and ledger.jsonl."""
    totals, reasons, schemas = Counter(entries=0, rows=0), Counter[str](), Counter[str]()
    unread: dict[str, UnreadName] = {}
    files: dict[DataFile, int] = {}
    unit_entries, content = [], ContentHash()
    with ExitStack() as stack:
        costs_path, media_path, ledger_path = (
            stack.enter_context(atomic_path(out / name)) for name in (COSTS, MEDIA, LEDGER)
        )
        costs = stack.enter_context(_Groups(costs_path, COST_SCHEMA))
        media = stack.enter_context(_Groups(media_path, MEDIA_SCHEMA))
        ledger = stack.enter_context(ledger_path.open("wb"))
        for unit in deliverable(journal):
            rows = shifted(from_ipc(unit.costs), "index", totals["entries"])
            if unit.rows:
                rows = shifted(rows, "file", files.setdefault(DataFile(unit.source, unit.file), len(files)))
            headers = shifted(from_ipc(unit.media), "record", totals["entries"])
            costs.write(rows)
            media.write(headers)
            content.add(rows, headers)
            ledger.write(unit.ledger)
            totals.update({name: getattr(unit, name) for name in _SUMMED})
            schemas.update(unit.schemas)
            unit_entries.append(unit.entries)
            for name, (records, example) in unit.unread.items():  # the first record of each name stays
                known = unread.get(name, UnreadName(records=0, example=example))
                unread[name] = replace(known, records=known.records + records)
            for line in filter(None, unit.ledger.decode().split("\n")):
                entry = LedgerEntry(**json.loads(line))
                totals["ledger"] += 1
                totals["filtered"] += entry.filtered
                totals["cut_short"] += loses_more(entry.stage, entry.reason)
                reasons[f"{entry.stage}: {entry.reason}"] += 1
        if totals["entries"] != totals["rows"] + totals["ledger"]:  # something was lost: nothing is moved to its place
            got = f"{totals['rows']} rows + {totals['ledger']} ledger lines"
            raise ArtifactError("ledger", got=got, expected=f"{totals['entries']} entries read")
    return WrittenTable(
        counts=EntryCounts(**totals, reasons=dict(sorted(reasons.items()))),
        unread=dict(sorted(unread.items(), key=lambda item: (-item[1].records, item[0]))),
        schemas=dict(schemas.most_common()),
        content=content.summary(),
        files=tuple(files),
        unit_entries=tuple(unit_entries),
    )


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
