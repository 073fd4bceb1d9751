"""Data files as plain bytes: every kind, every way, at every place; faults pass or are said, never skipped."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shard_checks as checks
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.errors import ConfigError, DataError, RecordError
from packtrain.core.retries import Unreachable
from packtrain.records.shards import address, decompression
from packtrain.records.shards.data_files import CachedFiles, LocalFiles
from packtrain.records.shards.shard_cache import ShardCache
from packtrain.records.span import Files

SIZE = 600_000
WAYS = ("local", "local, cached", "cached", "copied")
QUICK = (0.001, 0.001)


def files_of(way: str, folder: Path) -> Files:
    if way == "local":
        return LocalFiles()
    cache = ShardCache(folder / "cache", 8 << 20, pauses=QUICK)
    return LocalFiles(cache) if way == "local, cached" else CachedFiles(cache, copy_local=way == "copied")


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", list(checks.PACKERS))
def test_every_kind_is_the_same_bytes_at_every_place(kind: str, way: str, remote: bool, tmp_path: Path) -> None:
    path, whole = tmp_path / "data", checks.content(SIZE)
    packed = checks.PACKERS[kind](whole)
    path.write_bytes(packed)
    file = checks.url(path) if remote else str(path)
    files = pickle.loads(pickle.dumps(files_of(way, tmp_path)))
    places = [(0, 10), (SIZE - 5, 100), (SIZE, 10), (SIZE + 9, 10), (300_000, 70_000), (0, SIZE), (999, 2), (1, 0)]
    for at, length in places:
        with files.plain(file) as plain:
            assert plain.read_at(at, length) == whole[at : at + length]
            if plain.path is not None:
                assert Path(plain.path).read_bytes() == whole
    assert path.read_bytes() == packed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("remote", [False, True])
def test_an_empty_file_is_empty(way: str, remote: bool, tmp_path: Path) -> None:
    path = tmp_path / "empty"
    path.touch()
    with files_of(way, tmp_path).plain(checks.url(path) if remote else str(path)) as plain:
        assert plain.read_at(0, 100) == b""


@given(places=st.lists(st.tuples(st.integers(0, 9_100_000), st.integers(0, 400_000)), max_size=6))
@settings(max_examples=15, deadline=None)
def test_reading_forward_is_reading_anywhere(
    places: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "forward-data"
    whole = checks.content(9_000_000)
    if not path.exists():
        path.write_bytes(whole)
    plain = decompression.ForwardPlain(str(path), address.identify(str(path)))
    for at, length in places:
        assert plain.read_at(at, length) == whole[at : at + length]


def test_reading_forward_starts_over_only_for_what_is_far_behind(tmp_path: Path) -> None:
    (path,) = checks.make_files(tmp_path / "data", 1, 3 * decompression.LOOK_BACK)
    plain = decompression.ForwardPlain(checks.url(path), address.identify(checks.url(path)))
    for at in (0, 1 << 20, 5 << 20, (5 << 20) - decompression.LOOK_BACK // 2):
        plain.read_at(at, 1000)
    assert checks.opens(path) == 1
    plain.read_at(0, 1000)
    assert checks.opens(path) == 2


@pytest.mark.parametrize("seekable", [False, True, "really"])
def test_faults_that_pass_cost_no_byte_and_give_none_twice(seekable: object, tmp_path: Path) -> None:
    (path,) = checks.make_files(tmp_path / "data", 1, SIZE)
    checks.behave(path, fail_at=200_000, times=2, seekable=seekable)
    file = checks.url(path)
    whole = b"".join(address.raw_chunks(file, address.identify(file), QUICK))
    assert whole == path.read_bytes()
    assert checks.opens(path) >= 3, "no fault was met"


def test_faults_that_stay_name_the_file_and_leave_nothing(tmp_path: Path) -> None:
    (path,) = checks.make_files(tmp_path / "data", 1, SIZE)
    checks.behave(path, fail_at=200_000, times=1000)
    cache = ShardCache(tmp_path / "cache", 8 << 20, pauses=QUICK)
    with pytest.raises(OSError, match=path.name), cache.open(checks.url(path)):
        pass
    assert checks.stored(tmp_path / "cache") == []
    checks.behave(path)
    with cache.open(checks.url(path)) as plain:
        assert plain.read_at(0, SIZE) == path.read_bytes()


def test_a_source_that_delivers_too_little_is_not_taken_for_a_short_file(tmp_path: Path) -> None:
    (path,) = checks.make_files(tmp_path / "data", 1, SIZE)
    longer = address.Identity(size=SIZE + 1, stamp=address.identify(str(path)).stamp)
    with pytest.raises(OSError, match=r"600,000 of 600,001|changed"):
        list(address.raw_chunks(str(path), longer, ()))


def test_a_source_that_changes_while_it_is_read_is_not_mixed(tmp_path: Path) -> None:
    (path,) = checks.make_files(tmp_path / "data", 1, SIZE)
    checks.behave(path, fail_at=200_000, times=1)
    file = checks.url(path)
    chunks = address.raw_chunks(file, address.identify(file), QUICK)
    next(chunks)
    path.write_bytes(checks.content(SIZE, seed=7))
    os.utime(path, ns=(1, 1))
    with pytest.raises(OSError, match="changed"):
        list(chunks)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[checks.WebServer]:
    pytest.importorskip("aiohttp")
    monkeypatch.setenv(address.READ_TIMEOUT, "0.3")
    checks.make_files(tmp_path / "web", 1, SIZE)
    with checks.web_server(tmp_path / "web") as served:
        yield served


NAME = "shard-000.bin"


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param([500, 500, 503, 503], id="HEAD and GET of the first look"),
        pytest.param([200, 502, 504], id="GET"),
        pytest.param([429, 408], id="asked to wait"),
        pytest.param(["stall"] * 6, id="stops in the middle"),
        pytest.param(["stall at once", "stall at once"], id="does not answer"),
    ],
)
def test_a_server_that_is_ill_for_a_moment_loses_nothing(server: checks.WebServer, faults: list[int | str]) -> None:
    server.faults[NAME] = list(faults)
    url = server.url(NAME)
    whole = b"".join(address.raw_chunks(url, address.identify(url, (0.001,) * 4), (0.001,) * 4))
    assert whole == (server.folder / NAME).read_bytes()
    assert not server.faults[NAME], "the faults were met"


@pytest.mark.parametrize(
    ("faults", "kind", "said", "asked"),
    [
        pytest.param([503] * 99, Unreachable, "HTTP 503, in each of 3 attempts", 6, id="503"),
        pytest.param([403] * 99, Unreachable, "access denied, HTTP 403$", 2, id="403"),
        pytest.param([404] * 99, RecordError, "file cannot be read.*HTTP 404", 2, id="404"),
        pytest.param(
            ["stall at once"] * 99, Unreachable, r"nothing for 0\.3 s.*, in each of 3 attempts", 6, id="silent"
        ),
        pytest.param(["stall"] * 99, Unreachable, r"nothing for 0\.3 s", 9, id="stalls"),
    ],
)
def test_a_server_that_stays_ill_ends_in_words(
    server: checks.WebServer, faults: list[int | str], kind: type[Exception], said: str, asked: int
) -> None:
    server.faults[NAME] = list(faults)
    url = server.url(NAME)
    with pytest.raises(kind, match=said) as caught:
        list(address.raw_chunks(url, address.identify(url, QUICK), QUICK))
    assert url in str(caught.value)
    assert len(server.requests) == asked


def test_a_port_where_nobody_listens_is_unreachable_and_not_missing(server: checks.WebServer) -> None:
    url = server.url(NAME)
    server.shutdown()
    server.server_close()
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1.*, in each of 3 attempts"):
        address.identify(url, QUICK)
    with pytest.raises(DataError, match="check the server"):
        address.remote_state(url, QUICK)


def test_settings_of_fsspec_stay_beside_our_timeout(server: checks.WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setitem(fsspec.config.conf, "http", {"client_kwargs": {"headers": {"X-Token": "secret"}}})
    system, _ = address.file_system(server.url(NAME))
    assert system.client_kwargs["headers"] == {"X-Token": "secret"}
    assert system.client_kwargs["timeout"].sock_read == 0.3
    monkeypatch.setenv(address.READ_TIMEOUT, "soon")
    with pytest.raises(ConfigError, match="a number of seconds"):
        address.file_system(server.url(NAME))


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["gzip", "zstd", "two gzip members", "two zstd frames"])
@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (flipped, decompression.DAMAGED),
        (lambda data: data[:-3], decompression.CUT_OFF),
        (lambda data: data[: len(data) // 2], decompression.CUT_OFF),
        (lambda data: data + b"more", decompression.DAMAGED),
    ],
    ids=["flipped", "without its end", "half", "with more"],
)
def test_damage_is_an_error_that_names_the_file(
    harm: Callable[[bytes], bytes], reason: str, kind: str, way: str, tmp_path: Path
) -> None:
    path = tmp_path / "data"
    path.write_bytes(harm(checks.PACKERS[kind](checks.content(SIZE))))
    with pytest.raises(RecordError) as caught, files_of(way, tmp_path).plain(str(path)) as plain:
        plain.read_at(0, SIZE + 1)  # to the end: what is read forward is verified only there
    assert caught.value.reason == reason
    assert str(path) in caught.value.detail
    if way != "local":
        assert checks.stored(tmp_path / "cache") == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("remote", [False, True])
def test_a_missing_file_is_said(way: str, remote: bool, tmp_path: Path) -> None:
    path = tmp_path / "nothing.tar"
    with (
        pytest.raises(RecordError, match=r"file cannot be read.*nothing\.tar"),
        files_of(way, tmp_path).plain(checks.url(path) if remote else str(path)),
    ):
        pass


@pytest.mark.parametrize("way", WAYS)
def test_a_pipe_is_refused_and_not_waited_for(way: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RecordError, match="not a regular file"), files_of(way, tmp_path).plain(str(tmp_path / "pipe")):
        pass


def test_a_small_file_that_expands_enormously_is_read_in_small_blocks(tmp_path: Path) -> None:
    path = tmp_path / "zeros"
    for packed in (gzip.compress(bytes(64 << 20)), zstandard.ZstdCompressor().compress(bytes(64 << 20))):
        path.write_bytes(packed)
        blocks = decompression.decompress(str(path), address.identify(str(path)), ())
        sizes = [len(block) for block in blocks]
        assert sum(sizes) == 64 << 20
        assert max(sizes) <= decompression.BLOCK


def table_bytes(kind: str) -> bytes:
    table, buffer = pa.table({"text": [f"row {n}" for n in range(1000)]}), io.BytesIO()
    if kind == "parquet":
        pq.write_table(table, buffer)
    else:
        with (
            pa.ipc.new_file(buffer, table.schema) if kind == "arrow" else pa.ipc.new_stream(buffer, table.schema) as out
        ):
            out.write_table(table)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow stream"])
def test_a_table_without_a_place_on_disk_is_held_in_memory_up_to_a_limit(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_bytes(table_bytes(kind))
    file, size = checks.url(path), path.stat().st_size
    with ShardCache(tmp_path / "cache", 100).open(file) as plain:
        assert plain.read_at(0, size) == path.read_bytes()
        assert plain.path is not None
        assert Path(plain.path).read_bytes() == path.read_bytes()
        if kind == "parquet":
            assert pq.read_table(plain.path).num_rows == 1000
    small = ShardCache(tmp_path / "cache", 100, memory_bytes=size - 1)
    with pytest.raises(RecordError, match="larger budget"), small.open(file):
        pass


def test_the_index_of_a_gzip_file_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from packtrain.records.shards.data_files import IndexedGzip

    (path,) = checks.make_files(tmp_path / "data", 1, SIZE, "gzip")
    with LocalFiles(ShardCache(tmp_path / "cache", 8 << 20)).plain(str(path)) as plain:
        assert plain.read_at(5, 5) == checks.content(SIZE)[5:10]
    assert len(checks.stored(tmp_path / "cache", ".ready")) == 1
    monkeypatch.setattr(IndexedGzip, "_build", lambda self: pytest.fail("made again"))
    with LocalFiles(ShardCache(tmp_path / "cache", 8 << 20)).plain(str(path)) as plain:
        assert plain.read_at(SIZE - 5, 50) == checks.content(SIZE)[-5:]


GONE = """
import os, sys
from packtrain.core.errors import RecordError
from packtrain.records.shards.shard_cache import ShardCache
from packtrain.records.shards.data_files import LocalFiles

