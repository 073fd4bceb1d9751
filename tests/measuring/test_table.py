"""Cost tables on disk: columns as they were written, and refusal of everything that is not one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from measuring import chats, write_image, write_lines

from packtrain.app.measure import measure, measure_outcome
from packtrain.core.dataclass_json import from_json
from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA
from packtrain.measuring.measure_summary import MeasureSummary, SourceTotals
from packtrain.measuring.table import CostTable


@pytest.fixture
def folder(tmp_path: Path, qwen: Path) -> Path:
    """A measured dataset with a broken record in its middle."""
    write_image(tmp_path / "a.png", 100, 80)
    good = chats(12, images=("a.png",))
    data = write_lines(tmp_path / "data.jsonl", [*good[:6], "{broken", *good[6:]])
    measure(data, model=str(qwen), out=tmp_path / "out", workers=1, check=0, max_failure_rate=0.5)
    return tmp_path / "out"


def test_columns(folder: Path) -> None:
    table = CostTable.load(folder)
    assert len(table) == 12
    assert table.column("index").tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12], "the broken entry keeps its place"
    assert table.column("id").tolist() == [f"r{i}" for i in range(12)]
    assert table.column("origin")[6] == "data.jsonl:8"
    assert (table.column("tokens") == table.column("text_tokens") + table.column("image_tokens")).all()
    shown, tails = table.column("images") > 0, table.column("tail_tokens")
    assert (tails[shown] < table.column("text_tokens")[shown]).all()
    assert tails[~shown].tolist() == table.column("tokens")[~shown].tolist()
    with_images = table.column("index")[shown]
    assert len(with_images) == 4
    assert table.media("record").tolist() == with_images.tolist()
    assert set(zip(table.media("width").tolist(), table.media("height").tolist(), strict=True)) == {(100, 80)}
    codes = table.source_codes()
    assert codes.names == ("data",)
    assert codes.codes.tolist() == [0] * 12


def test_the_summary_describes_the_columns(folder: Path) -> None:
    table = CostTable.load(folder)
    tokens = table.column("tokens")
    said = table.summary.statistics.columns["tokens"]
    assert said["total"] == tokens.sum()
    assert said["median"] == np.median(tokens)
    assert (said["min"], said["max"]) == (tokens.min(), tokens.max())
    assert table.summary.statistics.sources == {"data": SourceTotals(rows=12, tokens=int(tokens.sum()))}
    assert from_json(MeasureSummary, json.loads(json.dumps(table.summary.to_json()))) == table.summary
    counts = table.summary.counts
    assert counts.entries == counts.rows + counts.ledger == 13


def test_the_file_inside_is_as_good_as_the_folder(folder: Path) -> None:
    assert CostTable.load(folder / "costs.parquet").folder == CostTable.load(str(folder)).folder == folder


def test_an_unknown_column_suggests_the_nearest(folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'image_tokens'"):
        CostTable.load(folder).column("image_token")


def test_no_summary(folder: Path) -> None:
    (folder / "measure.json").unlink()
    with pytest.raises(ArtifactError, match=r"(?s)no measure\.json.*use the folder that packtrain measure wrote"):
        CostTable.load(folder)
    with pytest.raises(ArtifactError, match=r"(?s)no such folder.*packtrain measure DATA"):
        CostTable.load(folder / "not here")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind": "cost-table", "version": 99}', "format version 99"),
        (
            '{"kind": "cost-table", "version": 2}',
            "(?s)format version 2, made by an older version of packtrain\n.*format version 9",
        ),
        ('{"kind": "pack-plan", "version": 1}', "kind 'pack-plan'"),
        ("[1]", "kind 'list'"),
        ("{", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_another_summary(folder: Path, content: str, message: str) -> None:
    (folder / "measure.json").write_text(content)
    with pytest.raises(ArtifactError, match=message):
        CostTable.load(folder)


@pytest.mark.parametrize("name", ["costs.parquet", "media.parquet"])
def test_a_truncated_table(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    for size in (0, 3, len(whole) // 2, len(whole) - 1):
        (folder / name).write_bytes(whole[:size])
        with pytest.raises(ArtifactError, match=r"(?s)expected: a parquet file.*measure again"):
            CostTable.load(folder)
    (folder / name).unlink()
    with pytest.raises(ArtifactError, match=name):
        CostTable.load(folder)
    (folder / name).write_bytes(whole)
    CostTable.load(folder)


@pytest.mark.parametrize(("name", "schema"), [("costs.parquet", COST_SCHEMA), ("media.parquet", MEDIA_SCHEMA)])
def test_a_table_of_other_columns(folder: Path, name: str, schema: pa.Schema) -> None:
    pq.write_table(pq.read_table(folder / name).drop_columns([schema.names[-1]]), folder / name)
    with pytest.raises(ArtifactError, match=schema.names[-1]):
        CostTable.load(folder)


def test_a_result_of_an_older_format_is_measured_again(folder: Path, qwen: Path) -> None:
    before = (folder / "costs.parquet").read_bytes()
    summary = json.loads((folder / "measure.json").read_text())
    (folder / "measure.json").write_text(json.dumps({**summary, "version": 3}))
    pq.write_table(pq.read_table(folder / "costs.parquet").drop_columns(["check"]), folder / "costs.parquet")
    again = measure_outcome(
        folder.parent / "data.jsonl", model=str(qwen), out=folder, workers=1, check=0, max_failure_rate=0.5
    )
    assert not again.reused
    assert again.changed == ["measure.json: kind 'cost-table', format version 3, made by an older version of packtrain"]
    assert (folder / "costs.parquet").read_bytes() == before


@pytest.mark.parametrize("damage", ["costs.parquet", "media.parquet", "measure.json"])
def test_a_damaged_result_is_measured_again(folder: Path, qwen: Path, damage: str) -> None:
    before = (folder / "costs.parquet").read_bytes()
    (folder / damage).write_bytes(b"damaged")
    again = measure_outcome(
        folder.parent / "data.jsonl", model=str(qwen), out=folder, workers=1, check=0, max_failure_rate=0.5
    )
    assert not again.reused
    assert damage in again.changed[0]
    assert (folder / "costs.parquet").read_bytes() == before
    assert json.loads((folder / "measure.json").read_text())["kind"] == "cost-table"
