"""Remote sources are measured as the same files would be locally; what is missing or damaged is said."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import shard_checks as checks
import zstandard

from packtrain.core.errors import ConfigError, DataError
from packtrain.records import remote_files as remote
from packtrain.records.open import count_unit, iter_units, open_sources, read_place, read_unit, recognise
from packtrain.records.shards import address, decompression
from packtrain.records.shards import shard_cache as cache_module

ROWS = [{"id": f"r{n}", "text": "x" * n} for n in range(3000)]


def lines() -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)


def table(kind: str) -> bytes:
    buffer, data = io.BytesIO(), pa.Table.from_pylist(ROWS)
    if kind == "parquet":
        pq.write_table(data, buffer, row_group_size=1000)
    else:
        with pa.ipc.new_file(buffer, data.schema) as out:
            out.write_table(data, 500)
    return buffer.getvalue()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number, row in enumerate(ROWS[:50]):
            for ending, data in (("json", json.dumps(row).encode()), ("png", bytes([number]) * 700)):
                member = tarfile.TarInfo(f"a/{number:04d}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


MADE = {
    "jsonl": lines,
    "jsonl.gz": lambda: gzip.compress(lines()),
    "jsonl.zst": lambda: zstandard.compress(lines()),
    "json": lambda: json.dumps(ROWS).encode(),
    "parquet": lambda: table("parquet"),
    "arrow": lambda: table("arrow"),
    "tar": tar,
    "tar.gz": lambda: gzip.compress(tar()),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(remote.FOLDER, str(tmp_path / "shard-cache"))
    monkeypatch.setenv(remote.BYTES, str(64 << 20))


def entries(path: str, **options: Any) -> list[tuple[object, ...]]:
    """Everything that is read from a source, with media as bytes."""
    specs = open_sources(path, **options)
    found = []
    for unit in iter_units(specs):
        before = len(found)
        for entry in read_unit(specs, unit):
            media = {}
            for key, ref in entry.media.items():
                data = ref.data
                if data is None:
                    assert ref.archive is not None
                    data = Path(ref.archive).read_bytes()[ref.offset : ref.offset + ref.size]
                media[key] = (ref.name, data)
            error = entry.error and (entry.error.stage, entry.error.reason)
            # Of a remote shard media are part of the check: they are damaged on their way like texts.
            check = (entry.check != 0) if media else entry.check
            found.append((entry.origin, entry.value, error, media, entry.at, check))
        assert len(found) - before == count_unit(specs, unit)
    return found


@pytest.mark.parametrize("ending", list(MADE))
def test_a_remote_file_gives_the_entries_of_a_local_one(ending: str, tmp_path: Path) -> None:
    path = tmp_path / "data" / f"shard.{ending}"
    path.parent.mkdir()
    path.write_bytes(MADE[ending]())
    remote = entries(checks.url(path))
    assert remote == entries(str(path))
    assert len(remote) >= 50
    assert checks.opens(path) == 2, "looked at once, fetched once"


@pytest.mark.parametrize("pattern", ["shard-{00..02}.jsonl", "shard-*.jsonl", "*", "", "shard-0?.jsonl"])
def test_patterns_and_folders_name_the_same_files_as_locally(pattern: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        (folder / f"shard-{number:02d}.jsonl").write_text(json.dumps({"id": number, "text": "a"}) + "\n")
    local = f"{folder}/{pattern}" if pattern else str(folder)
    checks.register()
    expected = entries(local)
    found = entries(f"forward://{local}")
    assert found == expected
    assert [origin for origin, *_ in found] == [f"shard-{number:02d}.jsonl:1" for number in range(3)]
    assert open_sources(f"forward://{local}")[0].name == open_sources(local)[0].name


def test_a_missing_shard_is_an_entry_that_says_so(tmp_path: Path) -> None:
    checks.register()
    for number in (1, 3):
        (tmp_path / f"s-{number}.jsonl").write_text(json.dumps({"text": "a"}) + "\n")
    found = entries(f"forward://{tmp_path}/s-{{0..3}}.jsonl")
    assert [(origin, error) for origin, _, error, *_ in found] == [
        ("s-0.jsonl", ("read", address.CANNOT_OPEN)),
        ("s-1.jsonl:1", None),
        ("s-2.jsonl", ("read", address.CANNOT_OPEN)),
        ("s-3.jsonl:1", None),
    ]


def test_a_damaged_shard_is_an_entry_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl.gz"
    path.write_bytes(gzip.compress(lines())[:-9])
    assert [(origin, error) for origin, _, error, *_ in entries(checks.url(path))] == [
        ("s.jsonl.gz", ("read", decompression.CUT_OFF))
    ]


@pytest.mark.parametrize("name", ["nothing.jsonl", "nothing-{0..2}.jsonl", "nothing-*.jsonl", "nothing"])
def test_nothing_at_all_is_a_config_error(name: str, tmp_path: Path) -> None:
    checks.register()
    with pytest.raises(ConfigError, match="which does not exist"):
        open_sources(f"forward://{tmp_path}/{name}")


def test_a_folder_of_several_formats_must_be_told_apart(tmp_path: Path) -> None:
    checks.register()
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "b.tar", "settings.json"):
        (tmp_path / "data" / name).write_text(json.dumps({"text": "a"}) + "\n")
    with pytest.raises(ConfigError, match="jsonl, webdataset"):
        open_sources(f"forward://{tmp_path}/data")
    assert len(entries(f"forward://{tmp_path}/data", format="jsonl")) == 1


def test_content_decides_over_names(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(lines())
    assert recognise(checks.url(path)) == recognise(str(path)) == "jsonl"


def test_a_shard_that_the_budget_cannot_hold_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(lines())
    monkeypatch.setenv(remote.BYTES, "1000")
    with pytest.raises(DataError, match="larger budget"):
        entries(checks.url(path))


def test_a_server_that_fails_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s.jsonl"
    path.write_bytes(lines())
    specs = open_sources(checks.url(path))
    checks.behave(path, fail_at=1000, times=10**6)
    monkeypatch.setattr(cache_module.ShardCache, "_order", _impatient(cache_module.ShardCache._order))
    with pytest.raises(DataError, match=r"s\.jsonl"):
        list(read_unit(specs, next(iter_units(specs))))


def _impatient(order: Any) -> Any:
    def made(self: Any, *arguments: Any) -> Any:
        self._pauses = ()
        return order(self, *arguments)

    return made


def test_a_copy_stays_while_its_entries_are_read_whoever_needs_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for number in range(2):
        paths.append(tmp_path / f"s-{number}.jsonl")
        paths[-1].write_bytes(lines())
    monkeypatch.setenv(remote.BYTES, str(os.path.getsize(paths[0]) + 10))
    monkeypatch.setattr(cache_module.ShardCache.copy.__wrapped__, "__defaults__", (0.2,))
    specs = open_sources(f"forward://{tmp_path}/s-*.jsonl")
    first, second = iter_units(specs)
    reading = read_unit(specs, first)
    next(reading)
    with pytest.raises(DataError, match="fewer workers"):
        list(read_unit(specs, second))
    assert len(list(reading)) == len(ROWS) - 1
    assert len(list(read_unit(specs, second))) == len(ROWS)


def test_a_shard_of_a_server_that_is_ill_for_a_moment_is_measured_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "d.jsonl").write_bytes(lines())
    monkeypatch.setenv(remote.FOLDER, str(tmp_path / "cache"))
    with checks.web_server(tmp_path / "web") as server:
        specs = open_sources(server.url("d.jsonl"), format="jsonl")
        server.faults["d.jsonl"] = [500, 500]
        entries = [entry for unit in iter_units(specs) for entry in read_unit(specs, unit)]
        assert [entry.value for entry in entries] == ROWS
        assert server.faults["d.jsonl"] == []
    again = open_sources("http://127.0.0.1:1/d.jsonl", format="jsonl")
    monkeypatch.setattr(cache_module.ShardCache, "_identity", lambda self, file: address.identify(file, ()))
    with pytest.raises(DataError, match="check the server"):
        [entry for unit in iter_units(again) for entry in read_unit(again, unit)]


@pytest.mark.parametrize("packed", [False, True])
def test_media_of_a_remote_shard_are_part_of_its_checks(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("s.tar.gz" if packed else "s.tar")
    path.write_bytes(gzip.compress(tar()) if packed else tar())
    specs = open_sources(checks.url(path))
    (unit,) = iter_units(specs)
    measured = list(read_unit(specs, unit))
    other = tar().replace(bytes([7]) * 700, bytes([7]) * 699 + b"x")
    for content, same in ((tar(), True), (other, False)):
        plain = checks.content_plain(content)
        found = [read_place(specs, 0, unit.file, plain, entry.at, entry.origin) for entry in measured]
        assert [entry.check == was.check for entry, was in zip(found, measured, strict=True)].count(False) == (not same)
        assert found[7].check == measured[7].check or not same
