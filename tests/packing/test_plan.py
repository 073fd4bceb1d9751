"""Pack plans: what is written is what was made, whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lengths import WORK, lvis_table
from reading import LENGTH, config, packs
from tables import write_table

from packtrain.core.artifacts import DiskFull, read_json, write_json
from packtrain.core.errors import ArtifactError
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import KIND, PLAN, VERSION, PackPlan
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.plan_builder import PackProgress, build_plan
from packtrain.packing.resources import EXTRAS, RESOURCES

# ---- files


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"epochs": 3},
        {"epochs": 2, "repack_each_epoch": False},
        {"packing_length": 8_000, "overlong": "split"},
        {"packing_length": 8_000, "overlong": "truncate", "max_images_per_pack": 9},
        {"packing_window": 50, "packing_min_fill_ratio": 0.9, "epochs": 2},
        {"packing_drop_last": True, "packs_per_step": 4},
    ],
)
def test_what_is_written_is_what_was_made(table: CostTable, tmp_path: Path, settings: dict[str, Any]) -> None:
    made = build_plan(table, config(**settings), WORK)
    written = build_plan(table, config(**settings), WORK, tmp_path / "plan")
    for loaded in (written, PackPlan.load(tmp_path / "plan"), PackPlan.load(str(tmp_path / "plan" / PLAN))):
        assert loaded.num_epochs == made.num_epochs == settings.get("epochs", 1)
        assert loaded.num_packs == made.num_packs == sum(made.epoch(n).num_packs for n in range(made.num_epochs))
        assert loaded.fingerprint == made.fingerprint
        assert loaded.config == made.config == config(**settings)
        assert loaded.work == made.work == WORK
        for epoch in range(made.num_epochs):
            assert packs(loaded, epoch) == packs(made, epoch)
            mine, theirs = loaded.epoch(epoch), made.epoch(epoch)
            assert all((mine.load(n) == theirs.load(n)).all() for n in (*RESOURCES, *EXTRAS, "window", "end"))
            assert mine.rows.tolist() == [row for pack in packs(made, epoch) for row, _, _ in pack]
            assert mine.offsets.tolist() == [0, *mine.ends.tolist()]
            assert (loaded.predicted_work(epoch) == made.predicted_work(epoch)).all()
        assert replace(loaded.summary, sums={}) == made.summary
    assert made.folder is None
    assert written.folder == tmp_path / "plan"
    written.check_inputs(table)


def test_packs_are_mapped_into_memory(table: CostTable, tmp_path: Path) -> None:
    plan = build_plan(table, config(), WORK, tmp_path / "plan")
    assert plan.epoch(0).pack(0).rows.size
    mapped = Path("/proc/self/maps").read_text()
    for name in ("entries-0000.arrow", "packs-0000.arrow"):
        assert str(tmp_path / "plan" / name) in mapped


def test_entries_and_packs_are_counted_from_zero(table: CostTable) -> None:
    plan = build_plan(table, config(epochs=2), WORK)
    for number in (-1, plan.epoch(0).num_packs):
        with pytest.raises(IndexError):
            plan.epoch(0).pack(number)
    for number in (-1, 2):
        with pytest.raises(IndexError):
            plan.epoch(number)


@pytest.mark.parametrize("name", ["entries-0000.arrow", "packs-0000.arrow", "entries-0001.arrow", PLAN])
def test_a_folder_with_a_file_missing_is_refused(table: CostTable, tmp_path: Path, name: str) -> None:
    build_plan(table, config(epochs=2), WORK, tmp_path / "plan")
    (tmp_path / "plan" / name).unlink()
    with pytest.raises(ArtifactError, match=name):
        PackPlan.load(tmp_path / "plan")


@pytest.mark.parametrize("name", ["entries-0000.arrow", "packs-0000.arrow", PLAN])
def test_a_file_cut_anywhere_is_refused(table: CostTable, tmp_path: Path, name: str) -> None:
    build_plan(table, config(), WORK, tmp_path / "plan")
    whole = (tmp_path / "plan" / name).read_bytes()
    for size in (0, 1, 7, 100, len(whole) // 2, len(whole) - 9, len(whole) - 2):
        (tmp_path / "plan" / name).write_bytes(whole[:size])
        with pytest.raises(ArtifactError):
            PackPlan.load(tmp_path / "plan")
    (tmp_path / "plan" / name).write_bytes(whole)
    PackPlan.load(tmp_path / "plan")


def test_files_of_two_plans_are_not_taken_for_one(table: CostTable, tmp_path: Path) -> None:
    for folder, length in (("a", LENGTH), ("b", 30_000)):
        build_plan(table, config(packing_length=length), WORK, tmp_path / folder)
    shutil.copy(tmp_path / "b" / "packs-0000.arrow", tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"packs-0000\.arrow"):
        PackPlan.load(tmp_path / "a", checked=True)
    with pytest.raises(ArtifactError, match="file 0"):
        PackPlan.load(tmp_path / "a", checked=False)


def test_one_process_of_a_node_checks_for_all(
    table: CostTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_plan(table, config(), WORK, tmp_path / "plan")
    file = tmp_path / "plan" / "packs-0000.arrow"
    content = bytearray(file.read_bytes())
    at = content.index(int(PackPlan.load(tmp_path / "plan").epoch(0).ends[0]).to_bytes(8, "little"))
    content[at] ^= 1
    file.write_bytes(content)
    for rank, refused in (("0", True), ("3", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with (
            pytest.raises(ArtifactError, match="content has changed since it was written") if refused else nullcontext()
        ):
            PackPlan.load(tmp_path / "plan")


@pytest.mark.parametrize(("kind", "version"), [(KIND, VERSION + 1), ("cost-table", VERSION), (KIND, None)])
def test_other_kinds_and_versions_are_refused(table: CostTable, tmp_path: Path, kind: str, version: Any) -> None:
    build_plan(table, config(), WORK, tmp_path / "plan")
    body = read_json(tmp_path / "plan" / PLAN, KIND, VERSION)
    content = {name: value for name, value in body.items() if name not in ("kind", "version")}
    write_json(tmp_path / "plan" / PLAN, kind, version, content)
    with pytest.raises(ArtifactError, match=r"(?s)format version.*packtrain pack .*packtrain cache clear --kind plans"):
        PackPlan.load(tmp_path / "plan")


def test_what_is_there_is_never_overwritten(table: CostTable, tmp_path: Path) -> None:
    out = tmp_path / "plan"
    build_plan(table, config(), WORK, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    told: list[PackProgress] = []
    with pytest.raises(ArtifactError, match="never overwritten"):
        build_plan(table, config(seed=1), WORK, out, told.append)
    assert not told, "it is refused before the work is done"
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ArtifactError, match="never overwritten"):
        build_plan(table, config(), WORK, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "plan"], "no temporary folder is left"


def test_a_folder_filled_by_another_process_meanwhile_is_left_alone(table: CostTable, tmp_path: Path) -> None:
    out = tmp_path / "plan"

    def fill(_: PackProgress) -> None:
        out.mkdir(exist_ok=True)
        (out / "theirs").write_text("theirs")

    with pytest.raises(ArtifactError, match="never overwritten"):
        build_plan(table, config(), WORK, out, fill)
    assert [path.name for path in tmp_path.rglob("*")] == ["plan", "theirs"]


def test_an_empty_folder_may_be_filled(table: CostTable, tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    assert build_plan(table, config(), WORK, tmp_path / "plan").num_packs
    assert build_plan(table, config(), WORK, tmp_path / "new" / "deep" / "plan").num_packs


def test_a_failure_leaves_nothing_behind(table: CostTable, tmp_path: Path) -> None:
    def fail(_: PackProgress) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        build_plan(table, config(epochs=2), WORK, tmp_path / "plan", fail)
    assert not list(tmp_path.iterdir())


KILLED = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from lengths import WORK, lvis_table
from packtrain.measuring.table import CostTable
from packtrain.packing.plan_builder import build_plan
from packtrain.packing.packing_config import PackingConfig

def wait(*_):
    Path({marker!r}).touch()
    time.sleep(600)

seen = []
def progress(now):
    seen.append(now)
    if {when!r} == "second window" and len(seen) == 2:
        wait()

if {when!r} == "before it is moved":
    os.replace = lambda a, b: wait() if str(b) == {out!r} else os.rename(a, b)
config = PackingConfig(packing_length=20_000, packing_window=100)
build_plan(CostTable.load({costs!r}), config, WORK, Path({out!r}), progress)
"""


