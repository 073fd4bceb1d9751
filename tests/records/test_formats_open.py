"""Opening: what stands at a path is recognised by its content, and units are numbered over all sources."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import MediaRef
from packtrain.records.formats import jsonl
from packtrain.records.formats.source_files import split_note
from packtrain.records.media import MediaStore
from packtrain.records.open import count_unit, data_files, iter_units, open_sources, read_unit, recognise

LINES = b'{"a": 1}\n{"a": 2}\n'
LIST = b'[{"a": 1}, {"a": 2}]'


def table_bytes(kind: str) -> bytes:
    table, buffer = pa.table({"a": [1, 2]}), io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, buffer)
    else:
        make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with make(buffer, table.schema) as writer:
            writer.write_table(table)
    return buffer.getvalue()


def tar_bytes() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in (1, 2):
            info = tarfile.TarInfo(f"{number}.json")
            info.size = 8
            archive.addfile(info, io.BytesIO(b'{"a": %d}' % number))
    return buffer.getvalue()


ROWS = b'a,b\n1,"x\ny"\n2,\n'
CONTENTS = {
    "jsonl": LINES,
    "json": LIST,
    "parquet": table_bytes("parquet"),
    "arrow": table_bytes("stream"),
    "webdataset": tar_bytes(),
}
NAMES = {
    "a.jsonl": (LINES, "jsonl"),
    "a.ndjson": (LINES, "jsonl"),
    "a.jsonl.gz": (gzip.compress(LINES), "jsonl"),
    "a.jsonl.zst": (zstandard.compress(LINES), "jsonl"),
    "gzip-inside.jsonl": (gzip.compress(LINES), "jsonl"),
    "list.json": (LIST, "json"),
    "pretty.json": (json.dumps([{"a": 1}, {"a": 2}], indent=2).encode(), "json"),
    "wrapped.json": (b'{"data": [{"a": 1}, {"a": 2}]}', "json"),
    "wrapped-pretty.json": (b'{\n"data": [\n{"a": 1},\n{"a": 2}]}', "json"),
    "list.json.gz": (gzip.compress(LIST), "json"),
    "lines.json": (LINES, "jsonl"),
    "lines-bom.json": (b"\xef\xbb\xbf\n" + LINES, "jsonl"),
    "broken-first-line.json": (b'{"a": }\n{"a": 2}\n', "jsonl"),
    "a.parquet": (CONTENTS["parquet"], "parquet"),
    "file.arrow": (table_bytes("file"), "arrow"),
    "stream.arrow": (CONTENTS["arrow"], "arrow"),
    "a.tar": (CONTENTS["webdataset"], "webdataset"),
    "a.tgz": (gzip.compress(CONTENTS["webdataset"]), "webdataset"),
    "a.tar.zst": (zstandard.compress(CONTENTS["webdataset"]), "webdataset"),
    # names that lie, or say nothing
    "parquet.jsonl": (CONTENTS["parquet"], "parquet"),
    "parquet": (CONTENTS["parquet"], "parquet"),
    "tar": (CONTENTS["webdataset"], "webdataset"),
    "lines": (LINES, "jsonl"),
    "list": (LIST, "json"),
}


@pytest.mark.parametrize("name", NAMES)
def test_files_are_recognised_and_read(tmp_path: Path, name: str) -> None:
    data, format = NAMES[name]
    (tmp_path / name).write_bytes(data)
    assert recognise(str(tmp_path / name)) == format
    specs = open_sources(str(tmp_path / name))
    assert [spec.format for spec in specs] == [format]
    assert specs[0].media_root == str(tmp_path)
    entries = [entry for unit in iter_units(specs) for entry in read_unit(specs, unit)]
    assert len(entries) == 2
    assert entries[1].value == {"a": 2}
    assert data_files(specs) == [str(tmp_path / name)]


@pytest.mark.parametrize("format", CONTENTS)
def test_folders_are_recognised(tmp_path: Path, format: str) -> None:
    ending = {"webdataset": "tar"}.get(format, format)
    (tmp_path / "deep").mkdir()
    for name in ("b", "deep/a"):
        (tmp_path / f"{name}.{ending}").write_bytes(CONTENTS[format])
    (tmp_path / "image.jpg").write_bytes(b"")
    (tmp_path / ".hidden.parquet").write_bytes(b"")
    if format != "json":
        (tmp_path / "settings.json").write_text("{}")
    specs = open_sources(str(tmp_path))
    assert [(spec.format, spec.media_root) for spec in specs] == [(format, str(tmp_path))]
    assert [os.path.relpath(file, tmp_path) for file in data_files(specs)] == [f"b.{ending}", f"deep/a.{ending}"]
    units = list(iter_units(specs))
    assert [unit.number for unit in units] == list(range(len(units)))
    entries = [entry for unit in units for entry in read_unit(specs, unit)]
    assert [entry.value for entry in entries] == [{"a": 1}, {"a": 2}] * 2
    assert entries[2].origin.startswith(f"deep/a.{ending}:")


def test_counts_are_what_reading_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl.JsonLines, "block", 4)
    for name, (data, _) in NAMES.items():
        (tmp_path / name).write_bytes(data)
        specs = open_sources(str(tmp_path / name))
        units = list(iter_units(specs))
        assert [count_unit(specs, u) for u in units] == [len(list(read_unit(specs, u))) for u in units]
        assert sum(count_unit(specs, unit) for unit in units) == 2


def test_several_sources_are_numbered_through(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.parquet"):
        (tmp_path / name).write_bytes(NAMES.get(name, (CONTENTS["parquet"], ""))[0])
    specs = [open_sources(str(tmp_path / name))[0] for name in ("a.jsonl", "b.parquet", "a.jsonl")]
    assert [(unit.number, unit.source) for unit in iter_units(specs)] == [(0, 0), (1, 1), (2, 2)]


def test_patterns_and_hub_names(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"s-{number:02d}.tar").write_bytes(CONTENTS["webdataset"])
    for pattern in ("s-*.tar", "s-{00..02}.tar"):
        specs = open_sources(str(tmp_path / pattern))
        assert (specs[0].format, specs[0].media_root) == ("webdataset", str(tmp_path))
        assert len(data_files(specs)) == 3
    assert recognise("org/name") == "hf_dataset"
    hub = open_sources("org/some.name", split="val")[0]
    assert (hub.format, hub.name, hub.split) == ("hf_dataset", "some.name", "val")
    assert data_files([hub]) == []
    with pytest.raises(ConfigError, match=r"org/some\.name.*(?s:.*)check the name, the network"):
        open_sources("org/some.name", streaming=True)  # which files it has only the hub can say


def test_saved_datasets_are_recognised_with_their_files(tmp_path: Path) -> None:
    for split in ("train", "test"):
        folder = tmp_path / split
        folder.mkdir()
        (folder / "data.arrow").write_bytes(CONTENTS["arrow"])
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
        (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert recognise(str(tmp_path)) == recognise(str(tmp_path / "train")) == "hf_dataset"
    specs = open_sources(str(tmp_path), split="test")
    assert [os.path.relpath(file, tmp_path) for file in data_files(specs)] == [
        "test/data.arrow",
        "test/dataset_info.json",
        "test/state.json",
    ]
    assert [entry.value for unit in iter_units(specs) for entry in read_unit(specs, unit)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    "path", ["none.jsonl", "./none", "/none/at/all", "org/none.parquet", "none-*.tar", "s-{0..3}.tar"]
)
def test_nothing_there(path: str) -> None:
    for format in (None, "jsonl"):
        with pytest.raises(ConfigError) as caught:
            open_sources(path, format=format)
        assert path in str(caught.value)


def test_what_cannot_be_told_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    with pytest.raises(ConfigError, match="leave it out to detect it"):
        open_sources(str(tmp_path / "a.jsonl"), format="hf_dataset")
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match="no data file"):
        open_sources(str(tmp_path))
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / "a.parquet").write_bytes(CONTENTS["parquet"])
    with pytest.raises(ConfigError, match="jsonl, parquet"):
        open_sources(str(tmp_path))
    assert len(data_files(open_sources(str(tmp_path), format="parquet"))) == 1
    with pytest.raises(ConfigError, match=r"\.tar"):
        open_sources(str(tmp_path), format="webdataset")
    with pytest.raises(ConfigError, match="did you mean 'parquet'"):
        open_sources(str(tmp_path), format="parqet")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match="dataset_format"):
        open_sources(str(tmp_path / "notes.txt"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError):
        recognise(str(tmp_path / "pipe"))


HUB = ("data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "data/test-00000-of-00001.jsonl")


def _filled(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"from": name}) + "\n")
    return folder


@pytest.mark.parametrize(
    ("names", "split", "wanted"),
    [
        (HUB, "train", HUB[:2]),
        (HUB, "test", HUB[2:]),
        (("train.jsonl", "val.jsonl", "test.jsonl"), "validation", ("val.jsonl",)),
        (("train/a.jsonl", "test/a.jsonl", "test/b.jsonl"), "test", ("test/a.jsonl", "test/b.jsonl")),
        (("coco_train-0-of-1.jsonl", "coco_val-0-of-1.jsonl"), "train", ("coco_train-0-of-1.jsonl",)),
        (("train_sft-0-of-1.jsonl", "train_gen-0-of-1.jsonl"), "train_gen", ("train_gen-0-of-1.jsonl",)),
        (("a.jsonl", "latest.jsonl", "contest/b.jsonl"), "train", ("a.jsonl", "contest/b.jsonl", "latest.jsonl")),
    ],
)
def test_one_split_of_a_folder_is_read(tmp_path: Path, names: tuple[str, ...], split: str, wanted: tuple[str]) -> None:
    specs = open_sources(str(_filled(tmp_path, *names)), split=split)
    entries = [entry for unit in iter_units(specs) for entry in read_unit(specs, unit)]
    assert [entry.value for entry in entries] == [{"from": name} for name in wanted]
    assert data_files(specs) == [str(tmp_path / name) for name in wanted]
    note = split_note(specs[0])
    left = len(names) - len(wanted)
    assert (note is None) == (left == 0)
    assert note is None or f"({len(wanted)} file{'s' * (len(wanted) > 1)}); left: " in note


@pytest.mark.parametrize(
    ("names", "split", "words"),
    [
        (HUB, "validation", "one of test, train"),
        (("train_sft-0-of-1.jsonl", "train_gen-0-of-1.jsonl"), "train", "one of train_gen, train_sft"),
        (("test.jsonl",), "train", "one of test"),
        (("a.jsonl",), "test", "no file or folder is named after a split"),
        (("train.jsonl", "more.jsonl"), "train", "belong to no split: more.jsonl"),
    ],
)
def test_a_split_that_is_not_there_is_refused(tmp_path: Path, names: tuple[str, ...], split: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_sources(str(_filled(tmp_path, *names)), split=split)
    everything = open_sources(str(tmp_path / "**" / "*.jsonl"), split=split)
    assert len(data_files(everything)) == len(names), "a pattern reads what it names"


CARD = """---
license: mit
configs:
- config_name: en
  data_files:
  - {split: train, path: "en/*.jsonl"}
  - {split: test, path: [held/a.jsonl]}
