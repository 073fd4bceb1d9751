"""The rows of a cost table in one mapped file: the same values, made once, never half."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "packing"))  # tables made from arrays, as the tests of plans make them

from dataclasses import fields, replace

from tables import write_table

from packtrain.core.checksums import FileSum
from packtrain.core.errors import ArtifactError
from packtrain.delivery.encode import row_table as rows_module
from packtrain.delivery.encode.row_table import ROW_SCHEMA, RowTable, SampleRow
from packtrain.measuring.table import CostTable

COUNT = 1000


@pytest.fixture
def table(tmp_path: Path) -> CostTable:
    numbers = np.random.default_rng(0)
    columns = {name: numbers.integers(1, 5000, COUNT) for name in ("tokens", "patches", "supervised_tokens")}
    places = {"at": np.cumsum(columns["tokens"]), "check": numbers.integers(0, 2**32, COUNT)}
    counts = {name: numbers.integers(0, 9, COUNT) for name in ("images", "videos", "frames")}
    files = np.arange(COUNT) // 300
    made = write_table(tmp_path / "costs", {**columns, **places, **counts, "file": files}, row_group=128)
    found = replace(made.summary, files=((0, "a.jsonl"), (0, "b.jsonl"), (1, "ü\udcff.tar"), (2, "d")))
    return CostTable(made.folder, found)


def assert_rows(made: RowTable, table: CostTable) -> None:
    expected = {name: table.column(name) for name in ROW_SCHEMA.names if name != "source"}
    assert len(made) == len(table)
    for number in range(len(table)):
        row = made.row(number)
        assert all(getattr(row, name) == values[number] for name, values in expected.items())
        assert row.source == table.files[row.file].source


def test_rows_are_those_of_the_table(table: CostTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROWS_PER_BATCH", 70)
    made = RowTable.make(table, tmp_path / "rows")
    assert_rows(made, table)
    assert made.files == table.files
    assert {field.name for field in fields(SampleRow)} == {"headers", *ROW_SCHEMA.names}
    assert made.column("tokens").tolist() == table.column("tokens").tolist()
    for outside in (-1, COUNT):
        with pytest.raises(IndexError):
            made.row(outside)


def test_rows_that_limits_dropped_are_not_there(table: CostTable, tmp_path: Path) -> None:
    """A table with other limits has other numbers and fewer rows, in its own order."""
    limited = CostTable(table.folder, table.summary)
    kept = np.flatnonzero(np.arange(COUNT) % 3 != 1)
    limited._rows, limited._columns = kept, {"tokens": table.column("tokens")[kept] + 7}
    limited.limits = type(limited.limits)(max_pixels=1000)
    made, whole = RowTable.make(limited, tmp_path / "rows"), RowTable.make(table, tmp_path / "rows")
    assert made.path != whole.path
    assert_rows(made, limited)
    assert_rows(whole, table)
    assert made.row(1).id == whole.row(2).id
    assert made.row(1).tokens == whole.row(2).tokens + 7


def test_it_is_made_once_and_found_again(table: CostTable, tmp_path: Path) -> None:
    first = RowTable.make(table, tmp_path / "rows")
    state = os.stat(first.path)
    again = RowTable.make(CostTable(table.folder, table.summary), tmp_path / "rows")
    assert os.stat(again.path).st_ino == state.st_ino
    assert os.stat(again.path).st_mtime_ns == state.st_mtime_ns
    for opened in (RowTable.open(tmp_path / "rows"), RowTable.open(first.path), pickle.loads(pickle.dumps(first))):
        assert opened.row(5) == first.row(5)
        assert opened.fingerprint == first.fingerprint
    assert len(pickle.dumps(first)) < 1000, "a path travels, not the rows"


def test_many_may_make_it_at_once(table: CostTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Path] = []
    write = rows_module._write

    def counted(table: Any, path: Path, fingerprint: str) -> None:
        written.append(path)
        write(table, path, fingerprint)

    monkeypatch.setattr(rows_module, "_write", counted)
    found: list[RowTable] = []
    threads = [threading.Thread(target=lambda: found.append(RowTable.make(table, tmp_path / "r"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(written) == 1, "the others wait for the first"
    assert_rows(found[3], table)


def test_without_locks_all_of_them_write_the_same(
    table: CostTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", no_locks)
    found: list[RowTable] = []
    threads = [threading.Thread(target=lambda: found.append(RowTable.make(table, tmp_path / "r"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert_rows(found[0], table)
    assert [name for name in os.listdir(tmp_path / "r") if name.endswith(".tmp")] == []


def test_a_failure_leaves_no_rows(table: CostTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROWS_PER_BATCH", 100)
    read, calls = CostTable.rows, []

    def failing(self: CostTable, names: Any, positions: np.ndarray) -> Any:
        calls.append(len(positions))
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        return read(self, names, positions)

    monkeypatch.setattr(CostTable, "rows", failing)
    with pytest.raises(OSError, match="No space"):
        RowTable.make(table, tmp_path / "rows")
    assert calls == [100] * 4, "no more than a span of rows is in memory"
    assert [name for name in os.listdir(tmp_path / "rows") if not name.endswith(".lock")] == []
    assert_rows(RowTable.make(table, tmp_path / "rows"), table)


def test_a_file_that_cannot_be_used(table: CostTable, tmp_path: Path) -> None:
    made = RowTable.make(table, tmp_path / "rows")
    whole = made.path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 1):
        made.path.write_bytes(whole[:size])
        with pytest.raises(ArtifactError, match=r"rows-\w+\.arrow"):
            RowTable.open(made.path)
        with pytest.raises(ArtifactError, match="delete it"):
            RowTable.make(table, tmp_path / "rows")
    with pytest.raises(ArtifactError, match="one rows-"):
        RowTable.open(tmp_path / "costs")


def test_what_was_read_to_its_end_is_not_read_again(
    table: CostTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same process, unless it has changed since."""
    made = RowTable.make(table, tmp_path / "rows")
    os.utime(made.path, (1, 1))
    real, read = FileSum.of, list[Path]()

    def counted(path: Path, *more: Any) -> FileSum:
        read.append(path)
        return real(path, *more)

    monkeypatch.setattr(FileSum, "of", counted)
    for _ in range(3):
        RowTable.make(table, tmp_path / "rows")
    assert read == [made.path]
    content = bytearray(made.path.read_bytes())
    content[len(content) // 2] ^= 1
    made.path.write_bytes(content)
    os.utime(made.path, (1, 1))
    with pytest.raises(ArtifactError, match="content has changed since it was written"):
        RowTable.make(table, tmp_path / "rows")


def test_another_table_is_not_taken_for_this_one(table: CostTable, tmp_path: Path) -> None:
    first = RowTable.make(table, tmp_path / "rows")
    other = write_table(tmp_path / "other", {"tokens": np.arange(1, COUNT + 1)})
    second = RowTable.make(other, tmp_path / "rows")
    assert first.path != second.path
    os.replace(second.path, first.path)
    with pytest.raises(ArtifactError, match="unchanged file"):
        RowTable.make(table, tmp_path / "rows")
    os.replace(second.path.with_suffix(".json"), first.path.with_suffix(".json"))
    with pytest.raises(ArtifactError, match=first.path.name):
        RowTable.make(table, tmp_path / "rows")


def test_opening_it_takes_no_memory(tmp_path: Path) -> None:
    """300,000 rows of 60 MB: a process that reads some of them grows by much less."""
    count = 300_000
    ids = [f"{'sample' * 15}-{n}" for n in range(count)]
    table = write_table(tmp_path / "costs", {"tokens": np.arange(1, count + 1), "id": ids})
    made = RowTable.make(table, tmp_path / "rows")
    assert made.path.stat().st_size > 50_000_000
    program = (
        "import sys, resource; from packtrain.delivery.encode.row_table import RowTable; import pyarrow as pa\n"
        "def own(): found = open('/proc/self/statm').read().split(); return int(found[1]) - int(found[2])\n"
        "before = own(); rows = RowTable.open(sys.argv[1])\n"
        "assert [rows.row(n).tokens for n in range(0, 300_000, 997)] == list(range(1, 300_001, 997))\n"
        "print((own() - before) * resource.getpagesize(), pa.total_allocated_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program, made.path], capture_output=True, text=True, check=True)
    grown, allocated = map(int, done.stdout.split())
    assert grown < 15_000_000
    assert allocated < 1_000_000