def test_a_full_disk_names_the_plan(table: CostTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, *arguments: object) -> None:
        raise OSError(errno.ENOSPC, "Error writing bytes to file")

    monkeypatch.setattr("pyarrow.ipc.RecordBatchFileWriter.write_batch", full)
    with pytest.raises(
        DiskFull, match=r"(?s)plan\n.*No space left on device: [\d,]+ bytes are free in .*free some space"
    ):
        build_plan(table, config(), WORK, tmp_path / "plan")
    assert list(tmp_path.glob("*plan*")) == []


@pytest.mark.parametrize("when", ["second window", "before it is moved"])
def test_a_killed_process_leaves_no_plan(table: CostTable, tmp_path: Path, when: str) -> None:
    out, marker = tmp_path / "plan", tmp_path / "marker"
    program = KILLED.format(
        here=str(Path(__file__).parent), marker=str(marker), out=str(out), costs=str(table.folder), when=when
    )
    child = subprocess.Popen([sys.executable, "-c", program])
    try:
        while not marker.exists():
            assert child.poll() is None, "it ended before it could be killed"
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
    finally:
        child.kill()
    assert any("entries" in path.name for path in tmp_path.rglob("*")), "it was in the middle of writing"
    assert not out.exists()
    made = build_plan(table, config(packing_window=100), WORK, out)
    assert packs(made) == packs(build_plan(table, config(packing_window=100), WORK))


