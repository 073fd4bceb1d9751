"""Parquet, Arrow and Hugging Face datasets: every row is one entry, under its own number, broken or not."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_checks import read_all, read_units, reader, shown, source, values

from packtrain.core.errors import ConfigError
from packtrain.records.formats import hf_dataset, splits, table_rows, tables
from packtrain.records.formats import source_files as files
from packtrain.records.shards import address


def rows(number: int) -> list[dict[str, Any]]:
    return [
        {"i": i, "text": f"é {i}", "image": {"bytes": bytes([i % 256]) * 20, "path": None}, "turns": [{"n": i}]}
        for i in range(number)
    ]


def write_parquet(path: Path, number: int = 300, group: int = 100) -> Path:
    pq.write_table(pa.Table.from_pylist(rows(number)), path, row_group_size=group, write_page_checksum=True)
    return path


def write_arrow(path: Path, number: int = 300, batch: int = 70, stream: bool = False) -> Path:
    table = pa.Table.from_pylist(rows(number))
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


@pytest.mark.parametrize("rows_per_unit", [1, 32, 64, 100, 4096])
def test_parquet_rows_do_not_depend_on_units(tmp_path: Path, rows_per_unit: int) -> None:
    spec = source(write_parquet(tmp_path / "a.parquet"), "parquet")
    read = read_units(spec, rows_per_unit=rows_per_unit)
    entries = [entry for _, entries in read for entry in entries]
    assert values(entries) == rows(300)
    assert [entry.origin for entry in entries] == [f"a.parquet:{i}" for i in range(300)]
    assert len(read) == 3 * -(-100 // rows_per_unit)
    assert all(len(entries) <= rows_per_unit for _, entries in read)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rows_per_unit", [1, 33, 100, 1024])
def test_arrow_rows_do_not_depend_on_units_or_batches(tmp_path: Path, stream: bool, rows_per_unit: int) -> None:
    for batch in (1, 70, 300):
        spec = source(write_arrow(tmp_path / "a.arrow", batch=batch, stream=stream), "arrow")
        read = read_units(spec, rows_per_unit=rows_per_unit)
        entries = [entry for _, entries in read for entry in entries]
        assert values(entries) == rows(300)
        assert [entry.origin for entry in entries] == [f"a.arrow:{i}" for i in range(300)]
        assert len(read) == -(-300 // rows_per_unit)


def test_units_may_be_read_in_any_order(tmp_path: Path) -> None:
    for spec in (
        source(write_parquet(tmp_path / "a.parquet"), "parquet"),
        source(write_arrow(tmp_path / "a.arrow", stream=True), "arrow"),
    ):
        made = reader(spec.format, rows_per_unit=16)
        units = list(made.units(spec))
        in_order = {unit.start: shown(made.read(spec, unit)) for unit in units}
        for order in (units[::-1], units[::2] + units[1::2], [units[3], units[3], units[0]]):
            for unit in order:
                assert shown(made.read(spec, unit)) == in_order[unit.start]
        next(iter(made.read(spec, units[5])))  # left before its end
        assert shown(made.read(spec, units[6])) == in_order[units[6].start]


def test_reading_in_order_decodes_a_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = source(write_parquet(tmp_path / "a.parquet", 2000, 2000), "parquet")
    entered: list[int] = []
    enter = tables.ParquetCursor._enter
    monkeypatch.setattr(tables.ParquetCursor, "_enter", lambda self, group: (entered.append(group), enter(self, group)))
    made = reader("parquet", rows_per_unit=64)
    assert sum(1 for unit in made.units(spec) for _ in made.read(spec, unit)) == 2000
    assert entered.count(0) == 1


def test_few_rows_are_plain_python_at_a_time() -> None:
    assert tables.chunk_rows(num_bytes=10 << 20, num_rows=10) == 1
    assert tables.chunk_rows(num_bytes=1000, num_rows=10_000) == table_rows.MAX_CHUNK_ROWS
    assert tables.chunk_rows(num_bytes=0, num_rows=0) >= 1


def test_folders_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    for name in ("data/b.parquet", "data/deep/a.parquet", "data/deep/c.parquet", "outside.parquet"):
        write_parquet(tmp_path / name, 2)
    (tmp_path / "data" / "link.parquet").symlink_to(tmp_path / "outside.parquet")
    (tmp_path / "data" / "notes.txt").write_text("not data")
    entries = read_all(source(tmp_path / "data", "parquet"))
    assert [entry.origin for entry in entries][::2] == [
        "b.parquet:0",
        "deep/a.parquet:0",
        "deep/c.parquet:0",
        "link.parquet",
    ]
    assert entries[-1].error
    assert entries[-1].error.reason == files.LINK_OUT
    pattern = read_all(source(tmp_path / "data" / "**" / "[ab].parquet", "parquet"))
    assert [entry.origin for entry in pattern][::2] == ["b.parquet:0", "deep/a.parquet:0"]


@pytest.mark.parametrize("format", ["parquet", "arrow"])
@pytest.mark.parametrize(
    "data", [b"", b"junk" * 100, b"PAR1" * 5, b"ARROW1\0\0" + b"\0" * 30, b"\xff\xff\xff\xff\x10\0\0\0abc"]
)
def test_what_is_no_table_is_one_entry(tmp_path: Path, format: str, data: bytes) -> None:
    path = tmp_path / "a.table"
    path.write_bytes(data)
    assert shown(read_all(source(path, format))) == [("a.table", tables.BAD_TABLE)]
    assert shown(read_all(source(tmp_path / "none", format))) == [("none", address.CANNOT_OPEN)]


def test_every_row_of_a_damaged_row_group_is_accounted_for(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    offset = pq.ParquetFile(path).metadata.row_group(1).column(1).data_page_offset
    data = bytearray(path.read_bytes())
    data[offset + 40 : offset + 60] = bytes(byte ^ 255 for byte in data[offset + 40 : offset + 60])
    path.write_bytes(data)
    entries = read_all(source(path, "parquet"), rows_per_unit=64)
    assert [entry.origin for entry in entries] == [f"a.parquet:{i}" for i in range(300)]
    broken = [i for i, entry in enumerate(entries) if entry.error]
    assert broken == list(range(100, 200)), "the damage was not injected, or was not contained"
    assert {entry.error.reason for entry in entries if entry.error} == {tables.DAMAGED}
    assert entries[250].value == rows(300)[250]


def test_a_stream_that_is_cut_says_so(tmp_path: Path) -> None:
    whole = write_arrow(tmp_path / "a.arrow", stream=True).read_bytes()
    path = tmp_path / "cut.arrow"
    path.write_bytes(whole[:-8])  # exactly before the end mark: every batch is there, but nobody can know
    entries = read_all(source(path, "arrow"))
    assert values(entries[:-1]) == rows(300)
    assert shown(entries[-1:]) == [("cut.arrow", tables.CUT_OFF)]
    path.write_bytes(whole[: len(whole) * 2 // 3])
    entries = read_all(source(path, "arrow"))
    assert entries[-1].error
    assert values(entries[:-1]) == rows(300)[: len(entries) - 1]
    assert len(entries) > 100
    path.write_bytes(whole + whole)
    entries = read_all(source(path, "arrow"))
    assert len(entries) == 301
    assert entries[-1].error


@pytest.mark.parametrize("stream", [False, True])
def test_a_mapped_file_that_becomes_shorter_says_so(tmp_path: Path, stream: bool) -> None:
    """In a process of its own: the system kills one that reads beyond the end of what it has mapped."""
    path = write_arrow(tmp_path / "a.arrow", number=8_000, batch=2_000, stream=stream)
    child = os.fork()
    if child == 0:
        made, spec, details = reader("arrow"), source(path, "arrow"), []
        for unit in list(made.units(spec)):
            for entry in made.read(spec, unit):
                details.append("" if entry.error is None else entry.error.detail)
                if len(details) == 300:
                    os.truncate(path, 4096)
        said = "shorter" in details[1_023] and all(details[1_024:])
        os._exit(0 if len(details) == 8_000 and said else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_row_that_cannot_be_read_does_not_take_others_with_it(tmp_path: Path) -> None:
    texts = pa.array([b"one", b"\xff\xfe", b"three"]).cast(pa.binary()).view(pa.string())
    table = pa.table({"text": texts})
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    for format in ("parquet", "arrow"):
        entries = read_all(source(tmp_path / f"a.{format}", format))
        assert [entry.value and entry.value["text"] for entry in entries] == ["one", None, "three"]
        assert entries[1].error
        assert entries[1].error.reason == tables.BAD_ROW


def test_offsets_that_point_nowhere_do_not_crash(tmp_path: Path) -> None:
    offsets = pa.py_buffer(b"".join(n.to_bytes(4, "little", signed=True) for n in (0, 3, 2_000_000_000, 9)))
    broken = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"onetwosix")])
    batch = pa.record_batch([broken], names=["text"])
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    entries = read_all(source(tmp_path / "a.arrow", "arrow"))
    assert len(entries) == 3
    assert any(entry.error for entry in entries)


MUTATED = """
import random, sys
from format_checks import reader, source, PlainFiles

path, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
whole = open(path, "rb").read()
kind = "parquet" if path.endswith("parquet") else "arrow"
errors = 0
for seed in range(first, first + count):
    print("mutation", seed, file=sys.stderr)
    draw, data = random.Random(seed), bytearray(whole)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) - 8)
        data[at : at + draw.choice((1, 4, 8))] = draw.choice((b"\\xff\\xff\\xff\\x7f", b"\\0" * 4, draw.randbytes(4)))
    with open(path + ".bad", "wb") as file:
        file.write(data)
    made, spec = reader(kind), source(path + ".bad", kind)
    for unit in made.units(spec):
        for entry in made.read(spec, unit):
            errors += entry.error is not None
            if entry.at >= 0:
                with PlainFiles().plain(spec.path) as plain:
                    made.read_at(spec, spec.path, plain, entry.at, entry.origin)
print(errors)
"""


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow"])
@pytest.mark.parametrize("count", [60, pytest.param(3000, marks=pytest.mark.full)])
def test_mutated_tables_are_errors_and_never_a_crash(name: str, count: int, tmp_path: Path) -> None:
    """In a process of its own: what Arrow reads beyond its memory ends the process."""
    write = write_parquet if name.endswith("parquet") else write_arrow
    write(tmp_path / name, 12, 5, **({"stream": True} if name.startswith("stream") else {}))
    command = [sys.executable, "-c", MUTATED, str(tmp_path / name), "0", str(count)]
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folders})
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > count


@pytest.mark.parametrize("stream", [False, True])
def test_list_offsets_that_point_nowhere_do_not_crash(stream: bool, tmp_path: Path) -> None:
    """The sizes of such a batch must not be asked for: Arrow would follow these offsets out of its memory."""
    batch = pa.record_batch([[1, 2, 3], [["one"], ["two", "six"], ["ten"] * 4]], names=["i", "texts"])
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, make(sink, batch.schema) as writer:
        writer.write_batch(batch)
    right, wrong = (struct.pack("<4i", 0, 1, 3, last) for last in (7, 1_900_000_000))
    whole = (tmp_path / "a.arrow").read_bytes()
    assert whole.count(right) == 1
    (tmp_path / "a.arrow").write_bytes(whole.replace(right, wrong))
    read = "from format_checks import *; import sys; print(shown(read_all(source(sys.argv[1], 'arrow'))))"
    folders = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": folders}
    command = [sys.executable, "-c", read, str(tmp_path / "a.arrow")]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count(tables.BAD_ROW) == 1
    assert "'one'" in done.stdout


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_the_check_of_a_row_is_of_its_content_alone(kind: str, tmp_path: Path) -> None:
    def checks(rows: list[dict[str, Any]], group: int) -> list[int]:
        table = pa.Table.from_pylist(rows)
        if kind == "parquet":
            pq.write_table(table, tmp_path / "a", row_group_size=group, compression="zstd" if group > 1 else "none")
        else:
            make = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
            with pa.OSFile(str(tmp_path / "a"), "wb") as sink, make(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=group)
        return [entry.check for entry in read_all(source(tmp_path / "a", "parquet" if kind == "parquet" else "arrow"))]

    first = checks(rows(9), 2)
    assert first == checks(rows(9), 9)
    assert len(set(first)) == 9
    assert 0 not in first
    for change in (
        {"text": "é 5"},
        {"image": {"bytes": b"x" * 20, "path": None}},
        {"turns": [{"n": 7}]},
        {"i": 1 << 40},
    ):
        other = checks([{**row, **change} if row["i"] == 4 else row for row in rows(9)], 2)
        assert [at for at in range(9) if other[at] != first[at]] == [4], change


def test_a_value_that_rows_share_counts_for_each_of_them() -> None:
    text = "x" * (1 << 20)
    for kind in (pa.dictionary(pa.int32(), pa.string()), pa.string()):
        batch = pa.record_batch([pa.array([text] * 64).cast(kind)], names=["text"])
        assert tables.plain_bytes(batch) >= 64 << 20, kind
    nested = pa.array([[text] * 3] * 8, pa.list_(pa.dictionary(pa.int32(), pa.string())))
    assert tables.plain_bytes(pa.record_batch([nested], names=["text"])) >= 8 << 20


def save(folder: Path, number: int, files_in: int = 2) -> None:
    """A folder as `save_to_disk` lays it out."""
    folder.mkdir(parents=True)
    names = [f"data-{i:05d}-of-{files_in:05d}.arrow" for i in range(files_in)]
    table = pa.Table.from_pylist(rows(number))
    for i, name in enumerate(names):
        part = table.slice(i * number // files_in, (i + 1) * number // files_in - i * number // files_in)
        with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_saved_datasets_need_no_datasets_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    save(tmp_path / "one", 10)
    entries = read_all(source(tmp_path / "one", "hf_dataset"))
    assert values(entries) == rows(10)
    assert [entries[0].origin, entries[9].origin] == ["data-00000-of-00002.arrow:0", "data-00001-of-00002.arrow:4"]
    save(tmp_path / "many" / "train", 10)
    save(tmp_path / "many" / "test", 4)
    (tmp_path / "many" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert values(read_all(source(tmp_path / "many", "hf_dataset", split="test"))) == rows(4)
    with pytest.raises(ConfigError, match=r"one of train, test(.|\n)*'test'"):
        read_all(source(tmp_path / "many", "hf_dataset", split="tset"))
    with pytest.raises(ConfigError, match=r"packtrain\[train\]"):
        read_all(source("org/name", "hf_dataset"))


def test_a_saved_dataset_that_lost_a_file_says_so(tmp_path: Path) -> None:
    save(tmp_path / "a", 10)
    (tmp_path / "a" / "data-00001-of-00002.arrow").unlink()
    entries = read_all(source(tmp_path / "a", "hf_dataset"))
    assert len(entries) == 6
    assert shown(entries[5:]) == [("data-00001-of-00002.arrow", address.CANNOT_OPEN)]
    for state in (
        "{",
        "[]",
        '{"_data_files": [{"filename": "../b"}]}',
        '{"_data_files": [], "_indices_data_files": [1]}',
    ):
        (tmp_path / "a" / "state.json").write_text(state)
        assert shown(read_all(source(tmp_path / "a", "hf_dataset"))) == [("state.json", splits.BAD_FOLDER)]


def test_the_layout_is_what_save_to_disk_writes(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list([{"i": i} for i in range(7)])
    made.save_to_disk(str(tmp_path / "one"), num_shards=2)
    datasets.DatasetDict(train=made, test=made.select([3])).save_to_disk(str(tmp_path / "many"))
    assert splits.is_saved_dataset(str(tmp_path / "one"))
    assert splits.is_saved_dataset(str(tmp_path / "many"))
    assert values(read_all(source(tmp_path / "one", "hf_dataset"))) == [{"i": i} for i in range(7)]
    assert values(read_all(source(tmp_path / "many", "hf_dataset", split="test"))) == [{"i": 3}]


def test_media_of_streamed_datasets_stay_undecoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    junk = {"bytes": b"no picture at all", "path": None}  # decoding this would fail
    features = datasets.Features({"image": datasets.Image(), "images": datasets.List(datasets.Image())})
    storage = pa.Table.from_pylist([{"image": junk, "images": [junk, junk]}] * 5)
    (tmp_path / "data").mkdir()
    pq.write_table(storage.cast(features.arrow_schema), tmp_path / "data" / "train.parquet")
    spec = source(tmp_path / "data", "hf_dataset")
    read = read_units(spec, rows_per_unit=2)
    entries = [entry for _, entries in read for entry in entries]
    assert len(read) == 3
    assert values(entries) == [{"image": junk, "images": [junk, junk]}] * 5
    assert [entry.origin for entry in entries] == [f"data[train]:{i}" for i in range(5)]
    with pytest.raises(ConfigError, match="one of train"):
        read_all(source(tmp_path / "data", "hf_dataset", split="val"))


def test_a_stream_that_breaks_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def stream(spec: object) -> Any:
        yield from ({"i": i} for i in range(5))
        raise ConnectionError("gone")

    monkeypatch.setattr(hf_dataset, "_stream", stream)
    made = reader("hf_dataset", rows_per_unit=2)
    spec = source("org/name", "hf_dataset")
    entries = [entry for unit in made.units(spec) for entry in made.read(spec, unit)]
    assert shown(entries) == [(f"org/name[train]:{i}", {"i": i}) for i in range(5)] + [
        ("org/name[train]:5", hf_dataset.STREAM_BROKE)
    ]


def test_units_of_streamed_rows_are_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_dataset, "_stream", lambda spec: [{"image": {"bytes": b"x" * 1000}}] * 10)
    units = list(reader("hf_dataset", bytes_per_unit=2500).units(source("org/name", "hf_dataset")))
    assert [len(unit.payload) for unit in units] == [3, 3, 3, 1]
    assert [unit.first for unit in units] == [0, 3, 6, 9]


@pytest.mark.parametrize("streaming", [True, False])
def test_loaded_datasets_are_the_same_streamed_or_downloaded(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of data files that `load_dataset` understands; media columns arrive undecoded."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    table = pa.table({"i": list(range(600)), "image": [{"bytes": b"raw", "path": None}] * 600})
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "train.parquet")
    spec = replace(source(tmp_path / "data", "hf_dataset"), streaming=streaming)
    entries = read_all(spec)
    assert [entry.value["i"] for entry in entries if entry.value] == list(range(600))
    assert entries[7].value is not None
    assert entries[7].value["image"] == {"bytes": b"raw", "path": None}
    assert entries[7].origin == "data[train]:7"