path, how = sys.argv[1:]
files = LocalFiles()
with files.plain(path) as plain:
    plain.read_at(0, 10)
    os.unlink(path) if how == "removed" else os.truncate(path, 0 if how == "emptied" else os.path.getsize(path) // 2)
    if how == "emptied inside a read":
        plain._stored.whole = lambda: True
        os.truncate(path, 0)
    try:
        print(len(plain.read_at(200_000, 10)))
    except (RecordError, OSError) as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [("removed", "10"), ("emptied", "cut off"), ("halved", "cut off"), ("emptied inside a read", "READ_FAIL")],
)
def test_a_gzip_file_that_vanishes_while_it_is_read(how: str, said: str, tmp_path: Path) -> None:
    """In a process of its own: left to itself, indexed_gzip crashes or goes on for ever."""
    (path,) = checks.make_files(tmp_path / "data", 1, SIZE, "gzip")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", GONE, str(path), how]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout


def test_a_damaged_index_is_made_again(tmp_path: Path) -> None:
    (path,) = checks.make_files(tmp_path / "data", 1, SIZE, "gzip")
    for _ in range(2):
        with LocalFiles(ShardCache(tmp_path / "cache", 8 << 20)).plain(str(path)) as plain:
            assert plain.read_at(SIZE - 5, 50) == checks.content(SIZE)[-5:]
        (name,) = checks.stored(tmp_path / "cache", ".ready") or ("",)
        if name:
            kept = tmp_path / "cache" / name
            kept.write_bytes(flipped(kept.read_bytes()))


def test_gzip_without_the_package_goes_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.records.shards.data_files.indexed_gzip", lambda: None)
    (path,) = checks.make_files(tmp_path / "data", 1, SIZE, "gzip")
    with LocalFiles(ShardCache(tmp_path / "cache", 8 << 20)).plain(str(path)) as plain:
        assert plain.path is not None
        assert plain.read_at(0, SIZE) == checks.content(SIZE)


def test_urls_that_nothing_can_read_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nosuch"), LocalFiles().plain("nosuch://a/b"):
        pass
