"""Records read one by one: each is the measured one, from any format, or an error says which file is another."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from every_format import RECORDS, SOURCES, picture, with_bytes, write_lines, write_list, write_mixture, write_tar

from packtrain.app.measure import measure_outcome
from packtrain.core.dataclass_json import from_json
from packtrain.core.errors import DataError, RecordError
from packtrain.core.retries import PAUSES
from packtrain.core.values import Record
from packtrain.delivery.encode.row_table import RecordReader, RowTable
from packtrain.measuring.measure_summary import Places
from packtrain.measuring.measurer import Converter
from packtrain.measuring.request import Filters, Request
from packtrain.measuring.table import CostTable
from packtrain.records.open import iter_units, read_unit
from packtrain.records.schemas.converters import SchemaOptions
from packtrain.records.shards.data_files import CachedFiles, LocalFiles
from packtrain.records.shards.shard_cache import ShardCache
from packtrain.records.span import Files, Plain

Model = Callable[[str], Path]
PER_TAR = 2  # shards


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, model: Model) -> Iterator[CostTable]:
    """A mixture of every format, measured."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "hf")
        patch.setenv("PACKTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        data = write_mixture(tmp_path_factory.mktemp("mixture"))
        out = folder / "costs"
        yield measure_outcome(
            data, model=str(model("qwen2_5_vl")), out=out, workers=1, check=0, max_failure_rate=0.1
        ).table


def lines_table(folder: Path, model: Model, records: int = 30) -> CostTable:
    """A small measured file of lines."""
    folder.mkdir(parents=True, exist_ok=True)
    turns = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * i}] for i in range(1, 40)]
    rows = [{"id": f"r{i}", "messages": turns[i]} for i in range(records)]
    (folder / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: dict[str, Any] = {"workers": 1, "check": 0}
    return measure_outcome(folder / "d.jsonl", model=str(model("llama")), out=folder / "costs", **options).table


def reader_of(table: CostTable, folder: Path, files: Files | None = None) -> RecordReader:
    return RecordReader(table.request(), RowTable.make(table, folder), files or LocalFiles())


def record_of(reader: RecordReader, number: int) -> Record:
    with reader.open_record(number) as record:
        return record


def shown(reader: RecordReader, record: Record, source: int) -> tuple[Any, ...]:
    """A record with the bytes of its media in place of where they are."""
    media = []
    for medium in record.media():
        with reader.store(source).open(medium.ref) as file:
            media.append((medium.kind, medium.ref.name, file.read()))
    texts = [(m.role, m.train, [getattr(part, "text", "*") for part in m.parts]) for m in record.messages]
    return record.id, record.origin, record.source, record.plain, record.objects, texts, media


def as_measured(table: CostTable) -> list[tuple[Record, int]]:
    """The records in dataset order, by reading everything through as measuring does."""
    request = table.request()
    converter, found = Converter(request), []
    for unit in iter_units(request.specs):
        for entry in read_unit(request.specs, unit):
            if entry.error is None:
                found.append((converter.record(entry, unit.source), unit.source))
    return found


class TestEveryFormat:
    def test_the_data_hold_what_they_should(self, measured: CostTable) -> None:
        counts = measured.summary.statistics.sources
        assert {name: found.rows for name, found in counts.items()} == {
            name: RECORDS * (PER_TAR if name.startswith("tar") else 1) for name in SOURCES
        }
        assert measured.summary.counts.ledger == 3, "the broken lines"

    @pytest.mark.parametrize("how", ["local", "cached", "copied"])
    def test_every_row_is_what_was_measured(self, measured: CostTable, tmp_path: Path, how: str) -> None:
        cache = ShardCache(tmp_path / "cache", 1 << 24)
        files = {"cached": CachedFiles(cache), "copied": CachedFiles(cache, copy_local=True)}.get(how, LocalFiles())
        reader = pickle.loads(pickle.dumps(reader_of(measured, tmp_path, files)))
        truth = as_measured(measured)
        assert len(truth) == len(measured) == RECORDS * 17
        order = list(enumerate(truth))
        random.Random(3).shuffle(order)
        with_media = 0
        for row, (record, source) in order:
            expected = shown(reader, record, source)
            with_media += len(expected[-1])
            with reader.open_record(row) as found:
                assert shown(reader, found, source) == expected
        assert with_media == len(truth) // 2

    def test_files_are_numbered_as_they_are_read(self, measured: CostTable) -> None:
        specs = measured.request().specs
        seen: dict[tuple[int, str], None] = {}
        for unit in iter_units(specs):
            seen[unit.source, unit.file] = None
        assert list(measured.files) == list(seen)
        assert measured.column("file").tolist() == sorted(measured.column("file").tolist())
        names = [specs[measured.files[file].source].name for file in measured.column("file")]
        assert names == list(measured.column("source"))


class TestChangedData:
    @pytest.fixture
    def table(self, tmp_path: Path, model: Model) -> CostTable:
        return lines_table(tmp_path, model)

    def change(self, table: CostTable, how: Callable[[bytes], bytes]) -> Path:
        path = Path(table.files[0].file)
        before = path.read_bytes()
        path.write_bytes(how(before))
        assert path.read_bytes() != before
        return path

    def test_a_flipped_byte(self, table: CostTable, tmp_path: Path) -> None:
        """Each byte of one line; its neighbours are still what they were."""
        rows = RowTable.make(table, tmp_path)
        start, stop = rows.row(7).at, rows.row(8).at - 1
        path = Path(table.files[0].file)
        whole = path.read_bytes()
        for position in range(start, stop):
            path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
            reader = RecordReader(table.request(), rows, LocalFiles())
            with pytest.raises(DataError, match=r"(?s)d\.jsonl has changed since it was measured.*r7 \(d\.jsonl:8\)"):
                record_of(reader, 7)
            assert (record_of(reader, 6).id, record_of(reader, 8).id) == ("r6", "r8")

    @pytest.mark.parametrize(
        "how",
        [
            pytest.param(lambda data: b"\n" + data, id="moved"),
            pytest.param(lambda data: data[: len(data) // 2], id="cut"),
            pytest.param(lambda data: b"", id="emptied"),
            pytest.param(lambda data: b"".join(reversed(data.splitlines(keepends=True))), id="other order"),
        ],
    )
    def test_another_file(self, table: CostTable, tmp_path: Path, how: Callable[[bytes], bytes]) -> None:
        self.change(table, how)
        with pytest.raises(DataError, match=r"(?s)d\.jsonl has changed since it was measured.*r29 \(d\.jsonl:30\)"):
            record_of(reader_of(table, tmp_path), 29)

    def test_a_missing_file(self, table: CostTable, tmp_path: Path) -> None:
        os.remove(table.files[0].file)
        with pytest.raises(DataError, match=r"(?s)data file .*d\.jsonl\n.*No such file.*r3 \(d\.jsonl:4\)"):
            record_of(reader_of(table, tmp_path), 3)

    @pytest.mark.parametrize("way", ["local", "copied"])
    @pytest.mark.parametrize("how", ["renamed", "in place", "same size and time"])
    @pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
    def test_a_table_that_is_rewritten_while_it_is_read(
        self, tmp_path: Path, model: Model, kind: str, how: str, way: str
    ) -> None:
        rows = [{"id": f"r{i}", "messages": chat_of(f"what {i}?")} for i in range(6)]
        data = tmp_path / f"d.{'parquet' if kind == 'parquet' else 'arrow'}"
        write_rows(data, kind, rows)
        table = measure_outcome(data, model=str(model("llama")), out=tmp_path / "costs", workers=1, check=0).table
        reader = self.reader(table, tmp_path, way)
        assert [record_of(reader, n).id for n in (2, 4)] == ["r2", "r4"]
        before = data.stat()
        other = [{**row, "messages": chat_of(f"whot {i}?")} for i, row in enumerate(rows)]
        write_rows(tmp_path / "new", kind, other)
        if how == "renamed":
            os.replace(tmp_path / "new", data)
        else:
            data.write_bytes((tmp_path / "new").read_bytes())
        if how == "same size and time":
            assert data.stat().st_size == before.st_size
            os.utime(data, ns=(before.st_atime_ns, before.st_mtime_ns))
        if way == "copied":  # the copy is as measured until the source is looked at again
            assert record_of(reader, 0).id == "r0"
        files = LocalFiles() if way == "local" else CachedFiles(ShardCache(tmp_path / "d", 1 << 22), copy_local=True)
        for again in (
            (reader, reader_of(table, tmp_path, files)) if way == "local" else (reader_of(table, tmp_path, files),)
        ):
            with pytest.raises(DataError, match=r"(?s)d\.(parquet|arrow) has changed.*other text.*sample r1"):
                record_of(again, 1)

    def reader(self, table: CostTable, folder: Path, way: str) -> RecordReader:
        if way == "local":
            return reader_of(table, folder)
        return reader_of(table, folder, CachedFiles(ShardCache(folder / "cache", 1 << 22), copy_local=True))

    def test_another_order_of_a_table(self, tmp_path: Path, model: Model) -> None:
        rows = [{"id": f"r{i}", "messages": chat_of("a?")} for i in range(5)]
        data = tmp_path / "d.parquet"
        write_rows(data, "parquet", rows)
        table = measure_outcome(data, model=str(model("llama")), out=tmp_path / "costs", workers=1, check=0).table
        assert record_of(reader_of(table, tmp_path), 2).id == "r2"
        write_rows(data, "parquet", rows[::-1])
        with pytest.raises(DataError, match=r"(?s)d\.parquet has changed.*other text.*sample r4"):
            record_of(reader_of(table, tmp_path), 4)
        write_rows(data, "parquet", rows[:3])
        with pytest.raises(DataError, match=r"(?s)d\.parquet has changed.*no longer has row 4.*sample r4"):
            record_of(reader_of(table, tmp_path), 4)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, taken out or put in."""
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(data))
        data = draw.choice(
            (
                data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :],
                data[:at] + draw.randbytes(3) + data[at:],
                data[:at] + data[at + draw.randrange(1, 60) :],
                data[: max(1, at)],
            )
        )
    return data


@pytest.mark.parametrize("files", [12, pytest.param(400, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json.zst", "tar", "tar.gz", "parquet", "arrow"])
def test_what_is_measured_of_damaged_files_is_delivered(tmp_path: Path, model: Model, kind: str, files: int) -> None:
    ending, _, packed = kind.partition(".")
    packer = {"": bytes, "gz": gzip.compress, "zst": zstandard.ZstdCompressor(write_checksum=True).compress}[packed]
    (tmp_path / "data").mkdir()
    for seed in range(files):
        path = tmp_path / "data" / f"{seed:03}.{kind}"
        if ending == "jsonl":
            write_lines(path, "s", packer)
        elif ending == "json":
            write_list(path, "s", packer)
        elif ending == "tar":
            write_tar(path, "s", packer)
        else:
            write_rows(path, {"arrow": "file"}.get(kind, kind), with_bytes("s"))
        if seed:  # one stays whole
            path.write_bytes(mutated(path.read_bytes(), random.Random(f"{kind} {seed}")))
    for number in range(RECORDS):
        (tmp_path / "data" / f"{number}.png").write_bytes(picture(number))
    options: dict[str, Any] = {"workers": 1, "check": 0, "max_failure_rate": 1.0, "out": tmp_path / "costs"}
    table = measure_outcome(tmp_path / "data", model=str(model("qwen2_5_vl")), **options).table
    counts = table.summary.counts
    assert counts.entries == counts.rows + counts.ledger
    assert counts.ledger
    for reader in (
        reader_of(table, tmp_path),
        reader_of(table, tmp_path, CachedFiles(ShardCache(tmp_path / "cache", 1 << 26), copy_local=True)),
    ):
        for number in range(len(table)):
            record_of(reader, number)


class TestDamagedCopies:
    """A copy in the cache that is not what its source has is fetched again; only then is the source blamed."""

    def flip(self, folder: Path, what: bytes) -> None:
        """Arrow may write a text into every batch of its file: all of them."""
        (path,) = (folder / "cache").glob("*.ready")
        data = path.read_bytes()
        assert what in data
        path.write_bytes(data.replace(what, bytes([what[0] ^ 1]) + what[1:]))

    @pytest.mark.parametrize("kind", ["lines", "parquet", "file"])
    def test_a_text(self, tmp_path: Path, model: Model, kind: str) -> None:
        rows = [{"id": f"r{i}", "messages": chat_of(f"what {i}?")} for i in range(6)]
        data = tmp_path / f"d.{ {'lines': 'jsonl', 'file': 'arrow'}.get(kind, kind) }"
        if kind == "lines":
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            write_rows(data, kind, rows)
        table = measure_outcome(data, model=str(model("llama")), out=tmp_path / "costs", workers=1, check=0).table
        files = CachedFiles(ShardCache(tmp_path / "cache", 1 << 22), copy_local=True)
        reader = reader_of(table, tmp_path, files)
        assert record_of(reader, 0).id == "r0"
        for used in (reader, pickle.loads(pickle.dumps(reader))):
            self.flip(tmp_path, b"hat 4")
            assert record_of(used, 4).id == "r4"
            (copy,) = (tmp_path / "cache").glob("*.ready")
            assert copy.read_bytes() == data.read_bytes()

    def test_a_picture(self, tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of a remote shard, whose media are part of its checks."""
        remote = pytest.importorskip("fsspec").filesystem("memory")
        write_tar(tmp_path / "d.tar", "tar", bytes)
        remote.pipe_file("/damaged/d.tar", (tmp_path / "d.tar").read_bytes())
        monkeypatch.setenv("PACKTRAIN_SHARD_CACHE", str(tmp_path / "measuring"))
        options: dict[str, Any] = {"workers": 1, "check": 0, "out": tmp_path / "costs"}
        table = measure_outcome("memory://damaged/d.tar", model=str(model("qwen2_5_vl")), **options).table
        reader = reader_of(table, tmp_path, CachedFiles(ShardCache(tmp_path / "cache", 1 << 22)))
        for place in (b"IDAT", b"IHDR"):
            assert record_of(reader, 3).media()
            self.flip(tmp_path, place)
            with reader.open_record(1) as record:
                ((*_, content),) = shown(reader, record, 0)[-1]
            assert content == picture(1)
        remote.pipe_file("/damaged/d.tar", (tmp_path / "d.tar").read_bytes().replace(b"IDAT", b"IDAU"))
        again = reader_of(table, tmp_path, CachedFiles(ShardCache(tmp_path / "other", 1 << 22)))
        with pytest.raises(DataError, match="has changed since it was measured"):
            record_of(again, 1)
        remote.store.clear()


def chat_of(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "b"}]


def write_rows(path: Path, kind: str, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
        return
    with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


class Failing:
    """Files of which reading fails for some time."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.left, self.error, self.files = failures, error, LocalFiles()
        self.tried = 0

    def plain(self, file: str) -> AbstractContextManager[Plain]:
        return self._plain(file)

    def renew(self, file: str) -> bool:
        return False

    @contextmanager
    def _plain(self, file: str) -> Iterator[Plain]:
        self.tried += 1
        if self.left:
            self.left -= 1
            raise self.error
        with self.files.plain(file) as plain:
            yield plain


class TestFaults:
    @pytest.fixture(scope="class")
    def table(self, tmp_path_factory: pytest.TempPathFactory, model: Model) -> CostTable:
        return lines_table(tmp_path_factory.mktemp("lines"), model)

    @pytest.fixture
    def slept(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        pauses: list[float] = []
        monkeypatch.setattr("packtrain.core.retries.sleep", pauses.append)
        return pauses

    def test_a_fault_that_passes(self, table: CostTable, tmp_path: Path, slept: list[float]) -> None:
        files = Failing(3, OSError(5, "Input/output error"))
        assert record_of(reader_of(table, tmp_path, files), 4).id == "r4"
        assert (slept, files.tried) == (list(PAUSES[:3]), 4)

    def test_a_fault_that_stays(self, table: CostTable, tmp_path: Path, slept: list[float]) -> None:
        files = Failing(99, OSError(5, "Input/output error"))
        reader = reader_of(table, tmp_path, files)
        with pytest.raises(
            DataError, match=r"(?s)data file .*d\.jsonl\n.*Input/output error.*sample r4 \(d\.jsonl:5\)"
        ):
            record_of(reader, 4)
        assert (slept, files.tried) == (list(PAUSES), len(PAUSES) + 1)

    def test_a_file_that_is_gone_is_not_waited_for(self, table: CostTable, tmp_path: Path, slept: list[float]) -> None:
        files = Failing(99, RecordError("read", "file cannot be read", "No such file"))
        with pytest.raises(DataError, match=r"(?s)data file .*No such file"):
            record_of(reader_of(table, tmp_path, files), 4)
        assert slept == []


def test_the_request_leads_back_from_its_description(measured: CostTable) -> None:
    request = replace(
        measured.request(),
        filters=Filters(sources=("lines", "tar"), max_images_per_sample=3, min_seconds=0.5),
        schema=SchemaOptions(columns={"q": "prompt"}, object_ordering="random", seed=4),
        loss_on="all",
        add_eos=True,
        max_image_pixels=1000,
    )
    request = replace(request, specs=(replace(request.specs[0], repeats=2.0), *request.specs[1:]))
    plain = json.loads(json.dumps(request.describe()))
    places = from_json(Places, json.loads(json.dumps(request.places().plain())))
    again = Request.from_description(plain, places, json.loads(json.dumps(request.mixture())))
    assert again == request
    assert Request.from_description(plain, places) != request, "the shares are told apart"


def test_the_request_of_a_table_has_its_limits(measured: CostTable) -> None:
    assert measured.request().limits.given() == {}
    smaller = measured.with_limits(max_pixels=28 * 28 * 4)
    assert smaller.request().limits.given() == {"max_pixels": 28 * 28 * 4}
    assert replace(smaller.request(), limits=measured.request().limits) == measured.request()
