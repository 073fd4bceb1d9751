"""Tables know their data and model by what these are, not by where they lie."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from measuring import chats, write_image, write_lines

from packtrain.app.measure import measure_outcome
from packtrain.core.fingerprint import differences
from packtrain.delivery.encode import from_transformers as finishing
from packtrain.delivery.encode.row_table import RowTable
from packtrain.families.settings import read_settings
from packtrain.measuring.columns import content_of
from packtrain.measuring.measurement import MeasureOutcome
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import plan_inputs

IMAGES = ("images/a.png", "images/b.png")


@pytest.fixture
def home(tmp_path: Path, qwen: Path) -> Path:
    """A folder with data, pictures and a model."""
    home = tmp_path / "home"
    write_lines(home / "data" / "train.jsonl", chats(30, images=IMAGES))
    write_image(home / "data" / IMAGES[0], 200, 150)
    write_image(home / "data" / IMAGES[1], 90, 310)
    shutil.copytree(qwen, home / "model")
    return home


def measured(home: Path, data: str = "data/train.jsonl", **options: Any) -> MeasureOutcome:
    usual = {"model": str(home / "model"), "out": home / "out", "workers": 1, "check": 0}
    return measure_outcome(home / data, **{**usual, **options})


def moved(home: Path, name: str = "elsewhere") -> Path:
    return Path(shutil.move(home, home.parent / name))


def changes(before: CostTable, after: CostTable) -> set[str]:
    """By which names plans and tokens of one table differ from those of the other."""
    return {change.split(": ")[0] for change in differences(plan_inputs(before), plan_inputs(after))}


@pytest.mark.parametrize("data", ["data/train.jsonl", "data", "data/*.jsonl", "mix.yaml"])
def test_what_was_moved_is_found_unchanged(home: Path, data: str) -> None:
    (home / "mix.yaml").write_text("datasets:\n  - path: data\n  - path: data/train.jsonl\n    name: again\n")
    first = measured(home, data).table
    there = moved(home)
    again = measured(there, data)
    assert again.reused
    for table in (again.table, CostTable.load(there / "out")):
        assert plan_inputs(table) == plan_inputs(first)
        assert {file.file for file in table.files} == {str(there / "data" / "train.jsonl")}
        request = table.request()
        assert request.model == str(there / "model")
        assert {spec.media_root for spec in request.specs} == {str(there / "data")}
    assert str(home) not in (there / "out" / "measure.json").read_text()


def test_other_places_of_a_table_that_may_only_be_read(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(home)
    there = moved(home)

    def refuse(*_: object) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr("packtrain.measuring.measurement.write_summary", refuse)
    again = measured(there)
    assert again.reused
    assert again.table.request().model == str(there / "model")


def test_other_media_under_the_same_names_elsewhere_are_measured_again(home: Path) -> None:
    """Data files of the same size and time do not say what the pictures beside them are."""
    tokens = measured(home).table.column("tokens").sum()
    there = Path(shutil.copytree(home, home.parent / "larger"))
    write_image(there / "data" / IMAGES[0], 400, 300)
    again = measured(there, out=home / "out")
    assert not again.reused
    assert [change.split(":")[0] for change in again.changed] == ["train.jsonl"]
    assert again.table.column("tokens").sum() > tokens


def test_media_that_are_missing_elsewhere_are_noticed(home: Path) -> None:
    measured(home)
    there = moved(home)
    (there / "data" / IMAGES[1]).unlink()
    again = measured(there, max_failure_rate=0.5)
    assert not again.reused
    assert again.table.summary.counts.rows < 30


def test_another_text_of_the_same_size_and_time_elsewhere(home: Path) -> None:
    """As sources of one name that have changed places."""
    measured(home)
    there = moved(home)
    data = there / "data" / "train.jsonl"
    text, time = data.read_text(), data.stat().st_mtime_ns
    data.write_text(text.replace("word1", "word2", 1))
    os.utime(data, ns=(time, time))
    assert not measured(there).reused


def test_files_of_sources_that_could_be_called_the_same(home: Path) -> None:
    for name in ("one/b", "two"):
        write_lines(home / name / "x.jsonl", chats(5, seed=len(name)))
    (home / "mix.yaml").write_text("datasets:\n  - {path: one, name: a}\n  - {path: two, name: a/b}\n")
    assert len(measured(home, "mix.yaml").table.summary.data) == 2
    for name in ("one/b", "two"):
        write_lines(home / name / "x.jsonl", chats(6, seed=len(name)))
        assert not measured(home, "mix.yaml").reused


def test_other_media_are_measured_again(home: Path) -> None:
    write_image(home / "larger" / IMAGES[0], 400, 300)
    write_image(home / "larger" / IMAGES[1], 180, 620)
    first = measured(home).table
    again = measured(home, media_root=home / "larger")
    assert [change.split(": ")[0] for change in again.changed] == ["request.specs[0].media_root"]
    assert changes(first, again.table) == {"measured.content"}


def test_media_that_were_moved_alone_are_measured_again_to_the_same(home: Path) -> None:
    first = measured(home).table
    shutil.move(home / "data" / "images", home / "pictures" / "images")
    again = measured(home, media_root=home / "pictures")
    assert not again.reused
    assert changes(first, again.table) == set()


def test_a_copy_with_another_time_is_the_same_data(home: Path) -> None:
    first = measured(home).table
    os.utime(home / "data" / "train.jsonl", ns=(1, 1))
    again = measured(home)
    assert not again.reused
    assert changes(first, again.table) == set()


def test_another_text_of_the_same_size_is_other_data(home: Path) -> None:
    first = measured(home).table
    data = home / "data" / "train.jsonl"
    text = data.read_text()
    data.write_text(text.replace("word1", "word2", 1))
    assert data.stat().st_size == len(text.encode())
    assert changes(first, measured(home).table) == {"measured.content"}


def test_a_copy_of_a_table_with_another_time_is_the_same_data(home: Path) -> None:
    pq.write_table(pa.Table.from_pylist(chats(8)), home / "rows.parquet")
    first = measured(home, "rows.parquet").table
    os.utime(home / "rows.parquet", ns=(1, 1))
    again = measured(home, "rows.parquet")
    assert first.summary.content.unchecked == 0
    assert not again.reused
    assert changes(first, again.table) == set()


@pytest.mark.parametrize("hashed", [False, True])
def test_rows_without_a_checksum_are_known_by_their_file(
    home: Path, hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those that `load_dataset` makes."""
    monkeypatch.setattr("packtrain.records.formats.tables.row_check", lambda value: 0)
    pq.write_table(pa.Table.from_pylist(chats(8)), home / "rows.parquet")
    first = measured(home, "rows.parquet", content_hash=hashed).table
    os.utime(home / "rows.parquet", ns=(1, 1))
    again = measured(home, "rows.parquet", content_hash=hashed)
    assert first.summary.content.unchecked == 8
    assert again.reused == hashed
    assert changes(first, again.table) == (set() if hashed else {"measured.data.rows.parquet.mtime_ns"})


