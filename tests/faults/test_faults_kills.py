"""Whole groups killed at twenty places of one run: it goes on each time, and what it delivers is as if nothing was."""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import fault_data as data
import pytest
from fault_groups import Group, MakeRun, Run, wait_until
from fault_ledgers import Attempt

pytestmark = pytest.mark.full
Sound = Callable[[Run], None]
Reference = Callable[[str], Attempt]
KILLS = 20
SEED = 20
PACE = 0.02


def last_step(reference: Attempt, epoch: int) -> int:
    return max(line.step for line in reference.lines if line.epoch == epoch)


def named_points(reference: Attempt) -> list[list[str]]:
    """Before the first step, in it, while its state is saved; at both ends of an epoch; and at the last pack."""
    edge, end = last_step(reference, 0), last_step(reference, 1)
    return [
        ["built", "line:0:0", "save:0:0"],
        [f"line:0:{edge}", f"save:0:{edge}", f"saved:0:{edge}", "line:1:0"],
        [f"line:1:{end}", f"save:1:{end}"],
    ]


def kill_somewhere(run: Run, draw: random.Random, guard: str, **job: object) -> None:
    """Kill after a few batches, at a moment that nobody has chosen, but not behind the guard."""
    group = run.start(2, parks=[(0, guard)], pace=PACE, **job)
    goal = draw.randrange(1, 7)
    parked = run.folder / f"parked-{group.attempt}-0"
    wait_until(lambda: group.lines() >= goal or parked.exists(), "batches", 90)
    time.sleep(draw.random() * 2 * PACE)
    group.kill(workers=draw.random() < 0.8)


def kill_at(run: Run, point: str, **job: object) -> Group:
    group = run.start(2, parks=[(0, point)], **job)
    assert group.parked() == point
    group.kill()
    return group


@pytest.mark.parametrize(("kind", "workers"), [("map", 2), ("stream", 1)])
def test_twenty_kills_change_nothing(
    make_run: MakeRun, sound: Sound, reference: Reference, tmp_path: Path, kind: str, workers: int
) -> None:
    run, draw = make_run(kind), random.Random(SEED)
    first, edge, last = named_points(reference(kind))
    print(f"seed {SEED}")  # shown where the test fails
    for point in first:
        kill_at(run, point, workers=workers)
    rest = KILLS - len(first) - len(edge) - len(last)
    for number in range(rest):
        if number == rest // 2:
            for point in edge:
                kill_at(run, point, workers=workers)
        kill_somewhere(run, draw, edge[0] if number < rest // 2 else last[0], workers=workers)
    for point in last:
        kill_at(run, point, workers=workers)
    assert run.attempts == KILLS
    run.finish(2, workers=workers)
    attempts = run.ledgers()
    assert sum(len(attempt.lines) for attempt in attempts) > len(reference(kind).lines), "nothing had to be repeated"
    assert len({(attempt.epoch, attempt.next_pack) for attempt in attempts}) > KILLS / 3, "the kills are in one place"
    sound(run)


def test_a_kill_while_the_state_is_saved_leaves_the_old_one(make_run: MakeRun, sound: Sound) -> None:
    run = make_run("map")
    kill_at(run, "save:0:3")
    assert [path.name for path in run.folder.glob(".state.json.*.tmp")] != [], "the kill came too late"
    kill_at(run, "save:0:3")
    run.finish()
    assert [attempt.next_pack for attempt in run.ledgers()] == [0, 3 * data.PACKS_PER_STEP, 3 * data.PACKS_PER_STEP]
    sound(run)


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_workers_end_when_only_their_rank_is_killed(make_run: MakeRun, sound: Sound, kind: str) -> None:
    run = make_run(kind)
    group = run.start(parks=[(0, "line:0:2")], workers=2)
    group.parked()
    assert len(run.nursery.living()) == 3
    group.kill(workers=False)
    run.finish(workers=2)
    sound(run)


def test_kills_while_data_are_measured_and_packed(make_run: MakeRun, shards: Path, tmp_path: Path) -> None:
    """At any moment of the preparation: the next start ends with the same files as one that nobody disturbed."""
    undisturbed = make_run("stream", own_cache=tmp_path / "undisturbed")
    undisturbed.finish()
    run, draw = make_run("stream", own_cache=tmp_path / "cache"), random.Random(SEED)
    print(f"seed {SEED}")
    kills, seconds = 0, prepare_for(run, 90)
    assert seconds is not None
    shutil.rmtree(tmp_path / "cache")
    for _ in range(30):
        if prepare_for(run, seconds * draw.uniform(0.3, 1.0)) is None:
            kills += 1
        else:  # all was ready already: begin again, so that the next kill finds something to interrupt
            shutil.rmtree(tmp_path / "cache")
        if kills == 8:
            break
    assert kills == 8, "the kills came too late"
    run.finish(2)
    assert kept_names(tmp_path / "cache") == kept_names(tmp_path / "undisturbed")
    assert {line.content for line in run.ledgers()[-1].lines if line.ids} == {
        line.content for line in undisturbed.ledgers()[0].lines
    }


def prepare_for(run: Run, limit: float) -> float | None:
    """Start and kill after so many seconds, or once all is prepared: then the seconds that took."""
    start = time.monotonic()
    group = run.start(2, parks=[(0, "built")])
    parked = run.folder / f"parked-{group.attempt}-0"
    while time.monotonic() < start + limit and not parked.exists():
        time.sleep(0.002)
    seconds = time.monotonic() - start if parked.exists() else None
    group.kill()
    return seconds


def kept_names(cache: Path) -> list[str]:
    """What lies in a cache, but for data files; names of rows tell when they were measured."""
    found = (str(path.relative_to(cache)) for path in cache.rglob("*"))
    return sorted(re.sub(r"rows-[0-9a-f]+", "rows", name) for name in found if not name.startswith("shards/"))
