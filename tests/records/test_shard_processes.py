"""The shard cache over several processes: the budget at every moment, deaths at any moment, one fetch for all."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import shard_checks as checks

from packtrain.records.shards.cache_folder import file_address
from packtrain.records.shards.shard_cache import ShardCache

SIZE = 3_000_000
BUDGET = 7_000_000  # two files, and a third in the making


@pytest.fixture(params=["zstd", pytest.param("plain", marks=pytest.mark.full)])
def paths(request: pytest.FixtureRequest, tmp_path: Path) -> list[Path]:
    return checks.make_files(tmp_path / "data", 5, SIZE, request.param)


def churners(folder: Path, paths: list[Path], rounds: int) -> list[subprocess.Popen[str]]:
    files = [checks.url(path) for path in paths]
    return [checks.start("churn", folder, BUDGET, seed, rounds, SIZE, *files) for seed in range(4)]


def assert_sound(folder: Path) -> None:
    """Nothing is left of the dead: no part, no member, and what is there is within the budget."""
    assert checks.stored(folder, ".part") == []
    assert [name for name in os.listdir(folder) if name.endswith(".member")] == []
    assert sum(os.path.getsize(folder / name) for name in checks.stored(folder)) <= BUDGET


def test_the_budget_holds_at_every_moment(tmp_path: Path, paths: list[Path]) -> None:
    folder, before = tmp_path / "cache", checks.hashes(paths)
    ShardCache(folder, BUDGET)
    with checks.Watcher(checks.bytes_under_lock(folder, BUDGET)) as watcher:
        direct = [int(checks.finish(process)) for process in churners(folder, paths, 12)]
    assert watcher.most <= BUDGET
    assert watcher.most > BUDGET / 2, "the cache was hardly used"
    assert watcher.looks > 100
    assert sum(direct) < 4 * 12, "nothing was read from the cache"
    assert sum(map(checks.opens, paths)) > len(paths), "nothing was evicted"
    assert checks.hashes(paths) == before
    ShardCache(folder, BUDGET).done([])
    assert checks.stored(folder, ".part") == []


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk whose use the system counts, files that are deleted but open included."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", folder], capture_output=True, text=True
        )
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting is not permitted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def used_on_disk(folder: Path) -> Callable[[], int]:
    def measure() -> int:
        state = os.statvfs(folder)
        return (state.f_blocks - state.f_bfree) * state.f_frsize

    return measure


def test_the_budget_holds_as_the_system_counts_it(own_disk: Path, tmp_path: Path) -> None:
    paths = checks.make_files(tmp_path / "data", 5, SIZE, "zstd")
    with checks.Watcher(used_on_disk(own_disk)) as watcher:
        for process in churners(own_disk / "cache", paths, 12):
            checks.finish(process)
    beside = 64 << 10  # pages that are not full, and the files of members
    assert BUDGET / 2 < watcher.most <= BUDGET + beside
    assert watcher.looks > 100


def test_one_of_several_is_killed_while_it_fetches(tmp_path: Path, paths: list[Path]) -> None:
    folder = tmp_path / "cache"
    checks.behave(paths[0], latency=0.1)
    victim = checks.start("read", folder, BUDGET, checks.url(paths[0]))
    checks.wait_until(lambda: folder.exists() and bool(checks.stored(folder, ".part")), "a fetch")
    waiting = checks.start("read", folder, BUDGET, checks.url(paths[0]))
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "begins\n"
    time.sleep(0.1)
    assert checks.stored(folder, ".part"), "the fetch was over before it could be killed"
    victim.kill()
    victim.wait()
    checks.behave(paths[0])
    assert checks.finish(waiting).endswith("True\n"), "who waited for the dead did not fetch on its own"
    assert_sound(folder)


def test_all_are_killed_in_the_middle(tmp_path: Path, paths: list[Path]) -> None:
    folder = tmp_path / "cache"
    for path in paths:
        checks.behave(path, latency=0.2)  # a fetch lasts longer than killing takes
    processes = churners(folder, paths, 1000)
    checks.wait_until(lambda: folder.exists() and len(checks.stored(folder, ".part")) > 1, "several fetches")
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
    assert checks.stored(folder, ".part"), "nobody was killed in the middle of a fetch"
    assert any(name.endswith(".member") for name in os.listdir(folder))
    for path in paths:
        checks.behave(path)
    with checks.Watcher(checks.bytes_under_lock(folder, BUDGET)) as watcher:
        cache = ShardCache(folder, BUDGET)
        for path, whole in zip(paths, (checks.content(SIZE, seed=at) for at in range(5)), strict=True):
            with cache.open(checks.url(path)) as plain:
                assert plain.path is not None
                assert plain.read_at(0, SIZE + 1) == whole
        cache.want([])
        cache.close()
    assert watcher.most <= BUDGET
    assert_sound(folder)


def test_who_wants_and_reads_is_forgotten_when_killed(tmp_path: Path, paths: list[Path]) -> None:
    folder, files = tmp_path / "cache", [checks.url(path) for path in paths]
    holders = [checks.start("hold", folder, BUDGET, file) for file in files[:2]]
    for holder in holders:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
    cache = ShardCache(folder, BUDGET, pauses=())
    with cache.open(files[2]) as plain:
        assert plain.path is None, "what another process reads was evicted"
    cache.done(files)
    assert len(checks.stored(folder, ".ready")) == 2
    for holder in holders:
        holder.kill()
        holder.communicate()
    cache.done(files)
    assert checks.stored(folder) == [], "the dead still want or read"
    cache.close()
    assert_sound(folder)


def test_processes_that_want_the_same_fetch_it_once(tmp_path: Path, paths: list[Path]) -> None:
    checks.behave(paths[0], latency=0.02)
    processes = [checks.start("read", tmp_path / "cache", BUDGET, checks.url(paths[0])) for _ in range(3)]
    said = {checks.finish(process) for process in processes}
    assert len(said) == 1
    assert said.pop().endswith("True\n")
    assert checks.opens(paths[0]) == 1


def test_a_fork_leaves_locks_and_threads_to_its_parent(tmp_path: Path, paths: list[Path]) -> None:
    folder, files = tmp_path / "cache", [checks.url(path) for path in paths]
    cache = ShardCache(folder, BUDGET, pauses=())
    checks.behave(paths[1], latency=0.01)
    context = multiprocessing.get_context("fork")
    told, answers = context.Queue(), context.Queue()

    def child() -> None:
        with cache.open(files[0]) as plain:
            answers.put(plain.read_at(7, 5))
        cache.want(files[:1])
        answers.put("wants")
        told.get()

    cache.want(files[:2])
    with cache.open(files[0]) as plain:
        checks.wait_until(lambda: bool(checks.stored(folder, ".part")), "a fetch by the thread")
        process = context.Process(target=child)
        process.start()
        assert answers.get(timeout=30) == plain.read_at(7, 5)
        assert answers.get(timeout=30) == "wants"
    try:
        cache.want([])
        cache.close()
        checks.wait_until(lambda: not checks.stored(folder, ".part"), "the end of the parent's fetch")
        kept = [name for name in checks.stored(folder) if name.startswith(file_address(files[0]))]
        assert kept, "what the child wants was deleted"
        other = ShardCache(folder, SIZE + 1000, pauses=())
        with other.open(files[2]) as plain:
            assert plain.path is not None, "a copy of the parent's lock lives on in its child"
    finally:
        told.put("end")
        process.join()
    assert process.exitcode == 0
