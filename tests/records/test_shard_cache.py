"""The shard cache in one process: what is kept, evicted and fetched ahead, and what happens where nothing can be."""

from __future__ import annotations

import errno
import gc
import os
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import shard_checks as checks

from packtrain.core.errors import ConfigError
from packtrain.records.shards import cache_folder as folder_module
from packtrain.records.shards import shard_cache as cache_module
from packtrain.records.shards.cache_folder import file_address
from packtrain.records.shards.shard_cache import ShardCache

SIZE = 100_000


def is_cached(cache: ShardCache, path: Path) -> bool:
    return any(name.startswith(file_address(checks.url(path))) for name in checks.stored(Path(cache.folder), ".ready"))


def look(cache: ShardCache, path: Path) -> bool:
    """Read a file; was it from the cache?"""
    with cache.open(checks.url(path)) as plain:
        assert plain.read_at(0, SIZE + 1) == path.read_bytes()
        return plain.path is not None


def set_last_use(cache: ShardCache, path: Path, seconds: float) -> None:
    (name,) = [name for name in os.listdir(cache.folder) if name.startswith(file_address(checks.url(path)))]
    os.utime(os.path.join(cache.folder, name), (seconds, seconds))


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    return checks.make_files(tmp_path / "data", 6, SIZE)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[ShardCache]:
    made = ShardCache(tmp_path / "cache", 3 * SIZE, pauses=())
    yield made
    made.close()


def test_a_file_is_fetched_once_and_found_again(cache: ShardCache, paths: list[Path]) -> None:
    assert all(look(cache, paths[0]) for _ in range(3))
    assert look(pickle.loads(pickle.dumps(cache)), paths[0])
    assert checks.opens(paths[0]) == 1


def test_a_changed_source_is_fetched_again_and_its_old_content_removed(cache: ShardCache, paths: list[Path]) -> None:
    assert look(cache, paths[0])
    paths[0].write_bytes(checks.content(SIZE, seed=99))
    os.utime(paths[0], ns=(5, 5))
    assert look(pickle.loads(pickle.dumps(cache)), paths[0])
    assert len(checks.stored(Path(cache.folder))) == 1


def test_evicts_what_was_unused_longest(cache: ShardCache, paths: list[Path]) -> None:
    for age, path in zip((30, 10, 20), paths, strict=False):
        assert look(cache, path)
        set_last_use(cache, path, 1000 - age)
    assert look(cache, paths[3])
    assert [is_cached(cache, path) for path in paths[:4]] == [False, True, True, True]


def test_evicts_what_nobody_wants_first(cache: ShardCache, paths: list[Path]) -> None:
    other = pickle.loads(pickle.dumps(cache))
    for path in paths[:3]:
        assert look(cache, path)
    for age, path in zip((30, 10, 20), paths, strict=False):
        set_last_use(cache, path, 1000 - age)
    other.want([checks.url(paths[0])])
    assert look(cache, paths[3])
    assert [is_cached(cache, path) for path in paths[:4]] == [True, True, False, True]
    other.close()


def test_an_open_file_is_never_evicted_and_nobody_waits_for_it(cache: ShardCache, paths: list[Path]) -> None:
    other = pickle.loads(pickle.dumps(cache))
    with other.open(checks.url(paths[0])) as plain:
        set_last_use(cache, paths[0], 0)
        for path in paths[1:4]:
            assert look(cache, path)
        assert plain.path is not None
        assert Path(plain.path).read_bytes() == paths[0].read_bytes()
        with other.open(checks.url(paths[4])), other.open(checks.url(paths[5])):
            assert not look(cache, paths[1]), "there was no room, so it had to be read directly"


def test_the_cache_is_tried_again(cache: ShardCache, paths: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "NO_ROOM_REST", (0.0, 0.0))
    other = pickle.loads(pickle.dumps(cache))
    with (
        other.open(checks.url(paths[0])),
        other.open(checks.url(paths[1])),
        other.open(checks.url(paths[2])),
    ):
        assert not look(cache, paths[3])
    assert look(cache, paths[3])


def test_an_idle_open_file_takes_no_space_once_it_is_evicted(cache: ShardCache, paths: list[Path]) -> None:
    assert look(cache, paths[0])
    fd = next(iter(cache._handles._slots.values())).handle._fd  # type: ignore[attr-defined]
    other = pickle.loads(pickle.dumps(cache))
    set_last_use(cache, paths[0], 0)
    for path in paths[1:4]:
        assert look(other, path)
    assert os.fstat(fd).st_nlink == 0, "it was not evicted"
    assert os.fstat(fd).st_size == 0
    assert look(cache, paths[0])


