"""Data of the measuring and loader benchmarks: chats about pictures as lines and in compressed shards; long tables.

A long table is that of a file with many lines, each of which can be read at its own place. The file repeats a block of
lines, so that only the block has to be measured: the costs of the other lines are known to be the same.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.app.datasets import MultiModalDataset
from packtrain.bench.printing import column
from packtrain.config.dataset_config import DatasetConfig
from packtrain.core.checksums import file_sums
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA, content_of, shifted
from packtrain.measuring.measure_summary import count_copies, table_statistics
from packtrain.measuring.request import measure_inputs
from packtrain.measuring.table import COSTS, MEDIA, CostTable, write_summary
from packtrain.records.synthetic import JsonRecord, picture_chats, picture_names, write_dataset, write_lines

PICTURES = picture_names(64)
SHARDS = 4
BLOCK = 1_000  # different lines of a long file
_ROW_GROUP = 65_536


def write_pictures(root: Path) -> None:
    """`PICTURES`, drawn, of about 640x480."""
    write_dataset(root, pictures=len(PICTURES))


def write_shards(folder: Path, records: list[JsonRecord], root: Path) -> Path:
    """The same records in the same order in compressed archives, each with its picture."""
    folder.mkdir()
    for shard, numbers in enumerate(np.array_split(np.arange(len(records)), SHARDS)):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for number in numbers.tolist():
                record = json.loads(json.dumps(records[number]))
                image = record["messages"][0]["content"][0]
                _add(archive, f"{number:06d}.jpg", (root / image["image"]).read_bytes())
                image["image"] = "jpg"
                _add(archive, f"{number:06d}.json", json.dumps(record).encode())
        (folder / f"shard-{shard:03d}.tar.gz").write_bytes(gzip.compress(buffer.getvalue(), 1, mtime=0))
    return folder


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


# ---- long tables


@dataclass(frozen=True, kw_only=True, slots=True)
class LongSize:
    """How large a dataset of many rows is."""

    rows: int = column("rows")
    packs: int = column("packs")
    fill: float = column("fill", "{:.4f}")
    capacity: int  # tokens of a pack
    prepare_seconds: float = column(
        "from costs to packs, s", "{:.1f}"
    )  # from the cost table to the plan and the rows for delivery
    data_bytes: int = column("data MB", lambda row: f"{row.data_bytes / 1e6:,.0f}")
    made_bytes: int = column(
        "costs, plan and rows, MB", lambda row: f"{row.made_bytes / 1e6:,.0f}"
    )  # cost table, plan and rows for delivery


@dataclass(frozen=True, kw_only=True, slots=True)
class LongData:
    """A dataset of many rows, measured and packed."""

    config: DatasetConfig
    size: LongSize


def write_long(root: Path, rows: int, config: DatasetConfig) -> LongData:
    """A file with this many lines, its cost table and its plan."""
    block = min(BLOCK, rows)
    path = write_lines(root / f"long-{rows}.jsonl", picture_chats(PICTURES, (2 + (n * 7) % 29 for n in range(block))))
    config = replace(config, dataset_path=str(path), cache_dir=str(root / f"cache-{rows}"))
    table = _table_of(config)
    repeat_file(path, rows // block)
    repeat_table(table, rows // block)
    begun = time.perf_counter()
    dataset = MultiModalDataset(config)
    dataset.build()
    seconds = time.perf_counter() - begun
    epoch = dataset.plan.summary.epochs[0]
    size = LongSize(
        rows=len(CostTable.load(table.folder)),
        packs=epoch.packs,
        fill=epoch.fill,
        capacity=dataset.plan.config.packing_length,
        prepare_seconds=seconds,
        data_bytes=path.stat().st_size,
        made_bytes=sum(file.stat().st_size for file in _made_files(dataset)),
    )
    return LongData(config=config, size=size)


def _table_of(config: DatasetConfig) -> CostTable:
    """The cost table of a dataset, measured now."""
    dataset = MultiModalDataset(config)
    dataset.build()
    return CostTable.load(dataset.plan.summary.cost_table)


def _made_files(dataset: MultiModalDataset) -> list[Path]:
    """The files that a dataset is delivered from, apart from its data."""
    table, plan = Path(dataset.plan.summary.cost_table), dataset.plan.folder
    assert plan is not None, "plans of datasets are in folders"
    row_files = (Path(str(dataset.config.cache_dir)) / "rows").glob("rows-*.arrow")
    rows = max(row_files, key=lambda file: file.stat().st_size)  # the block alone has its rows there as well
    return [file for file in (*table.iterdir(), *plan.iterdir(), rows) if file.is_file()]


def repeat_file(path: Path, times: int) -> None:
    """Repeat the lines of a file."""
    block = path.read_bytes()
    with path.open("ab") as file:
        for _ in range(times - 1):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())  # pages that are not written yet could not be dropped from memory


def repeat_table(table: CostTable, times: int) -> CostTable:
    """The cost table of a file whose lines were repeated, as measuring it would make it; every line must have a row."""
    folder, entries = table.folder, len(table)
    block_bytes = int(next(iter(table.summary.data.values()))["size"])
    costs, media = pq.read_table(folder / COSTS), pq.read_table(folder / MEDIA)
    name = str(costs["origin"][0]).rpartition(":")[0]
    with (
        pq.ParquetWriter(folder / COSTS, COST_SCHEMA, compression="zstd") as cost_file,
        pq.ParquetWriter(folder / MEDIA, MEDIA_SCHEMA, compression="zstd") as media_file,
    ):
        at_once = max(1, _ROW_GROUP // entries)
        for first in range(0, times, at_once):
            turns = range(first, min(first + at_once, times))
            rows = pa.concat_tables(
                shifted(shifted(costs, "index", turn * entries), "at", turn * block_bytes) for turn in turns
            )
            lines = range(first * entries + 1, turns[-1] * entries + entries + 1)
            origins = pa.array([f"{name}:{line}" for line in lines])
            cost_file.write_table(rows.set_column(rows.schema.get_field_index("origin"), "origin", origins))
            media_file.write_table(pa.concat_tables(shifted(media, "record", turn * entries) for turn in turns))
    request = table.request()
    counts = replace(table.summary.counts, entries=entries * times, rows=entries * times)
    content = content_of(folder / COSTS, folder / MEDIA)
    schemas = {name: number * times for name, number in table.summary.schemas.items()}
    summary = replace(table.summary, inputs=measure_inputs(request), counts=counts, schemas=schemas, content=content)
    longer = CostTable(folder, summary)
    summary = replace(
        summary,
        statistics=table_statistics(longer),
        copies=count_copies(longer.column("check"), longer.column("tokens")),
        sums=file_sums(folder, (COSTS, MEDIA)),
    )
    write_summary(folder, summary)
    return CostTable.load(folder)


def forget_pages(files: Iterable[Path]) -> None:
    """Ask the system to drop these files from its page cache, so that the next reader goes to the disk."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
