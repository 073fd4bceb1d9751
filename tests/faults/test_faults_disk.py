"""A disk without room, and sources that are slow or fail: the same stream where it can be had, else a clear stop."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import fault_data as data
import pytest
from fault_groups import MakeRun, Run
from fault_ledgers import Attempt, problems

sys.path.append(str(Path(__file__).parents[1] / "records"))  # the remote file system that tests of shards use
import shard_checks

pytestmark = pytest.mark.full
Sound = Callable[[Run], None]
Reference = Callable[[str], Attempt]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """With less room than one shard needs."""
    with shard_checks.small_disk(tmp_path / "cache" / "shards", "16k") as folder:
        yield folder


def test_a_full_disk_changes_nothing_but_the_speed(make_run: MakeRun, sound: Sound, small_disk: Path) -> None:
    run = make_run("stream", own_cache=small_disk.parent)
    run.finish(2, workers=1)
    said = "".join(path.read_text() for path in run.folder.glob("log-*.txt"))
    assert "No space left on device; data are read without it" in said
    sound(run)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_cache_that_cannot_be_written_changes_nothing(make_run: MakeRun, tmp_path: Path, kind: str) -> None:
    folder = data.make_shards(tmp_path / "data", "tar.zst")
    whole = make_run(kind, folder, tmp_path / "cache")
    whole.finish()
    run = make_run(kind, folder, tmp_path / "other cache")
    run.finish(full_disk=True, workers=1)
    found = problems(run.ledgers(), whole.ledgers()[0], data.PACKS_PER_STEP)
    assert found == [], found
    assert list((tmp_path / "other cache" / "shards").glob("*.ready")) == [], "the disk was not full"
    if kind == "map":  # a stream empties its cache at the end
        assert list((tmp_path / "cache" / "shards").glob("*.ready")) != [], "the cache is not used at all"


# ---- sources that are far away


@pytest.fixture
def remote(tmp_path: Path) -> list[Path]:
    """Shards behind a file system that can only be read forward."""
    return sorted(data.make_shards(tmp_path / "remote").glob("*.tar.gz"))


def remote_run(make_run: MakeRun, remote: list[Path], cache: Path) -> Run:
    return make_run("stream", shard_checks.url(remote[0].parent), cache)


def test_slow_reads_change_nothing(make_run: MakeRun, reference: Reference, remote: list[Path], tmp_path: Path) -> None:
    for path in remote:
        shard_checks.behave(path, latency=0.05, chunk=4096)
    run = remote_run(make_run, remote, tmp_path / "other cache")
    run.finish(2, workers=1)
    assert problems(run.ledgers(), reference("stream"), data.PACKS_PER_STEP) == []


def test_reads_that_fail_at_first_are_tried_again(
    make_run: MakeRun, reference: Reference, remote: list[Path], tmp_path: Path
) -> None:
    run = remote_run(make_run, remote, tmp_path / "cache")
    group = run.start(parks=[(0, "built")], quick_retries=True)
    group.parked()
    before = [shard_checks.opens(path) for path in remote]
    for path in remote:
        shard_checks.behave(path, fail_at=2000, times=3)
    group.go()
    assert group.wait(60) == [0], group.said()
    assert all(shard_checks.opens(path) > opened + 1 for path, opened in zip(remote, before, strict=True)), "no retry"
    assert problems(run.ledgers(), reference("stream"), data.PACKS_PER_STEP) == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_reads_that_go_on_failing_stop_the_group_which_can_be_resumed(
    make_run: MakeRun, reference: Reference, remote: list[Path], tmp_path: Path, world_size: int
) -> None:
    run = remote_run(make_run, remote, tmp_path / "cache")
    parks = [(rank, "built") for rank in range(world_size)]
    group = run.start(world_size, parks=parks, quick_retries=True)
    for rank in range(world_size):
        group.parked(rank)
    shard_checks.behave(remote[4], fail_at=2000, times=10**6)
    group.go()
    assert group.wait(60) == [1] * world_size, group.said()
    assert "shard-004.tar.gz" in group.said()
    assert "a fault that was asked for" in group.said()
    assert "to do:" in group.said()
    shard_checks.behave(remote[4])
    run.finish(world_size)
    assert problems(run.ledgers(), reference("stream"), data.PACKS_PER_STEP) == []
