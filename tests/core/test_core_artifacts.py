"""Artifacts, fingerprints, seeds and errors: whole files or none, and differences that are named."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from packtrain.core.artifacts import (
    DiskFull,
    alone,
    atomic_path,
    lock,
    make_folder_once,
    read_json,
    refuse_links,
    remove_folder,
    remove_leftovers,
    whole_folder,
    work_folder,
    write_json,
)
from packtrain.core.dataclass_json import from_json
from packtrain.core.errors import ArtifactError, ConfigError, DataError, PacktrainError, RecordError, nearest
from packtrain.core.fingerprint import differences, digest, file_state, files_state
from packtrain.core.secrets import hide_secrets, with_secrets, without_secrets
from packtrain.core.seeds import stream

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@dataclass(frozen=True)
class Inner:
    number: int
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    pairs: tuple[tuple[str, int], ...] = ()
    several: tuple[Inner, ...] = ()
    named: Mapping[str, Inner] = field(default_factory=dict)
    perhaps: Inner | None = None
    free: object = None


def test_dataclasses_come_back_from_json() -> None:
    full = Outer(Inner(1, "a"), (("b", 2),), (Inner(3),), {"c": Inner(4)}, Inner(5), [{"d": 6}])
    for value in (full, Outer(Inner(0))):
        assert from_json(Outer, json.loads(json.dumps(asdict(value)))) == value
    assert from_json(Inner, {"number": 1, "kind": "x"}, ignore=["kind"]) == Inner(1)
    for broken in (None, {}, {"inner": 1}, {"inner": {}}, {"inner": {"number": 1, "more": 2}}, {"unknown": 1}):
        with pytest.raises((TypeError, ValueError)):
            from_json(Outer, broken)
    with pytest.raises((TypeError, ValueError)):
        from_json(Outer, {"inner": {"number": 1}, "pairs": [["b"]]})


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file"
    with atomic_path(path) as temporary:
        temporary.write_text("old")
        assert not path.exists()
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:  # noqa: PT012
        temporary.write_text("half of the new")
        raise RuntimeError
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["file"]


def test_whoever_has_the_old_file_keeps_it(tmp_path: Path) -> None:
    """A file that were written in place would change under those who map it, and be half there at a kill."""
    path = tmp_path / "file"
    path.write_text("old")
    with path.open() as reader:
        with atomic_path(path) as temporary:
            temporary.write_text("new")
        assert (reader.read(), path.read_text()) == ("old", "new")


def make_link(path: Path) -> None:
    path.symlink_to("../victim")


def make_linked_folder(path: Path) -> None:
    path.symlink_to("../elsewhere")


@pytest.mark.parametrize("make", [make_link, make_linked_folder, os.mkfifo])
@pytest.mark.parametrize("place", ["run/.lock", "run/checkpoint-2/optimizer_0"])
def test_links_are_refused_wherever_they_are(tmp_path: Path, place: str, make: Callable[[Path], None]) -> None:
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "checkpoint-2" / "weights").write_text("w")
    refuse_links(tmp_path / "run")
    make(tmp_path / place)
    with pytest.raises(ArtifactError, match=Path(place).name):
        refuse_links(tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "shown", "file", "opened"),
    [
        ("http://me:pw@h:80/a.jsonl?X-Amz-Signature=s", "http://h:80/a.jsonl", None, None),
        ("https://h/a.tar?part=3&sig=s", "https://h/a.tar?part=3", None, None),
        ("https://h/get?id=7", "https://h/get?id=7", None, None),
        ("https://h/get?file=0123456789012345678901234567", "https://h/get", None, None),
        ("s3://key:pw@bucket/a-?.tar", "s3://bucket/a-?.tar", "s3://bucket/a-1.tar", "s3://key:pw@bucket/a-1.tar"),
        ("http://h/{0..3}.tar?sig=s", "http://h/{0..3}.tar", "http://h/2.tar", "http://h/2.tar?sig=s"),
        ("http://me:pw@h/data/", "http://h/data/", "http://h/data/x/a.tar", "http://me:pw@h/data/x/a.tar"),
        ("http://me:pw@h/data/", "http://h/data/", "http://other/data/a.tar", "http://other/data/a.tar"),
        ("http://me:pw@h/data", "http://h/data", "http://h/data/a.tar", "http://me:pw@h/data/a.tar"),
        ("http://me:pw@h/a.tar", "http://h/a.tar", "http://h/a.tar.gz", "http://h/a.tar.gz"),
        ("simplecache::http://me:pw@h/a.tar", "simplecache::http://h/a.tar", None, None),
        (
            "simplecache::http://me:pw@h/{0..3}.tar?sig=s",
            "simplecache::http://h/{0..3}.tar",
            "simplecache::http://h/2.tar",
            "simplecache::http://me:pw@h/2.tar?sig=s",
        ),
        ("zip://a.json::http://me:pw@h/b.zip", "zip://a.json::http://h/b.zip", None, None),
        ("http://me:pw@[::1]:80/a.tar", "http://[::1]:80/a.tar", None, None),
        ("abfs://data/a.tar?sv=1&sig=pw", "abfs://data/a.tar", None, None),
        ("/home/me@work/a?b.jsonl", "/home/me@work/a?b.jsonl", None, None),
    ],
)
def test_secrets_of_urls_are_kept_apart(
    given: str, shown: str, file: str | None, opened: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACKTRAIN_URLS", "{}")
    assert hide_secrets(given) == hide_secrets(hide_secrets(given)) == shown
    assert with_secrets(file or shown) == (opened or given)
    assert shown in str(ArtifactError(f"at {given}", got=[given], fix=given))
    assert (
        "pw" not in str(ArtifactError(f"at {given}", got=[given], fix=given)) + RecordError("read", "x", given).detail
    )
    assert "pw" not in str(RecordError("read", "x", given))


@pytest.mark.parametrize("url", ["http://me:my pw@h/a.tar", "http://me:'pw@h/a.tar", 'https://h/a.tar?sig=x"pw'])
def test_passwords_with_blanks_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="%20") as caught:
        hide_secrets(url)
    assert "pw" not in str(caught.value)
    assert hide_secrets("s3://bucket/my file's.tar") == "s3://bucket/my file's.tar"


def test_what_is_kept_apart_never_stands_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_URLS", "{}")
    for signature in ("a", "b"):  # signed again
        hide_secrets(f"http://h/a.tar?X-Amz-Signature={signature}")
    assert with_secrets("http://h/a.tar") == "http://h/a.tar?X-Amz-Signature=b"
    hide_secrets("http://h/get?file=0123456789012345678901234567")
    with pytest.raises(ConfigError, match="two URLs"):
        hide_secrets("http://h/get?file=0123456789012345678901234568")


def test_settings_that_are_secrets_are_left_out() -> None:
    given = {"training": {"hub_token": "hf_x", "image_token": "<image>", "seed": 1}, "urls": ["http://a:b@h/x"]}
    assert without_secrets(given) == {"training": {"image_token": "<image>", "seed": 1}, "urls": ["http://h/x"]}


def test_a_lock_is_neither_emptied_nor_a_link(tmp_path: Path) -> None:
    victim, lock = tmp_path / "victim", tmp_path / "run" / ".lock"
    lock.parent.mkdir()
    victim.write_text("kept")
    for target in (victim, tmp_path / "nowhere"):
        lock.symlink_to(target)
        with pytest.raises(ArtifactError, match="a link"), alone(lock):
            pass
        lock.unlink()
    assert victim.read_text() == "kept"
    assert not (tmp_path / "nowhere").exists()
    lock.write_text("of an earlier version")
    with alone(lock) as held, pytest.raises(BlockingIOError), alone(lock, wait=False):
        assert held
    assert lock.read_text() == "of an earlier version"


def test_a_kill_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    program = (
        "import os, sys; from pathlib import Path; from packtrain.core.artifacts import atomic_path\n"
        "with atomic_path(Path(sys.argv[1])) as temporary:\n"
        "    temporary.write_text('half of the new'); os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(path)], check=False).returncode == -9
    assert path.read_text() == "old"
    assert len(os.listdir(tmp_path)) == 2, "the kill came before anything was written"
    (tmp_path / ".mine.tmp").write_text("of somebody else")
    remove_leftovers(tmp_path, ("file",))
    assert sorted(os.listdir(tmp_path)) == [".mine.tmp", "file"]


def test_a_half_removed_folder_has_another_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    (folder / "part").touch()
    with monkeypatch.context() as patch:
        patch.setattr("os.unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError("no")))
        with pytest.raises(PermissionError):
            remove_folder(folder)
    assert [path.name for path in tmp_path.iterdir()] == [".table.removing"], "it is hidden, and not yet gone"
    folder.mkdir()
    remove_folder(folder)
    assert not list(tmp_path.iterdir()), "what was left before is gone, too"


def test_a_work_folder_is_gone_afterwards(tmp_path: Path) -> None:
    with work_folder(tmp_path / "out" / "study") as killed:
        (killed / "part").touch()
        left = killed.with_name(".study.1.tmp")
        left.mkdir()
        (left / "part").touch()
        with work_folder(tmp_path / "out" / "study") as other:
            assert other != killed
            assert not left.exists(), "nobody holds it"
            assert killed.exists(), "its process lives"
    assert not list((tmp_path / "out").iterdir())


def test_json_comes_back_with_its_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    content = {"name": "é", "odd": os.fsdecode(b"\xff"), "list": [1, 2.5, None]}
    write_json(path, "plan", 3, content)
    assert read_json(path, "plan", 3) == {"kind": "plan", "version": 3, **content}
    path.read_bytes().decode("utf-8")
    for kind, version in (("plan", 2), ("table", 3)):
        with pytest.raises(ArtifactError, match=r"(?s)found: .*'plan'.*format version 3"):
            read_json(path, kind, version)


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for content in (b"", b"{", b"\xff\xfe", b"[]", b"null"):
        path.write_bytes(content)
        with pytest.raises(ArtifactError, match=r"a\.json"):
            read_json(path, "plan", 1)
    path.unlink()
    with pytest.raises(ArtifactError, match="no such file"):
        read_json(path, "plan", 1)
    path.mkdir()
    with pytest.raises(ArtifactError):
        read_json(path, "plan", 1)


@given(JSON, JSON)
def test_differences_are_empty_exactly_for_equals(one: object, other: object) -> None:
    assert differences(one, one) == []
    assert bool(differences(one, other)) == (one != other)
    assert len(differences(one, other)) == len(differences(other, one))


@given(JSON)
def test_digests_survive_json(value: object) -> None:
    assert digest(json.loads(json.dumps(value))) == digest(value)


def test_differences_name_the_path() -> None:
    old = {"a": {"x": 1, "y": 2}, "gone": 0}
    assert differences(old, {"a": {"x": 1, "y": 3}, "new": 0}) == ["a.y: 2 -> 3", "gone: gone", "new: new"]
    assert len(differences("x" * 500, "y")[0]) < 100


def test_file_states(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1")
    by_time, by_content = file_state(path), file_state(path, content=True)
    os.utime(path, ns=(5, 5))
    assert file_state(path) != by_time
    assert file_state(path, content=True) == by_content
    path.write_bytes(b"2")
    assert file_state(path, content=True) != by_content
    assert files_state({"f": path, "no": tmp_path / "no"}) == {"f": file_state(path), "no": {"missing": True}}


def test_streams_depend_on_seed_and_names_alone() -> None:
    draws = {
        key: tuple(stream(*key).integers(0, 1 << 60, 4).tolist())
        for key in [(0, "a"), (1, "a"), (0, "b"), (0, "a", "b"), (0, "ab"), (0, "a", 1), (0, "a1")]
    }
    assert len(set(draws.values())) == len(draws)
    assert tuple(stream(0, "a").integers(0, 1 << 60, 4).tolist()) == draws[(0, "a")]
    assert stream(0, "limit").integers(1000) == np.int64(stream(0, "limit").integers(1000))


def test_errors_say_where_what_and_how(tmp_path: Path) -> None:
    error = ConfigError("data.limit", got=0, expected="a positive number", fix="leave it out")
    assert str(error).splitlines() == [
        "data.limit",
        "  found:    0",
        "  expected: a positive number",
        "  to do:    leave it out",
    ]
    assert (ConfigError.exit_code, DataError.exit_code, PacktrainError.exit_code) == (2, 1, 1)
    assert nearest("jsnl", ["json", "jsonl"]) == "did you mean 'jsonl'?"
    assert nearest("zzz", ["json"]) == ""


@pytest.mark.parametrize("kind", [ConfigError, DataError, ArtifactError])
def test_errors_travel_between_processes(kind: type[PacktrainError]) -> None:
    error = kind("where", got="a", expected="b", fix="c")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.exit_code) == (kind, str(error), kind.exit_code)
    record = pickle.loads(pickle.dumps(RecordError("read", "not valid JSON", "at 7")))
    assert (record.stage, record.reason, record.detail) == ("read", "not valid JSON", "at 7")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_the_file_and_the_way_out(tmp_path: Path, code: int) -> None:
    with pytest.raises(DiskFull) as caught, atomic_path(tmp_path / "costs.parquet"):
        raise OSError(code, "Error writing bytes to file")  # all that arrow says
    assert str(tmp_path / "costs.parquet") in str(caught.value)
    assert "free some space" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(OSError, match="other") as caught_other, atomic_path(tmp_path / "costs.parquet"):
        raise OSError(errno.EIO, "other")
    assert not isinstance(caught_other.value, DiskFull)
    assert list(tmp_path.iterdir()) == []


def test_a_whole_folder_removes_what_was_abandoned_and_nothing_else(tmp_path: Path) -> None:
    names = ("killed", "living", "just made", "of somebody else")
    folders = dict(zip(names, (tmp_path / f".made.{one}.tmp" for one in ("1", "2", "3", "x")), strict=True))
    for name, folder in folders.items():
        folder.mkdir()
        if name != "just made":
            (folder / "part").touch()
    alive = os.open(folders["living"], os.O_RDONLY)
    assert lock(alive)
    with pytest.raises(OSError, match="full"), whole_folder(tmp_path / "made"):
        raise OSError("full")
    os.close(alive)
    assert set(tmp_path.iterdir()) == set(folders.values()) - {folders["killed"]}


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    def beaten(fresh: Path) -> None:
        (fresh / "slow").touch()
        make_folder_once(tmp_path / "made", lambda other: (other / "fast").touch())

    for _ in range(2):
        assert os.listdir(make_folder_once(tmp_path / "made", beaten)) == ["fast"]
    assert os.listdir(tmp_path) == ["made"]
