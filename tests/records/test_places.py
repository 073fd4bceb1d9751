"""Single entries at their places: what `read` gave is found there again, and little else is read for it."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
import tarfile
import tempfile
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from format_checks import HeldBytes, read_all, reader, source
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.records.formats import table_rows, tar_shards
from packtrain.records.formats.jsonl import TOO_LONG
from packtrain.records.open import open_sources, read_place
from packtrain.records.span import PlainFile

PACKERS: dict[str, Callable[[bytes], bytes]] = {"plain": bytes, "gzip": gzip.compress}
SPACE = st.text(" \t\r\n", max_size=4)
OBJECTS = st.dictionaries(st.text(max_size=4), st.one_of(st.text(max_size=12), st.integers(), st.none()), max_size=3)


class Broken:
    """Bytes that a fault of the disk stands before."""

    path: str | None = None

    def read_at(self, position: int, length: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


class TestLines:
    @settings(max_examples=60, deadline=None)
    @given(
        lines=st.lists(st.one_of(OBJECTS.map(json.dumps), SPACE.map(lambda s: s.replace("\n", ""))), max_size=9),
        ending=st.sampled_from(["\n", "\r\n"]),
        mark=st.booleans(),
        last=st.booleans(),
        packer=st.sampled_from(sorted(PACKERS)),
        block=st.sampled_from([1, 30, 1 << 20]),
    )
    def test_places_are_bytes_of_the_plain_file(
        self, lines: list[str], ending: str, mark: bool, last: bool, packer: str, block: int
    ) -> None:
        data = (b"\xef\xbb\xbf" if mark else b"") + ending.join(lines).encode() + (ending.encode() if last else b"")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "d.jsonl"
            path.write_bytes(PACKERS[packer](data))
            entries = read_all(source(path, "jsonl"), block=block)  # also reads every entry at its place
        assert len(entries) == sum(bool(line.strip()) for line in lines)
        places = [entry.at for entry in entries]
        assert places == sorted(set(places))
        for entry in entries:
            line = data[entry.at :].split(b"\n")[0]
            assert entry.at == 0 or data[entry.at - 1 : entry.at] == b"\n"
            assert entry.check == zlib.crc32(line)

    @pytest.mark.parametrize("packer", PACKERS)
    def test_a_line_that_is_too_long_moves_no_other(self, tmp_path: Path, packer: str) -> None:
        lines = [b'{"i": %d}' % i for i in range(20)]
        lines[7:7] = [b'"' + b"x" * 500 + b'"']
        path = tmp_path / "d.jsonl"
        path.write_bytes(PACKERS[packer](b"\n".join(lines)))
        entries = read_all(source(path, "jsonl"), longest=100, block=64)
        assert [entry.at for entry in entries] == [sum(len(line) + 1 for line in lines[:i]) for i in range(21)]
        assert [i for i, entry in enumerate(entries) if entry.error] == [7]

    def test_no_more_is_read_than_the_line_needs(self, tmp_path: Path) -> None:
        path = tmp_path / "d.jsonl"
        lines = [json.dumps({"i": i, "text": "word " * 20}) for i in range(20_000)]
        path.write_text("\n".join(lines))
        made, spec, plain = reader("jsonl", longest=50_000), source(path, "jsonl"), HeldBytes(str(path))
        assert len(plain.data) > 2_000_000
        entry = made.read_at(spec, str(path), plain, len(lines[0]) + 1, "o")
        assert entry.value is not None
        assert entry.value["i"] == 1
        assert plain.bytes_read <= 1 << 14
        plain.data, plain.bytes_read = b"x" * 1_000_000, 0
        entry = made.read_at(spec, str(path), plain, 0, "o")
        assert entry.error is not None
        assert entry.error.reason == TOO_LONG
        assert plain.bytes_read <= 50_001


class TestElements:
    @settings(max_examples=60, deadline=None)
    @given(
        elements=st.lists(st.tuples(SPACE, OBJECTS, SPACE), min_size=1, max_size=6),
        ascii=st.booleans(),
        around=st.sampled_from([("", ""), ('{"ü": [1, "é"], "data": ', ', "more": {"ö": []}}')]),
        mark=st.booleans(),
        packer=st.sampled_from(sorted(PACKERS)),
        block=st.sampled_from([1, 1 << 20]),
    )
    def test_places_are_bytes_of_the_plain_file(
        self,
        elements: list[tuple[str, Any, str]],
        ascii: bool,
        around: tuple[str, str],
        mark: bool,
        packer: str,
        block: int,
    ) -> None:
        texts = [json.dumps(value, ensure_ascii=ascii) for _, value, _ in elements]
        inner = ",".join(before + text + after for text, (before, _, after) in zip(texts, elements, strict=True))
        data = (b"\xef\xbb\xbf" if mark else b"") + f"{around[0]}[{inner}]{around[1]}".encode()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "d.json"
            path.write_bytes(PACKERS[packer](data))
            entries = read_all(source(path, "json"), block=block)
        assert [entry.value for entry in entries] == [value for _, value, _ in elements]
        for entry, text in zip(entries, texts, strict=True):
            assert data[entry.at :].startswith(text.encode())
            assert entry.check == zlib.crc32(text.encode())

    def test_elements_longer_than_a_block(self, tmp_path: Path) -> None:
        made = [{"i": i, "text": "äö" * 40_000 * (i % 2) + "x"} for i in range(6)]
        path = tmp_path / "d.json"
        path.write_text(json.dumps(made, ensure_ascii=False), encoding="utf-8")
        assert [entry.value for entry in read_all(source(path, "json"))] == made


class TestSamples:
    def archive(self, format: int, **headers: str) -> bytes:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=format, pax_headers=headers) as archive:
            for i in range(5):
                for ending, data in (("jpg", b"J%d" % i * 300), ("json", b'{"i": %d}' % i)):
                    info = tarfile.TarInfo(f"{'folder/' * 30}{i}.{ending}")  # longer than a header's name field
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        return buffer.getvalue()

    @pytest.mark.parametrize("packer", PACKERS)
    @pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
    def test_a_place_is_that_of_the_first_header(self, tmp_path: Path, format: int, packer: str) -> None:
        data = self.archive(format)
        path = tmp_path / "s.tar"
        path.write_bytes(PACKERS[packer](data))
        entries = read_all(source(path, "webdataset"))
        assert [entry.value for entry in entries] == [{"i": i} for i in range(5)]
        for entry in entries:
            first = tarfile.TarInfo.frombuf(data[entry.at : entry.at + 512], "utf-8", "strict")
            assert first.type in (tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME), "the long name stands before the member"
            assert entry.check == zlib.crc32(json.dumps(entry.value).encode())

    def test_headers_for_all_members(self, tmp_path: Path) -> None:
        """Those that change what a member is would not be seen by who reads one sample."""
        path = tmp_path / "s.tar"
        path.write_bytes(self.archive(tarfile.PAX_FORMAT, comment="a commit"))
        assert len(read_all(source(path, "webdataset"))) == 5
        path.write_bytes(self.archive(tarfile.PAX_FORMAT, path="another/name.json"))
        (entry,) = read_all(source(path, "webdataset"))
        assert entry.error is not None
        assert entry.error.reason == tar_shards.DAMAGED

    def test_media_are_not_read(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for name, data in (("a.mp4", b"x" * 5_000_000), ("a.json", b"{}"), ("b.json", b"{}")):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
        path = tmp_path / "s.tar"
        path.write_bytes(buffer.getvalue())
        plain = HeldBytes(str(path), str(path))
        entry = reader("webdataset").read_at(source(path, "webdataset"), str(path), plain, 0, "s.tar:a")
        assert entry.media["mp4"].size == 5_000_000
        assert plain.bytes_read < 100_000


def rows(number: int, size: int = 50) -> list[dict[str, Any]]:
    return [
        {"i": i, "text": f"{i} " * size, "image": {"bytes": bytes([i % 256]) * size, "path": None}}
        for i in range(number)
    ]


class TestRows:
    @pytest.fixture
    def decoded(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Row groups that were decoded, in order."""
        groups: list[int] = []
        decode = table_rows.ParquetRows._decode_group

        def counted(self: Any, group: int, most: int) -> Any:
            groups.append(group)
            return decode(self, group, most)

        monkeypatch.setattr(table_rows.ParquetRows, "_decode_group", counted)
        return groups

    @pytest.mark.parametrize("in_memory", [False, True])
    def test_a_row_group_is_decoded_once(self, tmp_path: Path, decoded: list[int], in_memory: bool) -> None:
        path = tmp_path / "d.parquet"
        pq.write_table(pa.Table.from_pylist(rows(400)), path, row_group_size=100)
        made, spec = reader("parquet"), source(path, "parquet")
        plain = HeldBytes(str(path), None if in_memory else str(path))
        order = list(range(400))
        random.Random(1).shuffle(order)
        for row in order:
            found = made.read_at(spec, str(path), plain, row, f"d:{row}")
            assert found.value == rows(row + 1)[row] if row < 20 else found.value and found.value["i"] == row
        assert sorted(decoded) == [0, 1, 2, 3]

    def test_a_large_row_group_is_kept_on_disk(self, tmp_path: Path, decoded: list[int], monkeypatch: Any) -> None:
        monkeypatch.setattr(table_rows.RowReader, "held_bytes", 100_000)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
        (tmp_path / "scratch").mkdir()
        path = tmp_path / "d.parquet"
        pq.write_table(pa.Table.from_pylist(rows(1200, size=1000)), path, row_group_size=600)
        made, spec, plain = reader("parquet"), source(path, "parquet"), HeldBytes(str(path), str(path))
        before = pa.total_allocated_bytes()
        for row in [*range(0, 600, 7), *range(599, 0, -11)]:
            found = made.read_at(spec, str(path), plain, row, "o")
            assert found.value is not None
            assert (found.value["i"], found.value["text"]) == (row, f"{row} " * 1000)
        assert decoded == [0]
        assert pa.total_allocated_bytes() - before < 1_500_000, "the group is in memory"
        assert os.listdir(tmp_path / "scratch") == [], "its file would stay behind"

    def test_what_is_held_is_bounded(self, tmp_path: Path, decoded: list[int], monkeypatch: Any) -> None:
        monkeypatch.setattr(table_rows.RowReader, "held_bytes", 300_000)
        path = tmp_path / "d.parquet"
        pq.write_table(pa.Table.from_pylist(rows(1000, size=500)), path, row_group_size=100)
        made, spec, plain = reader("parquet"), source(path, "parquet"), HeldBytes(str(path), str(path))
        before = pa.total_allocated_bytes()
        for row in range(0, 1000, 10):
            made.read_at(spec, str(path), plain, row, "o")
            assert pa.total_allocated_bytes() - before < 1_500_000
        assert decoded == list(range(10))

    def test_another_file_of_the_same_name_is_noticed(self, tmp_path: Path) -> None:
        path = tmp_path / "d.parquet"
        pq.write_table(pa.table({"i": [1, 2]}), path)
        made, spec, plain = reader("parquet"), source(path, "parquet"), HeldBytes(str(path), str(path))
        assert made.read_at(spec, str(path), plain, 1, "o").value == {"i": 2}
        pq.write_table(pa.table({"i": [7]}), tmp_path / "new")
        os.replace(tmp_path / "new", path)
        assert made.read_at(spec, str(path), plain, 0, "o").value == {"i": 7}
        assert made.read_at(spec, str(path), plain, 1, "o").error is not None

    @pytest.mark.parametrize("compression", [None, "zstd"])
    @pytest.mark.parametrize("kind", ["file", "stream"])
    @pytest.mark.parametrize("encoded", [False, True])
    def test_arrow_files_of_every_kind(self, tmp_path: Path, compression: Any, kind: str, encoded: bool) -> None:
        """Many batches, dictionaries that differ from batch to batch, compressed buffers."""
        path = tmp_path / "d.arrow"
        parts = [pa.Table.from_pylist(rows(i + 1)) for i in range(9)]
        if encoded and kind == "stream":
            parts = [part.set_column(1, "text", part["text"].dictionary_encode()) for part in parts]
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with new(path, parts[0].schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
            for part in parts:
                writer.write_table(part)
        entries = read_all(source(path, "arrow"), rows_per_unit=4)
        assert [entry.value for entry in entries] == [row for i in range(9) for row in rows(i + 1)]

    def test_many_threads_read_the_same_table(self, tmp_path: Path) -> None:
        path = tmp_path / "d.parquet"
        pq.write_table(pa.Table.from_pylist(rows(300)), path, row_group_size=20)
        specs = open_sources(str(path))
        plain, wrong = HeldBytes(str(path), str(path)), []

        def work(seed: int) -> None:
            for row in random.Random(seed).choices(range(300), k=150):
                found = read_place(specs, 0, str(path), plain, row, "o").value
                if found is None or found["i"] != row:
                    wrong.append(row)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    @pytest.mark.parametrize("streaming", [True, False])
    def test_loaded_datasets_give_the_same_value_at_any_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
    ) -> None:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        features = datasets.Features(
            {
                "image": datasets.Image(),
                "kind": datasets.ClassLabel(names=["cat", "dog"]),
                "when": datasets.Value("timestamp[s]"),
                "grid": datasets.Array2D((2, 2), "int32"),
                "turns": datasets.List({"from": datasets.Value("string"), "value": datasets.Value("string")}),
            }
        )
        made = [
            {
                "image": {"bytes": b"raw %d" % i, "path": None},
                "kind": i % 2,
                "when": i,
                "grid": [[i, 1], [2, 3]],
                "turns": [{"from": "human", "value": str(i)}] * (i % 3),
            }
            for i in range(12)
        ]
        (tmp_path / "data").mkdir()
        datasets.Dataset.from_list(made, features=features).to_parquet(tmp_path / "data" / "train.parquet")
        entries = read_all(source(tmp_path / "data", "hf_dataset", streaming=streaming))  # and each at its place
        assert [entry.at for entry in entries] == list(range(12))
        assert entries[5].value is not None
        assert entries[5].value["image"] == {"bytes": b"raw 5", "path": None}
        spec = source(tmp_path / "data", "hf_dataset", streaming=streaming)
        assert reader("hf_dataset").read_at(spec, "data[train]", Broken(), 12, "o").error is not None


