"""Ranks continue from the same checkpoint, or none of them does and all say what each has."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from packtrain.core.errors import ArtifactError
from packtrain.training.checkpoints import CheckpointFolder
from packtrain.training.resuming import checkpoint_to_resume

sys.path.append(str(Path(__file__).parents[1] / "delivery"))
from processes import TORCH, run_ranks

NEWEST = "newest"


def made(folder: Path, *steps: int) -> Path:
    """A disk with complete checkpoints of these steps."""
    for step in steps:
        CheckpointFolder(folder=folder, writes=True).save(step, [lambda path: (path / "w").write_text("w")], needed=1)
    return folder


def chosen(rank: int, disks: list[str], asked: list[Any]) -> Any:
    given = True if asked[rank] == NEWEST else asked[rank]
    found = checkpoint_to_resume(given, Path(disks[rank]))
    return None if found is None else (found.step, str(found.path))


def on_ranks(tmp_path: Path, disks: list[Path], asked: list[Any]) -> list[Any]:
    return run_ranks(2, chosen, [str(disk) for disk in disks], asked, folder=tmp_path / "meeting", preload=TORCH)


def test_alone_it_is_the_newest_or_the_one_that_is_named(tmp_path: Path) -> None:
    run = made(tmp_path / "run", 1, 2, 3)
    assert checkpoint_to_resume(None, run) is checkpoint_to_resume(False, run) is None
    for given, step in ((True, 3), (run / "checkpoint-2", 2), (str(run / "checkpoint-1"), 1)):
        found = checkpoint_to_resume(given, run)
        assert found is not None
        assert found.step == step
    with pytest.raises(ArtifactError, match="no complete checkpoint"):
        checkpoint_to_resume(True, tmp_path)


@pytest.mark.contract
def test_ranks_take_the_newest_that_all_have(tmp_path: Path) -> None:
    disks = [made(tmp_path / "a", 1, 2, 3), made(tmp_path / "b", 1, 2)]
    answers = on_ranks(tmp_path, disks, [NEWEST, NEWEST])
    assert answers == [(2, str(disk / "checkpoint-2")) for disk in disks]


@pytest.mark.contract
@pytest.mark.parametrize("shared", [True, False])
def test_damage_that_one_rank_finds_is_damage_for_all(tmp_path: Path, shared: bool) -> None:
    disks = [made(tmp_path / "a", 1, 2), tmp_path / "a" if shared else made(tmp_path / "b", 1, 2)]
    (disks[1] / "checkpoint-2" / "w").write_text("x")
    answers = on_ranks(tmp_path, disks, [NEWEST, NEWEST])
    assert answers == [(1, str(disk / "checkpoint-1")) for disk in disks]


@pytest.mark.contract
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ([NEWEST, NEWEST], "rank 0 has steps 3; rank 1 has steps 4"),
        ([NEWEST, None], "rank 0 has steps 3; rank 1 does not resume"),
        ([None, "b/checkpoint-4"], "rank 0 does not resume; rank 1 has steps 4"),
        (["a/checkpoint-3", "b/checkpoint-4"], "rank 0 has steps 3; rank 1 has steps 4"),
        (["a/checkpoint-3", "b/checkpoint-3"], "no such folder"),
    ],
)
def test_without_a_common_one_all_ranks_say_what_each_has(tmp_path: Path, asked: list[Any], said: str) -> None:
    disks = [made(tmp_path / "a", 3), made(tmp_path / "b", 4)]
    places = [str(tmp_path / one) if one not in (NEWEST, None) else one for one in asked]
    for answer in on_ranks(tmp_path, disks, places):
        assert "ArtifactError" in f"{type(answer).__name__}: {answer}"
        assert said in str(answer)


@pytest.mark.contract
def test_code_that_one_rank_finds_stops_all(tmp_path: Path) -> None:
    disks = [made(tmp_path / "a", 3), tmp_path / "b"]
    shutil.copytree(disks[0], disks[1])
    (disks[1] / "checkpoint-3" / "optimizer_0").mkdir()
    (disks[1] / "checkpoint-3" / "optimizer_0" / ".metadata").write_bytes(b"cos\nmkdir\n.")
    for answer in on_ranks(tmp_path, disks, [NEWEST, NEWEST]):
        assert "it would call os.mkdir" in str(answer)