- config_name: fr
  data_files: fr/*.jsonl
---
# A card
"""


@pytest.mark.parametrize(
    ("split", "subset", "wanted"),
    [
        ("train", None, ("en/a.jsonl", "en/b.jsonl", "fr/a.jsonl")),
        ("train", "en", ("en/a.jsonl", "en/b.jsonl")),
        ("test", "en", ("held/a.jsonl",)),
        ("train", "fr", ("fr/a.jsonl",)),
        ("test", "fr", "one of train"),
        ("train", "de", "one of en, fr"),
    ],
)
def test_a_dataset_card_says_which_files_are_a_split(
    tmp_path: Path, split: str, subset: str | None, wanted: tuple[str, ...] | str
) -> None:
    _filled(tmp_path, "en/a.jsonl", "en/b.jsonl", "fr/a.jsonl", "held/a.jsonl", "more.jsonl")
    (tmp_path / "README.md").write_text(CARD)
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted):
            open_sources(str(tmp_path), split=split, subset=subset)
        return
    specs = open_sources(str(tmp_path), split=split, subset=subset)
    assert data_files(specs) == [str(tmp_path / name) for name in wanted]
    assert "file" in str(split_note(specs[0])).rpartition("left: ")[2]
    for text in ("", "---\nconfigs: 5\n---", "---\n[\n---", CARD.replace("/", "-")):
        (tmp_path / "README.md").write_text(text)
        assert len(data_files(open_sources(str(tmp_path)))) == 5
        if subset:
            with pytest.raises(ConfigError, match="subset of"):
                open_sources(str(tmp_path), subset=subset)


def test_a_snapshot_in_the_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    """Its files, and its media, are links to another folder of the cache, and to no other place."""
    blobs, snapshot = tmp_path / "datasets--org--name" / "blobs", tmp_path / "datasets--org--name" / "snapshots" / "c0"
    for name, content in (("data/train-0-of-1.jsonl", LINES), ("data/test-0-of-1.jsonl", LINES), ("image.jpg", b"x")):
        blob = blobs / f"{len(name)}"
        blob.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(blob)
    (tmp_path / "outside.jpg").write_bytes(b"x")
    (snapshot / "outside.jpg").symlink_to(tmp_path / "outside.jpg")
    specs = open_sources(str(snapshot))
    assert [entry.value for unit in iter_units(specs) for entry in read_unit(specs, unit)] == [{"a": 1}, {"a": 2}]
    store = MediaStore(specs[0].media_root)
    with store.open(MediaRef(name="image.jpg", path="image.jpg")) as file:
        assert file.read() == b"x"
    with pytest.raises(RecordError, match="outside the media root"):
        store.open(MediaRef(name="outside.jpg", path="outside.jpg"))
    (snapshot.parent / "c1").mkdir()
    with pytest.raises(ConfigError, match="a folder of the hub's cache") as caught:
        open_sources(str(blobs.parent))
    assert "snapshots/c1" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "text", "refused"),
    [
        ("settings.json", '{"a": {"b": 1}, "tags": ["x"]}', False),
        ("dataset_info.json", '{"features": {"a": {"dtype": "int64"}}}', False),
        ("state.json", '{"_data_files": [{"filename": "a"}]}', False),
        ("empty.json", "", False),
        ("list.json", LIST.decode(), True),
        ("lines.json", LINES.decode(), True),
        ("wrapped.json", '{"data": [{"a": 1}]}', True),
        ("one.json", '{"messages": [{"role": "user", "content": "a"}]}', True),
        ("b.csv", ROWS.decode(), True),
    ],
)
def test_records_in_other_files_of_a_folder_are_not_lost(tmp_path: Path, name: str, text: str, refused: bool) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    (tmp_path / name).write_text(text)
    if refused:
        with pytest.raises(ConfigError, match=r"files of several formats: (?s:.)*set dataset_format"):
            recognise(str(tmp_path))
    else:
        assert recognise(str(tmp_path)) == "jsonl"
    assert len(data_files(open_sources(str(tmp_path), format="jsonl"))) == 1