@pytest.mark.parametrize("format", ["jsonl", "json"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"d.{format}"
    lines = [json.dumps({"i": i, "text": "word " * 50}) for i in range(10_000)]
    path.write_text("\n".join(lines) if format == "jsonl" else "[" + ",\n".join(lines) + "]")
    made, spec, plain = reader(format), source(path, format), HeldBytes(str(path))
    places = [entry.at for unit in made.units(spec) for entry in made.read(spec, unit)]
    assert len(places) == 10_000
    assert len(plain.data) > 2_500_000
    tracemalloc.start()
    try:
        found = [made.read_at(spec, str(path), plain, at, "o").value["i"] for at in places[::97]]  # type: ignore[index]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == list(range(0, 10_000, 97))
    assert peak < 500_000


@pytest.mark.parametrize("format", ["jsonl", "json", "webdataset", "parquet", "arrow"])
def test_a_fault_of_the_disk_is_not_one_of_the_data(tmp_path: Path, format: str) -> None:
    """So that it can be tried again."""
    with pytest.raises(OSError, match="Input/output error"):
        reader(format).read_at(source(tmp_path / "d", format), "d", Broken(), 0, "o")
    gone = HeldBytes(os.devnull, str(tmp_path / "gone"))
    if format in ("parquet", "arrow"):
        with pytest.raises(FileNotFoundError):
            reader(format).read_at(source(tmp_path / "d", format), "d", gone, 0, "o")


@pytest.mark.parametrize("size", [0, 1, 2, 3, 1000, 1023, 1024, 1025])
def test_the_size_of_bytes_without_a_file(tmp_path: Path, size: int) -> None:
    (tmp_path / "d").write_bytes(bytes(range(256)) * 5)
    plain = HeldBytes(str(tmp_path / "d"))
    plain.data = plain.data[:size]
    file = PlainFile(plain)
    assert file.size() == file.seek(0, os.SEEK_END) == size
    file.seek(-min(3, size), os.SEEK_END)
    assert file.read() == plain.data[-min(3, size) :][: min(3, size)]
