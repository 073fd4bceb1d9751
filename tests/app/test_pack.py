"""`packtrain pack` as its users call it: one JSON object, nothing overwritten, every bad input named."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import Run, files
from lengths import lvis_like
from tables import write_table

from packtrain.app.pack import pack
from packtrain.core.artifacts import write_json
from packtrain.core.checksums import file_sums
from packtrain.demo import write_shape
from packtrain.measuring.table import COSTS, KIND, MEDIA, SUMMARY, VERSION, CostTable
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.packing_config import LIMITS, PackingConfig


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    return write_table(tmp_path / "costs", lvis_like(200, 1)).folder


def test_json_is_all_there_is_on_stdout(run: Run, costs: Path, tmp_path: Path) -> None:
    command = ("pack", costs, "-n", 8192, "--max-images-per-pack", 6, "--epochs", 2, "-o", tmp_path / "p", "--json")
    code, out, err = run(*command)
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["reused"] is False
    assert said["config"]["max_images_per_pack"] == 6
    assert (len(said["epochs"]), said["folder"]) == (2, str(tmp_path / "p"))
    before = files(tmp_path / "p")
    code, out, err = run(*command)
    assert (code, err) == (0, "")
    assert json.loads(out) == {**said, "reused": True}
    assert files(tmp_path / "p") == before


def test_people_get_tables_and_the_next_step(run: Run, costs: Path, tmp_path: Path) -> None:
    code, out, err = run("pack", costs, "-n", 2048, "-o", tmp_path / "p")
    assert (code, err) == (0, "")
    dropped = len((tmp_path / "p" / "ledger.jsonl").read_text().splitlines())
    assert dropped
    assert f"200 samples = {200 - dropped} packed + {dropped} dropped" in out
    assert f"next: packtrain inspect {tmp_path / 'p'} --pack 0" in out
    assert "Nothing has changed" not in out
    assert "Nothing has changed" in run("pack", costs, "-n", 2048, "-o", tmp_path / "p")[1]


@pytest.mark.parametrize("verb", ["pack", "plan", "inspect"])
def test_help_teaches(run: Run, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert f"Example: packtrain {verb} " in " ".join(out.split())
    if verb == "pack":
        for setting in LIMITS:
            assert f"--{setting.replace('_', '-')}" in out


@pytest.mark.parametrize(
    ("given", "code", "words"),
    [
        ({"-n": 10}, 1, ["no packs: 200 of 200 entries do not fit", "use --packing-length "]),
        ({"-n": 0}, 2, ["packing_length", "a positive integer"]),
        ({"-n": -4}, 2, ["packing_length"]),
        ({"-n": "8k"}, 2, ["--packing-length"]),
        ({"-n": 2**63}, 2, ["packing_length"]),
        ({"--packing-strategy": "bestfit"}, 2, ["did you mean 'best_fit'?"]),
        ({"--packing-strategy": "window_0"}, 2, ["window_1000"]),
        ({"--effort": "bst"}, 2, ["did you mean 'best'?"]),
        ({"--overlong": "trunkate"}, 2, ["did you mean 'truncate'?"]),
        ({"-n": 600, "--overlong": "error"}, 1, ["samples fit no pack", "packing_length 600", "overlong: drop"]),
        *(({f"--{name.replace('_', '-')}": 0}, 2, [name]) for name in LIMITS if name != "packing_length"),
        ({"--max-images-per-pack": -1}, 2, ["leave it out for no limit"]),
        ({"--max-attention-per-pack": 10}, 1, ["no packs", "attention 10"]),
        ({"--max-image-per-pack": 3}, 2, ["--max-images-per-pack"]),
        ({"--packing-min-fill-ratio": "nan"}, 2, ["a share from 0 to 1"]),
        ({"--packing-min-fill-ratio": 1.5}, 2, ["a share from 0 to 1"]),
        ({"--epochs": 0}, 2, ["epochs"]),
        ({"--packs-per-step": 0}, 2, ["packs_per_step"]),
        ({"--packing-window": 0}, 2, ["packing_window"]),
        ({"--seed": -1}, 2, ["seed"]),
        ({"--packing-drop-last": None, "--packs-per-step": 1000}, 1, ["full step of 1000", "packing_drop_last"]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_wrong_options(
    run: Run, costs: Path, tmp_path: Path, given: dict[str, Any], code: int, words: list[str]
) -> None:
    options = [str(item) for pair in ({"-n": 8192} | given).items() for item in pair if item is not None]
    found, out, err = run("pack", costs, "-o", tmp_path / "p", "--json", *options)
    assert (found, out) == (code, ""), err
    for word in words:
        assert word in err
    assert {path.name for path in tmp_path.iterdir()} == {"costs"}, "nothing is left, not even a part"


def test_a_plan_without_many_of_the_samples_is_warned_of(run: Run, costs: Path, tmp_path: Path) -> None:
    lengths = np.sort(CostTable.load(costs).column("tokens"))
    code, out, err = run("pack", costs, "-o", tmp_path / "p", "-n", lengths[len(lengths) // 2])
    assert code == 0, err
    said = " ".join(out.split())
    assert "of 200 samples" in said
    assert f"fit no pack; the longest sample has {lengths[-1]:,} tokens: use --packing-length {lengths[-1]} or" in said
    assert "fit no pack" not in run("pack", costs, "-o", tmp_path / "all", "-n", lengths[-1])[1]


def _rewritten(folder: Path, name: str, values: pa.Array) -> None:
    table = pq.read_table(folder / COSTS)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), folder / COSTS)
    _summary(folder, sums=file_sums(folder, (COSTS, MEDIA)))


def _summary(folder: Path, **changes: Any) -> None:
    write_json(folder / SUMMARY, KIND, VERSION, {**json.loads((folder / SUMMARY).read_text()), **changes}, checked=True)


def _damaged(folder: Path) -> None:
    content = (folder / COSTS).read_bytes()
    with pq.ParquetFile(folder / COSTS) as file:
        at = file.metadata.row_group(0).column(file.schema_arrow.get_field_index("tokens")).data_page_offset
    (folder / COSTS).write_bytes(content[:at] + b"\xff" * 60 + content[at + 60 :])


TOKENS = lvis_like(60, 1)["tokens"]
BROKEN_TABLES: dict[str, tuple[Any, list[str]]] = {
    "an older version": (lambda folder: _summary(folder, version=2), [SUMMARY, "version 2", f"version {VERSION}"]),
    "another kind": (lambda folder: _summary(folder, kind="pack-plan"), [SUMMARY, "kind 'pack-plan'"]),
    "no summary": (lambda folder: (folder / SUMMARY).unlink(), [SUMMARY, "packtrain measure"]),
    "another setting in the summary": (
        lambda folder: (folder / SUMMARY).write_text(
            (folder / SUMMARY).read_text().replace("data.jsonl", "date.jsonl")
        ),
        [SUMMARY, "checksum", "measure again"],
    ),
    "half a summary": (lambda folder: (folder / SUMMARY).write_text('{"kind": '), [SUMMARY]),
    "truncated": (lambda folder: os.truncate(folder / COSTS, 700), [COSTS, "measure again"]),
    "damaged in the middle": (_damaged, [COSTS, "measure again"]),
    "no media": (lambda folder: (folder / MEDIA).unlink(), [MEDIA, "measure again"]),
    "fewer rows": (lambda folder: _summary(folder, counts={"entries": 61, "rows": 61}), [COSTS, "60 rows", "61 rows"]),
    "zero tokens": (lambda folder: _rewritten(folder, "tokens", pa.array([0, *TOKENS[1:]])), ["row 0", "tokens 0"]),
    "negative": (
        lambda folder: _rewritten(folder, "images", pa.array([1] * 59 + [-2], pa.int32())),
        ["row 59", "images -2"],
    ),
    "not a number": (
        lambda folder: _rewritten(folder, "tokens", pa.array([float("nan"), *map(float, TOKENS[1:])])),
        ["tokens as double", "tokens as int64"],
    ),
    "nothing there": (
        lambda folder: _rewritten(folder, "tokens", pa.array([None, *TOKENS[1:]])),
        ["rows without tokens"],
    ),
}


@pytest.mark.parametrize("fault", BROKEN_TABLES)
@pytest.mark.parametrize("verb", ["pack", "plan"])
def test_broken_tables(run: Run, shape: Path, tmp_path: Path, fault: str, verb: str) -> None:
    folder = write_table(tmp_path / "costs", lvis_like(60, 1)).folder
    breaks, words = BROKEN_TABLES[fault]
    breaks(folder)
    options = ("-n", 8192) if verb == "pack" else ("--model", shape, "--lengths", 8192)
    code, out, err = run(verb, folder, "-o", tmp_path / "out", "--json", *options)
    assert (code, out) == (2 if fault == "no summary" else 1, ""), err
    for word in words:
        assert word in err
    assert not (tmp_path / "out").exists()


def test_tables_that_are_none(run: Run, tmp_path: Path) -> None:
    empty = write_table(tmp_path / "empty", {"tokens": np.zeros(0, np.int64)}).folder
    for costs, ends, words in (
        (empty, 1, "without rows"),
        (tmp_path / "nowhere", 2, "measure first: packtrain measure DATA"),
        (Path(__file__), 2, "measure the data first"),
    ):
        code, out, err = run("pack", costs, "-n", 8192, "-o", tmp_path / "p", "--json")
        assert (code, out) == (ends, "")
        assert words in err
    assert not (tmp_path / "p").exists()


class TestTheFolder:
    def test_other_inputs_are_refused_by_name(self, run: Run, costs: Path, tmp_path: Path) -> None:
        out = tmp_path / "p"
        assert run("pack", costs, "-n", 8192, "-o", out)[0] == 0
        before = files(out)
        other = write_table(tmp_path / "other", lvis_like(201, 1)).folder
        for arguments, words in (
            ((costs, "-n", 4096), "config.packing_length: 8192 -> 4096"),
            ((costs, "-n", 8192, "--max-frames-per-pack", 9), "config.max_frames_per_pack: None -> 9"),
            ((costs, "-n", 8192, "--seed", 1), "config.seed: 0 -> 1"),
            ((other, "-n", 8192), "inputs.rows: 200 -> 201"),
        ):
            code, _, err = run("pack", *arguments, "-o", out)
            assert code == 1
            assert words in err
            assert "never overwritten" in err
        assert files(out) == before

    def test_what_is_there_stays(self, run: Run, costs: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "mine").write_text("mine")
        before = files(tmp_path)
        for out in (tmp_path / "file", tmp_path / "full", costs, tmp_path / "file" / "below", Path("/")):
            code, _, err = run("pack", costs, "-n", 8192, "-o", out)
            assert code == 2
            assert str(out) in err or str(out.parent) in err
        assert files(tmp_path) == before

    def test_a_plan_that_is_not_whole_is_not_touched(self, run: Run, costs: Path, tmp_path: Path) -> None:
        out = tmp_path / "p"
        for name in ("packs-0000.arrow", "entries-0000.arrow", "plan.json"):
            assert run("pack", costs, "-n", 8192, "-o", out)[0] == 0
            os.truncate(out / name, 100)
            before = files(out)
            code, _, err = run("pack", costs, "-n", 8192, "-o", out)
            assert (code, name in err) == (1, True)
            assert files(out) == before
            for path in out.iterdir():
                path.unlink()

    def test_places_that_are_fine(self, run: Run, costs: Path, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "target").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "target")
        (tmp_path / "dangling").symlink_to(tmp_path / "later")
        plans = []
        for name in ("empty", "a/b/c", "link", "dangling"):
            assert run("pack", costs, "-n", 8192, "-o", tmp_path / name)[0] == 0
            plans.append(files(tmp_path / name))
        assert plans[0]
        assert all(plan == plans[0] for plan in plans), "the same bytes wherever they are"
        assert (tmp_path / "link").is_symlink()

    def test_not_where_one_stands(self, run: Run, costs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The folder is replaced when the plan is whole: a shell that stands in it would stand nowhere."""
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        for out in (".", tmp_path / "here"):
            code, _, err = run("pack", costs, "-n", 8192, "-o", out)
            assert (code, "below this one" in err) == (2, True)
        assert not list((tmp_path / "here").iterdir())

    def test_a_full_disk_leaves_nothing(self, run: Run, tmp_path: Path) -> None:
        """Closing a file fails as well then: what was begun has to go all the same."""
        costs = write_table(tmp_path / "costs", lvis_like(20_000, 1)).folder
        with _largest_file(20_000):
            code, out, err = run("pack", costs, "-n", 8192, "-o", tmp_path / "p", "--json")
        assert (code, out) == (1, "")
        assert "error: " in err
        assert {path.name for path in tmp_path.iterdir()} == {"costs"}


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_model_that_is_gone_does_not_change_the_plan(run: Run, tmp_path: Path) -> None:
    model = write_shape(tmp_path / "model")
    costs = write_table(tmp_path / "costs", lvis_like(60, 1), model=str(model)).folder
    command = ("pack", costs, "-n", 8192, "-o", tmp_path / "p", "--json")
    made = json.loads(run(*command)[1])
    assert made["work_from"] == "the shape of qwen2_5_vl"
    (model / "config.json").unlink()
    code, out, _ = run(*command)
    again = json.loads(out)
    assert (code, again["reused"]) == (0, True)
    assert "generic" in again["work_from"]
    assert str(model) in again["work_from"]


