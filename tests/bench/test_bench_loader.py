"""The loader benchmark compares the same samples, its long data are what they claim, and its counts agree."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from packtrain import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.app.measure import measure_outcome
from packtrain.bench import loader as loader_bench
from packtrain.bench import loader_speed
from packtrain.bench.data import (
    PICTURES,
    SHARDS,
    repeat_file,
    repeat_table,
    write_long,
    write_pictures,
    write_shards,
)
from packtrain.bench.loader import TENTH, LoaderResult, bench_loader, first_batch
from packtrain.bench.loader_speed import PLAIN, ROUNDS, WAYS, SpeedTask, epochs_needed, speed
from packtrain.bench.printing import show_loader
from packtrain.cli import bench as commands
from packtrain.core.dataclass_json import from_json
from packtrain.core.errors import ConfigError
from packtrain.families.model_folder import resolve_model
from packtrain.measuring.table import COSTS, MEDIA, CostTable
from packtrain.records.synthetic import picture_chats, write_lines

MODEL = "tiny:qwen3_vl"
QUICK = {"workers": 1, "check": 0}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """What is measured here sets the number of threads of its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures, and a cache for the model."""
    folder = tmp_path_factory.mktemp("loader")
    write_pictures(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(resolve_model(MODEL, tmp_path_factory.mktemp("models")).absolute())


def config(path: Path, cache: Path, model: str, **settings: Any) -> DatasetConfig:
    usual: dict[str, Any] = {"packing_length": 1_024, **QUICK, "cache_dir": str(cache)}
    return DatasetConfig(dataset_path=str(path), model=model, **{**usual, **settings})


# ---- its data


def test_a_repeated_table_is_what_measuring_the_long_file_gives(folder: Path, model: str) -> None:
    """Every column of every row, so that a row leads to its own line and the plan has true costs."""
    path = write_lines(folder / "short.jsonl", list(picture_chats(PICTURES, (2 + n for n in range(7)))))
    table = measure_outcome(path, model=model, out=folder / "repeated", workers=1, check=0).table
    assert len(table) == 7
    repeat_file(path, 5)
    found = repeat_table(table, 5)
    measured = measure_outcome(path, model=model, out=folder / "measured", workers=1, check=0).table
    assert len(found) == len(measured) == 35
    assert path.read_bytes().count(b"\n") == 35
    for name in (COSTS, MEDIA):
        assert pq.read_table(found.folder / name).equals(pq.read_table(measured.folder / name)), name
    changing: dict[str, Any] = {"seconds": 0.0, "sums": {}}  # bytes differ by how rows are grouped
    assert replace(found.summary, **changing) == replace(measured.summary, **changing)
    assert measure_outcome(path, model=model, out=found.folder, workers=1, check=0).reused


def test_long_data_are_read_at_every_place(folder: Path, model: str, tmp_path: Path) -> None:
    """The benchmark's table of a repeated file delivers every row, each from its own place."""
    shutil.copytree(folder / "images", tmp_path / "images")
    data = write_long(tmp_path, 2_000, config(tmp_path, tmp_path, model))
    assert (data.size.rows, data.size.capacity, data.config.packing_length) == (2_000, 1_024, 1_024)
    assert data.size.made_bytes > 0
    dataset = MultiModalDataset(data.config)
    dataset.build()
    table = CostTable.load(dataset.plan.summary.cost_table)
    assert len(set(table.column("at").tolist())) == 2_000
    assert dataset.plan.num_packs == data.size.packs
    epoch = dataset.plan.epoch(0)
    last = next(n for n in range(epoch.num_packs) if 1_999 in epoch.pack(n).rows)
    assert 1_999 in [sample.row for sample in dataset[last].samples], "the last line of the repeated file was read"


def test_shards_hold_the_same_records(folder: Path, model: str, tmp_path: Path) -> None:
    """Map-style access to lines and streaming from compressed shards deliver the same samples in the same packs."""
    found = list(picture_chats(PICTURES, (1 + n * 9 for n in range(10))))
    lines = write_lines(folder / "same.jsonl", found)
    shards = write_shards(tmp_path / "shards", found, folder)
    assert len(list(shards.glob("*.tar.gz"))) == SHARDS
    mapped = MultiModalDataset(config(lines, tmp_path / "cache", model))
    streamed = MultiModalIterableDataset(config(shards, tmp_path / "cache", model))
    for one in (mapped, streamed):
        one.build()
    batches = [[(batch.info.ids, batch.info.lengths) for batch in one.loader()] for one in (mapped, streamed)]
    assert batches[0] == batches[1]
    assert 1 < len(batches[0]) < 10, "packing really happened"


# ---- its measurements