def test_a_file_larger_than_the_budget_is_read_directly_and_evicts_nothing(tmp_path: Path, paths: list[Path]) -> None:
    small = ShardCache(tmp_path / "small", 2 * SIZE)
    assert look(small, paths[0])
    large = tmp_path / "large"
    large.write_bytes(checks.content(2 * SIZE + 1))
    with small.open(checks.url(large)) as plain:
        assert plain.path is None
        assert plain.read_at(2 * SIZE - 5, 100) == large.read_bytes()[-6:]
    assert is_cached(small, paths[0])


@pytest.mark.parametrize("kind", ["gzip", "zstd"])
def test_a_file_that_decompresses_to_more_than_the_budget_is_read_directly(kind: str, tmp_path: Path) -> None:
    (path,) = checks.make_files(tmp_path / "packed", 1, 2_000_000, kind)
    budget = path.stat().st_size + 100_000
    assert budget < 2_000_000
    cache = ShardCache(tmp_path / "cache", budget)
    measure = checks.bytes_under_lock(tmp_path / "cache", budget)
    with checks.Watcher(measure) as watcher, cache.open(checks.url(path)) as plain:
        assert plain.path is None
        assert plain.read_at(1_500_000, 50) == checks.content(2_000_000)[1_500_000:1_500_050]
    assert watcher.most <= budget
    assert checks.stored(tmp_path / "cache") == []


def test_wanted_files_are_fetched_ahead_in_order_as_far_as_there_is_room(cache: ShardCache, paths: list[Path]) -> None:
    cache.want([checks.url(path) for path in paths])
    checks.wait_until(lambda: len(checks.stored(Path(cache.folder), ".ready")) == 3, "three files")
    assert [is_cached(cache, path) for path in paths] == [True] * 3 + [False] * 3
    cache.done([checks.url(paths[0])])
    checks.wait_until(lambda: is_cached(cache, paths[3]), "the next file")
    assert [is_cached(cache, path) for path in paths] == [False, True, True, True, False, False]
    assert sum(map(checks.opens, paths[4:])) == 0, "fetched without room"


def test_what_nobody_wants_any_more_is_deleted_at_once(cache: ShardCache, paths: list[Path]) -> None:
    other = pickle.loads(pickle.dumps(cache))
    files = [checks.url(path) for path in paths[:2]]
    cache.want(files)
    other.want(files[:1])
    checks.wait_until(lambda: len(checks.stored(Path(cache.folder), ".ready")) == 2, "two files")
    cache.done(files)
    assert [is_cached(cache, path) for path in paths[:2]] == [True, False]
    other.want([])
    assert checks.stored(Path(cache.folder)) == []
    other.close()


def test_a_fetch_ahead_ends_when_its_file_is_not_wanted_any_more(cache: ShardCache, paths: list[Path]) -> None:
    checks.behave(paths[0], latency=0.02, chunk=1000)
    cache.want([checks.url(paths[0])])
    checks.wait_until(lambda: bool(checks.stored(Path(cache.folder), ".part")), "the fetch")
    cache.want([])
    checks.wait_until(lambda: not checks.stored(Path(cache.folder)), "its end", seconds=1.5)


def test_a_source_that_cannot_be_fetched_ahead_is_left_to_its_reader(cache: ShardCache, paths: list[Path]) -> None:
    checks.behave(paths[0], fail_at=10, times=1)
    cache.want([checks.url(path) for path in paths[:2]])
    checks.wait_until(lambda: is_cached(cache, paths[1]), "the second file")
    assert not is_cached(cache, paths[0])
    assert look(cache, paths[0])