# ---- epochs


def test_epochs_are_packed_anew(tmp_path: Path) -> None:
    # Seeds choose between equal samples, so there must be some.
    table = write_table(tmp_path, {"tokens": 100 * np.random.default_rng(0).integers(1, 60, 300)})
    plan = build_plan(table, config(epochs=3), WORK)
    sets = [{frozenset(pack) for pack in packs(plan, epoch)} for epoch in range(3)]
    assert sets[0] != sets[1] != sets[2] != sets[0]
    longer = build_plan(table, config(epochs=5), WORK)
    assert [packs(longer, epoch) for epoch in range(3)] == [packs(plan, epoch) for epoch in range(3)]
    other = build_plan(table, config(epochs=1, seed=1), WORK)
    assert packs(other) != packs(plan)


def test_without_repacking_one_file_serves_all_epochs(table: CostTable, tmp_path: Path) -> None:
    plan = build_plan(table, config(epochs=3, repack_each_epoch=False), WORK, tmp_path / "plan")
    assert plan.num_epochs == 3
    assert packs(plan, 0) == packs(plan, 2) == packs(build_plan(table, config(), WORK))
    assert [path.name for path in sorted((tmp_path / "plan").glob("*.arrow"))] == [
        "entries-0000.arrow",
        "packs-0000.arrow",
    ]
    assert plan.num_packs == 3 * plan.epoch(0).num_packs


def test_progress_is_told_window_by_window(table: CostTable) -> None:
    told: list[PackProgress] = []
    build_plan(table, config(epochs=2, packing_window=130), WORK, progress=told.append)
    assert [(now.epoch, now.epochs, now.total) for now in told] == [(n, 2, 300) for n in (0, 0, 0, 1, 1, 1)]
    for epoch in range(2):
        rows = [now.rows for now in told if now.epoch == epoch]
        assert rows == sorted(rows)
        assert rows[-1] == 300


# ---- inputs


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (
            {"inputs": {"request": {"seed": 1, "limits": {}}, "settings": {"model_type": "text"}}},
            "measured.request.seed",
        ),
        ({"mixture": {"data": {"repeats": 2, "weight": None}}}, "mixture.data.repeats"),
        ({"columns": {"tokens": [5, 6]}}, "rows: 3 -> 2"),
    ],
)
def test_plans_of_other_inputs_are_refused_by_name(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    columns = {"tokens": [5, 6, 7]}
    table = write_table(tmp_path / "a", columns)
    plan = build_plan(table, config(packing_length=20), WORK, tmp_path / "plan")
    plan.check_inputs(write_table(tmp_path / "same", columns))
    other = write_table(tmp_path / "b", **{"columns": columns, **change})
    with pytest.raises(ArtifactError, match=field) as error:
        plan.check_inputs(other)
    assert "pack this table again" in str(error.value)


def test_a_setting_at_its_default_is_in_no_fingerprint() -> None:
    """So that a setting that is new leaves older plans and their runs as they are."""
    assert PackingConfig(packing_length=64).given() == {"packing_length": 64}
    assert PackingConfig(packing_length=64, shuffle=False, seed=0).given() == {"packing_length": 64, "shuffle": False}


def test_the_fingerprint_does_not_know_of_defaults(table: CostTable, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build_plan(table, config(), WORK)
    before, described = plan.fingerprint, PackingConfig.describe
    monkeypatch.setattr(PackingConfig, "describe", lambda self: {**described(self), "new": None})
    assert plan.fingerprint == before


def test_the_fingerprint_is_that_of_config_and_inputs(table: CostTable, tmp_path: Path) -> None:
    plans = [build_plan(table, config(**change), WORK) for change in ({}, {"seed": 1}, {"packing_length": 30_000})]
    plans.append(build_plan(lvis_table(tmp_path, 299), config(), WORK))
    assert len({plan.fingerprint for plan in plans}) == 4
    assert build_plan(table, config(), WORK).fingerprint == plans[0].fingerprint