def test_numbers_agree_wherever_they_are_said(run: Run, costs: Path, tmp_path: Path) -> None:
    command = ("pack", costs, "-n", 2048, "--max-images-per-pack", 2, "--epochs", 2, "-o", tmp_path / "p", "--json")
    said = json.loads(run(*command)[1])
    stored = json.loads((tmp_path / "p" / "plan.json").read_text())
    assert {key: said[key] for key in stored if key in said} == {key: stored[key] for key in said if key in stored}
    ledger = [json.loads(line) for line in (tmp_path / "p" / "ledger.jsonl").read_text().splitlines()]
    assert sum(said["ledger"]["reasons"].values()) == len(ledger) > 0
    table = CostTable.load(costs)
    tokens = table.column("tokens")
    plan = PackPlan.load(tmp_path / "p")
    assert plan.fingerprint == said["fingerprint"]
    for number, counts in enumerate(said["epochs"]):
        packs = plan.epoch(number)
        assert (packs.num_packs, packs.num_entries) == (counts["packs"], counts["entries"])
        assert packs.load("tokens").sum() == tokens[packs.rows].sum() == counts["totals"]["tokens"]
        assert counts["fill"] == counts["totals"]["tokens"] / (counts["packs"] * 2048)
        assert packs.load("tokens").max() == counts["most"]["tokens"] <= 2048
        assert packs.load("images").max() == counts["most"]["images"] == 2
        assert sorted([*packs.rows.tolist(), *(line["row"] for line in ledger)]) == list(range(200))
    assert [line["id"] for line in ledger] == [table.column("id")[line["row"]] for line in ledger]
    assert json.loads(run("inspect", tmp_path / "p", "--json")[1]) == {
        key: value for key, value in said.items() if key not in ("reused", "work_from", "notes")
    }


def test_from_python_and_from_the_command_line(run: Run, costs: Path, tmp_path: Path) -> None:
    assert run("pack", costs, "-n", 8192, "-o", tmp_path / "a", "--overlong", "split")[0] == 0
    plan = pack(costs, PackingConfig(packing_length=8192, overlong="split"), tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert plan.folder == tmp_path / "b"
    in_memory = pack(CostTable.load(costs), PackingConfig(packing_length=8192, overlong="split"))
    assert in_memory.summary == replace(plan.summary, sums={})
    assert (in_memory.epoch(0).rows == plan.epoch(0).rows).all()