def test_two_threads_fetch_a_file_once(cache: ShardCache, paths: list[Path]) -> None:
    checks.behave(paths[0], latency=0.01, chunk=10_000)
    threads = [threading.Thread(target=look, args=(cache, paths[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert checks.opens(paths[0]) == 1


def test_a_fetch_that_stands_still_is_not_waited_for(tmp_path: Path, paths: list[Path]) -> None:
    cache = ShardCache(tmp_path / "cache", 3 * SIZE, patience=0.2)
    found = cache._folder.claim(cache_module.entry_key(checks.url(paths[0]), cache._identity(checks.url(paths[0]))))
    assert isinstance(found, folder_module.Writing)
    assert not look(ShardCache(tmp_path / "cache", 3 * SIZE, patience=0.2), paths[0])


def test_a_disk_that_is_full_is_said_once_and_tried_again(
    cache: ShardCache, paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> None:
        os.write(fd, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "write_all", full)
        patch.setattr(cache_module, "FAULT_REST", (0.0, 0.0))
        with pytest.warns(UserWarning, match="No space left") as said:
            kept = [look(cache, path) for path in paths[:2]]
        assert kept == [False, False]
        assert len(said) == 1
        assert checks.stored(Path(cache.folder)) == [], "half a file was left on a full disk"
    assert look(cache, paths[0])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with checks.small_disk(tmp_path / "disk", "1m") as folder:
        yield folder


def test_a_disk_that_is_really_full(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "FAULT_REST", (0.0, 0.0))
    paths = checks.make_files(tmp_path / "data", 3, 500_000, "zstd")
    cache = ShardCache(small_disk / "cache", 100 << 20)
    whole = [checks.content(500_000, seed=at) for at in range(3)]

    def from_cache(at: int) -> bool:
        with cache.open(checks.url(paths[at])) as plain:
            assert plain.read_at(0, 500_001) == whole[at]
            return plain.path is not None

    assert from_cache(0)
    (small_disk / "other").write_bytes(bytes(400_000))
    with pytest.warns(UserWarning, match="No space left"):
        kept = [from_cache(1), from_cache(2)]
    assert kept == [False, False]
    assert len(checks.stored(small_disk / "cache")) == 1
    (small_disk / "other").unlink()
    assert from_cache(1)


def test_a_full_disk_from_the_beginning_is_no_reason_to_fail(small_disk: Path, tmp_path: Path) -> None:
    (path,) = checks.make_files(tmp_path / "data", 1, SIZE)
    os.mkdir(small_disk / "cache")
    with pytest.raises(OSError, match="No space"):
        (small_disk / "other").write_bytes(bytes(2 << 20))
    cache = ShardCache(small_disk / "cache", 100 << 20)
    with pytest.warns(UserWarning, match="No space left"):
        assert not look(cache, path)
    cache.want([checks.url(path)])
    cache.close()


def test_a_folder_on_a_disk_that_may_only_be_read_is_no_reason_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", path)

    (path,) = checks.make_files(tmp_path / "data", 1, SIZE)
    monkeypatch.setattr(os, "makedirs", refuse)
    with pytest.warns(UserWarning, match="Read-only file system"):
        cache = ShardCache(tmp_path / "cache", 100 << 20)
    assert not look(cache, path)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path, paths: list[Path]) -> None:
    before = checks.hashes(paths)
    with pytest.raises(ConfigError, match="shard-000"):
        ShardCache(paths[0].parent, 10**9)
    assert checks.hashes(paths) == before
    cache = ShardCache(tmp_path / "cache", 10**9)
    (tmp_path / "cache" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"notes\.txt"):
        ShardCache(tmp_path / "cache", 10**9)
    assert look(cache, paths[0])
    assert (tmp_path / "cache" / "notes.txt").read_text() == "mine"


def test_a_link_in_the_folder_is_refused(tmp_path: Path, paths: list[Path]) -> None:
    cache = ShardCache(tmp_path / "cache", 10**9)
    assert look(cache, paths[0])
    (name,) = checks.stored(tmp_path / "cache")
    (tmp_path / "cache" / name).unlink()
    (tmp_path / "cache" / name).symlink_to(paths[0])
    with pytest.raises(ConfigError, match="not from a shard cache"):
        ShardCache(tmp_path / "cache", 10**9)
    assert paths[0].stat().st_size == SIZE


def test_a_smaller_budget_holds_from_the_beginning(tmp_path: Path, paths: list[Path]) -> None:
    first = ShardCache(tmp_path / "cache", 3 * SIZE)
    for path in paths[:3]:
        assert look(first, path)
    first.close()
    ShardCache(tmp_path / "cache", SIZE)
    assert len(checks.stored(tmp_path / "cache")) == 1


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_must_be_positive(budget: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache budget"):
        ShardCache(tmp_path / "cache", budget)


def test_a_folder_that_cannot_be_made_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cache folder"):
        ShardCache(tmp_path / "file" / "cache", 1000)


def test_what_a_forgotten_cache_had_open_is_closed(tmp_path: Path, paths: list[Path]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in range(5):
        look(ShardCache(tmp_path / f"cache-{number}", 3 * SIZE), paths[0])
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