@pytest.mark.contract
def test_every_way_delivers_the_same_samples(folder: Path, model: str, tmp_path: Path) -> None:
    found = list(picture_chats(PICTURES, (1 + n * 9 for n in range(8))))
    given = config(folder, tmp_path / "cache", model, epochs=epochs_needed())
    task = SpeedTask(
        lines=replace(given, dataset_path=str(write_lines(folder / "speed.jsonl", found))),
        shards=replace(given, dataset_path=str(write_shards(tmp_path / "shards", found, folder))),
        folder=model,
        capacity=1_024,
        workers=(0,),
    )
    result = asdict(speed(task))
    assert (result["samples"], result["images"], result["rounds"]) == (8, 8, ROUNDS)
    lines = {line["way"]: line for line in result["lines"]}
    assert tuple(lines) == WAYS
    assert lines["map-style"]["batches"] == lines["streaming"]["batches"]
    assert lines[PLAIN]["padding"] > lines["map-style"]["padding"] == lines["streaming"]["padding"] == 0
    for line in lines.values():
        assert line["samples_per_second"] == line["images_per_second"] > 0
        assert line["ratio_lowest"] <= line["ratio"] <= line["ratio_highest"]
    assert lines[PLAIN]["ratio"] == 1


@pytest.mark.parametrize("access", ["map-style", "streaming"])
def test_a_start_delivers_the_pack_that_is_next(folder: Path, model: str, tmp_path: Path, access: Any) -> None:
    path = write_lines(folder / "start.jsonl", list(picture_chats(PICTURES, (1 + n * 9 for n in range(12)))))
    given = config(path, tmp_path / "cache", model)
    dataset = MultiModalDataset(given)
    dataset.build()
    order = dataset.schedule.order(0).tolist()
    assert len(order) > 3
    found = [first_batch(given, access, share, 0.0) for share in (0.0, 0.5, 0.99)]
    assert [one.behind for one in found] == [0, len(order) // 2, len(order) - 1]
    assert [one.pack for one in found] == [order[one.behind] for one in found]


def test_worker_counts_are_checked() -> None:
    assert commands._worker_counts("2, 0,2") == (0, 2)
    for wrong in ("", "two", "-1", "0.5"):
        with pytest.raises(ConfigError, match="--workers"):
            commands._worker_counts(wrong)


@pytest.mark.full
def test_the_command_runs_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path))
    for module in (loader_bench, loader_speed):
        monkeypatch.setattr(module, "ROUNDS", 1)
    # Spares loading libraries seven times.
    monkeypatch.setattr(loader_bench, "in_new_process", lambda work, *given: work(*given))
    app = typer.Typer()
    app.command()(commands.loader)
    sizes = ["--samples", "8", "--rows", "500", "--steps", "10", "--workers", "0,1"]
    run = CliRunner().invoke(app, [*sizes, "--json"])
    assert run.exit_code == 0, run.output
    result = json.loads(run.stdout)
    assert [data["rows"] for data in result["data"]] == [500 // TENTH, 500]
    assert len(result["speed"]["lines"]) == 2 * len(WAYS)
    starts = [(row["way"], row["rows"], row["share"]) for row in result["start"]]
    assert [row for row in starts if row[0] == "map-style"] == [
        ("map-style", 50, 0.0),
        *(("map-style", 500, share) for share in (0.0, 0.01, 0.99)),
    ]
    packs = result["data"][1]["packs"]
    behind = {row["share"]: row["behind"] for row in result["start"] if row["rows"] == 500}
    assert behind == {share: int(packs * share) for share in (0.0, 0.01, 0.99)}
    for row in result["start"]:
        parts = sum(row[f"{name}_seconds"] for name in ("import", "open", "state", "batch"))
        assert abs(parts - row["seconds"]) < 1e-3
        assert row["samples"] > 0
    for row in result["memory"]:
        assert row["batches"] == 10
        assert row["processes"] >= 2, "a worker beside this process, and what other tests have left"
        assert row["samples"] > 10
        assert set(row["first"]) == set(row["last"])
        assert row["last"]["rss"] > 100 << 20
    page = io.StringIO()
    show_loader(from_json(LoaderResult, result), Console(file=page, width=160))
    for words in (
        "Speed: 8 samples",
        "Time to the first batch",
        f"Memory of {result['memory'][0]['processes']} processes",
        "plain DataLoader",
    ):
        assert words in page.getvalue()


def test_more_steps_than_packs_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr("packtrain.bench.loader._speed", lambda *_: {})
    with pytest.raises(ConfigError, match="packs of the smaller dataset"):
        bench_loader(samples=8, rows=200, steps=50, workers=(0,), model=MODEL)
