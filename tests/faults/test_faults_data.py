"""Data that are harmed while a run uses them: what cannot be decoded is left out and said, all else is a clear stop.

Every fault happens after the dataset was built: between the start of a group and its first batch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import fault_data as data
import pytest
from fault_groups import MakeRun, Run
from fault_ledgers import Attempt, problems

pytestmark = pytest.mark.full
Sound = Callable[[Run], None]
Reference = Callable[[str], Attempt]
Harm = Callable[[Path], None]
PICTURE, VICTIM = "03.png", "r03"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xff" * 500)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def in_the_middle(path: Path) -> None:
    data.flip(path, path.stat().st_size // 2)


def harmed(run: Run, harm: Callable[[], None], world_size: int = 1, **job: object) -> tuple[list[int], str]:
    """How a group ends whose data are harmed once it is built, and what it said."""
    group = run.start(world_size, parks=[(rank, "built") for rank in range(world_size)], **job)
    for rank in range(world_size):
        group.parked(rank)
    harm()
    group.go()
    return group.wait(90), group.said()


# ---- pictures


@pytest.mark.parametrize("harm", [cut, garbage, empty, remove, in_the_middle])
def test_a_picture_that_cannot_be_decoded_is_left_out_once_an_epoch(
    make_run: MakeRun, reference: Reference, own_lines: Path, tmp_path: Path, harm: Harm
) -> None:
    run = make_run("map", own_lines, tmp_path / "cache")
    codes, said = harmed(run, lambda: harm(own_lines.parent / PICTURE), workers=1)
    assert codes == [0], said
    run.assert_nothing_left()
    lines = run.ledgers()[0].lines
    assert [one for line in lines for one in line.failed] == [VICTIM] * data.EPOCHS
    assert run.skipped() == [VICTIM] * data.EPOCHS
    expected = {(line.epoch, line.pack): line for line in reference("map").lines}
    for line in lines:
        whole = expected[line.epoch, line.pack]
        assert line.ids == tuple(one for one in whole.ids if one not in line.failed)
        assert line.failed or line.checksum == whole.checksum


def test_what_is_left_out_is_written_once_through_kills(make_run: MakeRun, own_lines: Path, tmp_path: Path) -> None:
    run = make_run("map", own_lines, tmp_path / "cache")
    group = run.start(2, parks=[(0, "built")])
    group.parked()
    group.kill()
    remove(own_lines.parent / PICTURE)
    for point in ("line:0:4", "save:0:7", "line:1:3", "save:1:8"):
        group = run.start(2, parks=[(0, point)])
        group.parked()
        group.kill()
    run.finish(3)
    assert run.skipped() == [VICTIM] * data.EPOCHS


def test_too_many_broken_pictures_stop_every_rank_alike(make_run: MakeRun, own_lines: Path, tmp_path: Path) -> None:
    run = make_run("map", own_lines, tmp_path / "cache")
    pictures = sorted(own_lines.parent.glob("*.png"))
    codes, said = harmed(run, lambda: [garbage(path) for path in pictures] and None, 2, max_failure_rate=0.05)
    assert codes == [1, 1], said
    assert said.count("could not be delivered") >= 2
    assert "max_failure_rate" in said


def test_a_picture_of_another_size_stops_the_group(make_run: MakeRun, own_lines: Path, tmp_path: Path) -> None:
    run = make_run("map", own_lines, tmp_path / "cache")
    other = data.picture(3, (96, 64))
    codes, said = harmed(run, lambda: (own_lines.parent / PICTURE).write_bytes(other) and None, 2, workers=1)
    assert codes == [1, 1], said
    assert "DriftError" in said
    assert PICTURE in said
    run.assert_nothing_left()


# ---- lines


@pytest.mark.parametrize("place", ["in a text", "in an id", "a line's end"])
def test_a_flipped_byte_of_the_lines_stops_the_group(
    make_run: MakeRun, own_lines: Path, tmp_path: Path, place: str
) -> None:
    run = make_run("map", own_lines, tmp_path / "cache")
    text = own_lines.read_bytes()
    at = {
        "in a text": text.index(b"word77"),
        "in an id": text.index(b'"r20"') + 1,
        "a line's end": text.index(b"\n", len(text) // 2),
    }[place]
    codes, said = harmed(run, lambda: data.flip(own_lines, at))
    assert codes == [1], said
    assert "data.jsonl has changed since it was measured" in said
    assert "measure and pack again" in said


@pytest.mark.parametrize(("harm", "words"), [(cut, "data.jsonl"), (empty, "data.jsonl"), (remove, "data.jsonl")])
def test_lines_that_are_cut_or_gone_stop_the_group(
    make_run: MakeRun, own_lines: Path, tmp_path: Path, harm: Harm, words: str
) -> None:
    run = make_run("map", own_lines, tmp_path / "cache")
    codes, said = harmed(run, lambda: harm(own_lines))
    assert codes == [1], said
    assert words in said
    assert "to do:" in said


def test_a_state_is_refused_once_the_data_are_others(make_run: MakeRun, own_lines: Path, tmp_path: Path) -> None:
    run = make_run("map", own_lines, tmp_path / "cache")
    group = run.start(parks=[(0, "line:0:3")])
    group.parked()
    group.kill()
    own_lines.write_bytes(own_lines.read_bytes().replace(b"word77", b"word77 and more words than before"))
    group = run.start()
    assert group.wait(60) == [1], group.said()
    assert "ArtifactError: loader state" in group.said()


# ---- shards


@pytest.mark.parametrize(
    ("kind", "ending", "harm"),
    [
        *[("map", "tar.gz", harm) for harm in (cut, remove)],
        *[("stream", "tar.zst", harm) for harm in (garbage, in_the_middle)],
        ("map", "tar.zst", in_the_middle),
        ("stream", "tar.gz", cut),
    ],
)
def test_a_shard_that_is_harmed_stops_the_group_and_can_be_brought_back(
    make_run: MakeRun, reference: Reference, tmp_path: Path, kind: str, ending: str, harm: Harm
) -> None:
    folder = data.make_shards(tmp_path / "data", ending)
    shutil.copytree(folder, tmp_path / "kept")
    run = make_run(kind, folder, tmp_path / "cache")
    codes, said = harmed(run, lambda: harm(folder / f"shard-004.{ending}"), quick_retries=True)
    assert codes == [1], said
    assert f"shard-004.{ending}" in said
    assert "to do:" in said
    shutil.copy2(tmp_path / "kept" / f"shard-004.{ending}", folder / f"shard-004.{ending}")
    run.finish()
    assert len(run.ledgers()) == 2
    assert problems(run.ledgers(), reference("stream"), data.PACKS_PER_STEP) == []


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_shard_with_other_records_stops_the_group(make_run: MakeRun, tmp_path: Path, kind: str) -> None:
    folder, others = data.make_shards(tmp_path / "data"), data.make_shards(tmp_path / "others", first=100)
    run = make_run(kind, folder, tmp_path / "cache")
    name = "shard-004.tar.gz"
    codes, said = harmed(run, lambda: shutil.copyfile(others / name, folder / name) and None, quick_retries=True)
    assert codes == [1], said
    assert f"{name} has changed since it was measured" in said