@pytest.mark.parametrize(
    ("name", "old", "new", "named"),
    [
        ("chat_template.jinja", "", "{# edited #}", "settings.chat_template"),
        ("tokenizer.json", "", " ", "settings.tokenizer.sha256"),
        ("processor_config.json", '"merge_size": 2', '"merge_size": 4', "settings.image_processor.merge_size"),
        ("config.json", '"model_type"', '"edited": 1, "model_type"', "settings.config"),
    ],
)
def test_an_edited_file_of_a_moved_model(home: Path, name: str, old: str, new: str, named: str) -> None:
    first = measured(home).table
    there = moved(home)
    path = there / "model" / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new) if old else text + new)
    again = measured(there)
    assert named in {change.split(": ")[0] for change in again.changed}
    assert all(change.startswith("settings.") for change in again.changed)
    assert any(change.startswith("measured.settings") for change in changes(first, again.table))


def test_content_does_not_show_in_which_pieces_it_came(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured(home).table
    monkeypatch.setattr("packtrain.records.formats.jsonl.JsonLines.block", 400)
    seen: list[int] = []
    pieces = measured(home, out=home / "pieces", progress=lambda now: seen.append(now.units)).table
    assert seen[-1] > 3
    assert len(pieces) == len(whole)
    assert whole.summary.content == pieces.summary.content
    out = home / "pieces"
    assert content_of(out / "costs.parquet", out / "media.parquet") == pieces.summary.content


def test_a_journal_of_another_place_is_not_gone_on_with(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its units say in which file they stand."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("packtrain.measuring.measurement.write_table", stop)
        with pytest.raises(KeyboardInterrupt):
            measured(home)
    there = moved(home)
    again = measured(there)
    assert again.resumed_units == 0
    assert any(change.startswith("places.sources[0].path") for change in again.changed)
    assert again.table.files[0].file == str(there / "data" / "train.jsonl")


def test_rows_lead_to_where_the_files_are(home: Path) -> None:
    """Also where they are kept in one folder, and moving has left no other trace."""
    rows = home.parent / "rows"
    before = RowTable.make(measured(home).table, rows)
    there = moved(home)
    after = RowTable.make(measured(there).table, rows)
    assert [made.files[0].file for made in (before, after)] == [str(f / "data/train.jsonl") for f in (home, there)]


def test_a_finished_tokenizer_is_known_by_its_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finishing, "_file_is_enough", lambda _: False)
    monkeypatch.setattr(finishing, "_save_in_another_process", lambda source, folder: None)
    copied = shutil.copytree(home / "model", home / "copied")
    folders = [finishing.finished_tokenizer(read_settings(model), home) for model in (home / "model", copied)]
    assert folders[0] == folders[1]
    (copied / "tokenizer.model").write_bytes(b"other words")
    assert finishing.finished_tokenizer(read_settings(copied), home) != folders[0]


def test_a_model_of_the_hub_has_one_table_whatever_folder_it_was_loaded_to(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(home / "cache"))
    found = []
    for hub, commit in (("one", "a1"), ("two", "a1"), ("two", "b2")):
        model = home / hub / "models--org--name" / "snapshots" / commit
        shutil.copytree(home / "model", model)
        found.append(measured(home, model=str(model), out=None))
    assert len({outcome.table.folder for outcome in found}) == 1
    assert [outcome.reused for outcome in found] == [False, True, True]
    assert found[-1].table.request().model == str(model)
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{# edited #}")
    again = measured(home, model=str(model), out=None)
    assert {change.split(": ")[0] for change in again.changed} == {"settings.chat_template"}
    assert again.table.folder == found[0].table.folder
