"""Any number of workers and ranks, changed in the middle: the same stream, and every sample once in each epoch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from itertools import pairwise

import pytest
from fault_groups import MakeRun, Run, children, wait_until

pytestmark = pytest.mark.full
Sound = Callable[[Run], None]


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("workers", [1, 5])
def test_the_stream_does_not_depend_on_workers(make_run: MakeRun, sound: Sound, kind: str, workers: int) -> None:
    run = make_run(kind)
    run.finish(workers=workers)
    places = [(line.at, line.micro_batch) for line in run.ledgers()[0].lines]
    assert places == sorted(places)
    sound(run)


@pytest.mark.parametrize("kind", ["map", "stream"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_number_of_ranks_delivers_the_same(make_run: MakeRun, sound: Sound, kind: str, world_size: int) -> None:
    run = make_run(kind)
    run.finish(world_size)
    assert {line.rank for line in run.ledgers()[0].lines} == set(range(world_size))
    sound(run)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_the_number_of_ranks_changes_at_every_resume(make_run: MakeRun, sound: Sound, kind: str) -> None:
    run = make_run(kind)
    worlds = [1, 2, 3, 4, 2, 1, 4, 3]
    for number, world_size in enumerate(worlds[:-1]):
        point = f"line:0:{number + 1}" if number < 4 else f"line:1:{number - 3}"
        group = run.start(world_size, parks=[(0, point)], workers=number % 2)
        group.parked()
        group.kill()
    run.finish(worlds[-1])
    attempts = run.ledgers()
    assert [attempt.world_size for attempt in attempts] == worlds
    assert all(one.next_pack != other.next_pack or one.epoch != other.epoch for one, other in pairwise(attempts))
    sound(run)


def test_a_dataset_iterated_without_a_loader_goes_on_as_well(make_run: MakeRun, sound: Sound) -> None:
    run = make_run("iterated")
    for point in ("line:0:0", "save:0:4", "line:1:2"):
        group = run.start(2, parks=[(0, point)])
        group.parked()
        group.kill()
    run.finish(3)
    sound(run)


@pytest.mark.parametrize(("kind", "world_size"), [("map", 1), ("stream", 2)])
def test_a_worker_that_is_killed_ends_the_group_with_a_message(
    make_run: MakeRun, sound: Sound, kind: str, world_size: int
) -> None:
    run = make_run(kind)
    group = run.start(world_size, workers=2, parks=[(world_size - 1, "line:0:2")])
    group.parked(world_size - 1)
    victims = children(group.pids[-1])
    assert len(victims) == 2, "workers were not found"
    os.kill(victims[0], signal.SIGKILL)
    group.go()
    *others, code = group.wait(60)
    assert [*others, code] == [1] * world_size, group.said()
    assert "a worker process was lost (SIGKILL) while packs" in group.said()
    wait_until(lambda: not run.nursery.living(), "the end of all", 20)
    run.finish(world_size, workers=2)
    sound(run)


def test_a_rank_that_is_killed_ends_the_others_with_a_message(make_run: MakeRun, sound: Sound) -> None:
    run = make_run("map")
    group = run.start(3, workers=1, parks=[(1, "line:0:3")])
    group.parked(1)
    os.killpg(group.pids[1], signal.SIGKILL)
    codes = group.wait(60)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] != 0 != codes[2], group.said()
    assert "rank 1 on" in group.said()
    wait_until(lambda: not run.nursery.living(), "the end of all", 20)
    run.finish(2)
    sound(run)
