"""A rank that dies, fails or hangs: every other rank ends within the deadline and names it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from processes import context

from packtrain.core.errors import ConfigError, PacktrainError
from packtrain.delivery.trainers.watch import Heartbeat, RankWatchdog, Timeouts, Watchdog, _is_collateral

TIMEOUTS = Timeouts(silent=10, behind=20, start=100)


def beat(number: int = 1, step: int = 5, **more: Any) -> Heartbeat:
    return Heartbeat(number=number, host=more.pop("host", "node"), step=step, **more)


def check(watchdog: Watchdog, *rounds: tuple[float, dict[int, Heartbeat | None]]) -> list[str]:
    return [watchdog.check(now, beats) for now, beats in rounds]


# ---- what heartbeats mean


def test_a_rank_without_signs_is_gone_and_named() -> None:
    watchdog = Watchdog(TIMEOUTS)
    rounds = [(now, {0: beat(int(now)), 1: beat(1, 7, host="node-b"), 2: beat(int(now))}) for now in (0.0, 5.0, 10.0)]
    assert check(watchdog, *rounds) == ["", "", ""]
    assert watchdog.check(10.5, rounds[-1][1] | {0: beat(11), 2: beat(11)}) == (
        "rank 1 on node-b (last step 7) is gone: no heartbeat for 10.5 s"
    )


def test_a_rank_that_gives_signs_at_the_same_step_as_all_is_not_late() -> None:
    watchdog = Watchdog(TIMEOUTS)
    assert check(watchdog, *[(now, {0: beat(now), 1: beat(now)}) for now in range(0, 1000, 5)]) == [""] * 200


def test_the_clock_of_a_late_rank_starts_when_others_are_ahead() -> None:
    watchdog = Watchdog(TIMEOUTS)
    for now in range(0, 60, 5):  # a long evaluation of all
        assert watchdog.check(now, {0: beat(now), 1: beat(now)}) == ""
    for now in range(60, 85, 5):
        assert watchdog.check(now, {0: beat(now, 6), 1: beat(now, at="loader.py:3 in read")}) == ""
    found = watchdog.check(85, {0: beat(85, 6), 1: beat(85, at="loader.py:3 in read")})
    assert found.startswith("rank 1 on node (last step 5) has made no progress for 25 s while others are at step 6")
    assert "loader.py:3 in read" in found


def test_a_slow_rank_that_gets_on_is_not_late() -> None:
    watchdog = Watchdog(TIMEOUTS)
    for now in range(0, 300, 5):
        assert watchdog.check(now, {0: beat(now, now // 15 + 1), 1: beat(now, now // 15)}) == ""


def test_parts_of_a_step_tell_who_hangs() -> None:
    watchdog = Watchdog(TIMEOUTS)
    found = check(watchdog, *[(now, {0: beat(now, part=1), 1: beat(now, part=0)}) for now in (0, 15, 21)])
    assert found[:2] == ["", ""]
    assert found[2].startswith("rank 1 ")


def test_a_rank_that_was_late_when_it_died_is_gone_and_not_late() -> None:
    watchdog = Watchdog(TIMEOUTS)
    for now in range(15):
        assert watchdog.check(now, {0: beat(now, 6), 1: beat(now)}) == ""
    for now in range(15, 25):
        assert watchdog.check(now, {0: beat(now, 6), 1: beat(14)}) == ""
    assert " is gone: " in watchdog.check(25, {0: beat(25, 6), 1: beat(14)})


def test_a_rank_that_fails_is_named_at_once() -> None:
    failed = beat(3, 4, state="failed", message="ValueError: odd")
    assert Watchdog(TIMEOUTS).check(0, {0: beat(), 1: failed}) == "rank 1 on node (last step 4) failed: ValueError: odd"


def test_a_broken_collective_waits_for_the_rank_that_broke_it() -> None:
    broken = beat(3, state="failed", message="Connection closed by peer", collateral=True)
    watchdog = Watchdog(TIMEOUTS)
    assert check(watchdog, *[(now, {0: beat(now), 1: broken, 2: beat()}) for now in (0, 5, 10)]) == [
        "",
        "",
        "",
    ]
    assert watchdog.check(10.1, {0: beat(11), 1: broken, 2: beat()}).startswith("rank 2 on node (last step 5) is gone")
    watchdog = Watchdog(TIMEOUTS)
    found = check(watchdog, *[(now, {0: beat(now), 1: broken, 2: beat(now)}) for now in (0, 10, 11)])
    assert found[:2] == ["", ""]
    assert found[2].startswith("rank 1 on node (last step 5) failed"), "no other rank explains it"


def test_a_failure_of_its_own_comes_before_all_others() -> None:
    beats = {
        0: beat(2, state="failed", message="x", collateral=True),
        1: beat(),
        2: beat(state="failed", message="y"),
    }
    watchdog = Watchdog(TIMEOUTS)
    watchdog.check(0, {0: beats[0], 1: beats[1], 2: beat()})
    assert watchdog.check(50, beats).endswith("failed: y")


def test_ranks_that_are_done_are_left_alone() -> None:
    watchdog = Watchdog(TIMEOUTS)
    beats = {0: beat(1, 9, state="done"), 1: beat(1, 4, state="done")}
    assert check(watchdog, (0, beats), (500, beats)) == ["", ""]
    for now in range(0, 100, 5):
        assert watchdog.check(now, {0: beat(1, 9, state="done"), 1: beat(now, 3)}) == ""


def test_ranks_that_never_start_or_never_begin_are_named() -> None:
    watchdog = Watchdog(TIMEOUTS)
    assert check(watchdog, (0, {0: beat(), 1: None}), (100, {0: beat(2), 1: None})) == ["", ""]
    assert watchdog.check(101, {0: beat(3), 1: None}) == "rank 1 has not started within 100 s"
    watchdog = Watchdog(TIMEOUTS)
    found = check(watchdog, *[(now, {0: beat(now), 1: beat(now, -1)}) for now in range(0, 106, 5)])
    assert found[:21] == [""] * 21
    assert found[21].startswith("rank 1 on node (before its first step) has made no progress")


def test_a_verdict_of_another_rank_is_taken_over() -> None:
    assert (
        Watchdog(TIMEOUTS).check(0, {0: beat(), 1: beat(state="ended", message="rank 0 is gone")}) == "rank 0 is gone"
    )


def test_signs_survive_the_store() -> None:
    one = beat(3, part=2, at="a:1", state="failed", message="naïve \udcff", collateral=True, verdict="v")
    assert Heartbeat.from_bytes(one.to_bytes()) == one


def test_which_errors_another_rank_may_explain() -> None:
    assert _is_collateral(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]"))
    assert _is_collateral(dist.DistBackendError("NCCL error"))
    assert not _is_collateral(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not _is_collateral(ValueError("gloo"))


# ---- one process


class Group:
    """Several watches in one process, each with a place for its message."""

    def __init__(self, world_size: int, deadline: float = 1.0, **settings: Any) -> None:
        self.store = dist.HashStore()
        self.ended: dict[int, str] = {}
        self.all_ended = threading.Semaphore(0)
        self.watches = [
            RankWatchdog(
                self.store, r, world_size, deadline=deadline, host=f"node{r}", action=self.action(r), **settings
            )
            for r in range(world_size)
        ]

    def action(self, rank: int) -> Any:
        def end(message: str) -> None:
            self.ended[rank] = message
            self.all_ended.release()

        return end

    def wait(self, num: int) -> None:
        for _ in range(num):
            assert self.all_ended.acquire(timeout=30), f"only {sorted(self.ended)} ended"


def test_a_run_that_ends_well_ends_nobody() -> None:
    group = Group(3, deadline=5.0)
    for watch in group.watches:
        watch.start()
    for step in range(3):
        for watch in group.watches:
            watch.beat(step)
    closing = threading.Thread(target=group.watches[0].close)
    closing.start()
    group.watches[1].close()
    assert closing.is_alive(), "the first rank stays until all are done"
    group.watches[2].close()
    closing.join(20)
    assert not closing.is_alive()
    assert group.ended == {}


def test_a_rank_that_falls_behind_ends_all() -> None:
    group = Group(3)
    for watch in group.watches:
        watch.start().beat(3)
    for rank in (0, 2):
        group.watches[rank].beat(4)
    group.wait(3)
    assert all(message.startswith("rank 1 on node1 (last step 3)") for message in group.ended.values())
    assert "rank 2 on node2 ends at step 4" in group.ended[2]


def test_a_rank_that_raises_ends_all_others_and_itself_by_its_error() -> None:
    group = Group(3, deadline=20.0)
    for rank in (0, 2):
        group.watches[rank].start().beat(3)
    group.watches[1].beat(2)
    with pytest.raises(ValueError, match="odd"), group.watches[1]:
        raise ValueError("odd")
    group.wait(2)
    assert set(group.ended) == {0, 2}
    assert all(m.startswith("rank 1 on node1 (last step 2) failed: ValueError: odd") for m in group.ended.values())


def test_the_first_rank_may_raise_too() -> None:
    group = Group(2, deadline=20.0)
    group.watches[1].start().beat(3)
    with pytest.raises(ValueError, match="odd"), group.watches[0]:
        raise ValueError("odd")
    group.wait(1)
    assert group.ended[1].startswith("rank 0 on node0 (before its first step) failed: ValueError: odd")
    assert set(group.ended) == {1}


def test_a_broken_collective_is_blamed_on_the_rank_that_is_gone() -> None:
    group = Group(3)
    for rank in range(3):
        group.watches[rank].start().beat(rank)
    for watch in group.watches:
        watch._wait_for_round()
    group.watches[2]._stop()  # as if killed
    with pytest.raises(PacktrainError, match=r"rank 2 on node2 \(last step 2\) is gone"), group.watches[1]:
        raise RuntimeError("gloo: Connection closed by peer")
    group.wait(1)
    assert group.ended[0].startswith("rank 2 on node2 (last step 2) is gone")


def test_one_rank_alone_needs_no_watch() -> None:
    before = threading.active_count()
    with RankWatchdog(dist.HashStore(), 0, 1) as watch:
        watch.beat(1)
        assert threading.active_count() == before
    with pytest.raises(ValueError, match="odd"), RankWatchdog(dist.HashStore(), 0, 1):
        raise ValueError("odd")


@pytest.mark.parametrize(
    "settings", [{"deadline": 0}, {"deadline": 10, "step_deadline": 5}, {"deadline": 10, "start_deadline": 5}]
)
def test_settings_are_checked(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RankWatchdog(dist.HashStore(), 0, 2, **settings)
    with pytest.raises(ConfigError):
        RankWatchdog(dist.HashStore(), 2, 2)


def test_a_rank_that_is_told_to_end_waits_less_for_one_that_is_gone() -> None:
    group = Group(3, deadline=12.0)  # without haste 7 of them without a heartbeat
    for watch in group.watches:
        watch.start().beat(3)
        watch._wait_for_round()
    group.watches[2]._stop()  # as if killed
    group.watches[0].hurry()
    group.wait(2)
    for message in group.ended.values():
        found = re.match(r"rank 2 on node2 \(last step 3\) is gone: no heartbeat for (\d+\.\d) s", message)
        assert found is not None, message
        assert float(found[1]) < 5


# ---- real processes

DEADLINE = 4.0
LONG_DEADLINE = 20.0  # where nobody should need it
HURT_AT = 5  # step


def train(rank: int, world_size: int, folder: str, fault: str, victim: int) -> None:
    """A loop with a collective in each step; the victim comes to grief at a step."""
    os.dup2(os.open(f"{folder}/stderr{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    deadline = LONG_DEADLINE if fault in ("raise", "none") else DEADLINE
    with RankWatchdog.of_group(deadline=deadline, host=f"node{rank}") as watch:
        for step in range(10):
            if rank == victim and step == HURT_AT:
                watch._wait_for_round()  # short steps are not told one by one,
                time.sleep(DEADLINE / 10)  # and are heard a little later
                Path(folder, "hurt").touch()
                if fault == "raise":
                    raise ValueError("the data are odd")
                if fault == "hang":
                    time.sleep(600)
                if fault == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            watch.beat(step)
            dist.all_reduce(torch.ones(1))
            time.sleep(0.02)
    dist.destroy_process_group()


class Job:
    """Three real ranks, which are gone when the block ends."""

    def __init__(self, folder: Path, fault: str, victim: int) -> None:
        self.folder = folder
        self.processes = [
            context().Process(target=train, args=(rank, 3, str(folder), fault, victim)) for rank in range(3)
        ]

    def __enter__(self) -> Job:
        for process in self.processes:
            process.start()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()

    def wait_until_hurt(self) -> None:
        end = time.monotonic() + 120
        while not (self.folder / "hurt").exists():
            assert time.monotonic() < end, "the fault never happened"
            time.sleep(0.02)

    def join(self, rank: int) -> str:
        """What the rank had to say once it ended."""
        # Generous: that it ends at all, though its collective would wait for five minutes, is what is shown.
        self.processes[rank].join(60)
        assert self.processes[rank].exitcode is not None, f"rank {rank} still waits"
        return (self.folder / f"stderr{rank}").read_text()


@pytest.mark.parametrize(
    ("fault", "victim", "says"),
    [
        ("kill", 2, "is gone"),
        pytest.param("raise", 2, "failed: ValueError: the data are odd", marks=pytest.mark.full),
        pytest.param("kill", 0, "is gone", marks=pytest.mark.full),
        pytest.param("stop", 1, "is gone", marks=pytest.mark.full),
        pytest.param("stop", 0, "is gone", marks=pytest.mark.full),
        pytest.param("hang", 1, "has made no progress", marks=pytest.mark.full),
        pytest.param("raise", 0, "failed: ValueError: the data are odd", marks=pytest.mark.full),
    ],
)
def test_every_other_rank_ends_and_names_the_one(tmp_path: Path, fault: str, victim: int, says: str) -> None:
    with Job(tmp_path, fault, victim) as job:
        job.wait_until_hurt()
        for rank in {0, 1, 2} - {victim}:
            text = job.join(rank)
            assert f"rank {victim} on node{victim} (last step {HURT_AT - 1}) {says}" in text, text
            assert job.processes[rank].exitcode == 1
        if fault == "stop":
            assert job.processes[victim].is_alive()
            os.kill(job.processes[victim].pid, signal.SIGCONT)
        text = job.join(victim)  # also the one that was late or stopped ends when it can
        assert job.processes[victim].exitcode == (-signal.SIGKILL if fault == "kill" else 1), text
        pids = [process.pid for process in job.processes]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_run_without_faults_ends_well(tmp_path: Path) -> None:
    with Job(tmp_path, "none", 0) as job:
        for rank in range(3):
            assert job.join(rank) == ""
        assert [process.exitcode for process in job.processes] == [0, 0, 0]
