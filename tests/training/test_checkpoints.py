"""Checkpoints are whole or not there, whatever happens while one is written."""

from __future__ import annotations

import builtins
import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from packtrain.core.artifacts import write_json
from packtrain.core.errors import ArtifactError
from packtrain.core.fingerprint import digest
from packtrain.training.checkpoints import (
    KIND,
    MARKER,
    VERSION,
    CheckpointFolder,
    UnreadableError,
    bytes_to_save,
    complete_checkpoints,
    find_latest,
    read_checkpoint,
    refuse_broken,
    survey,
)


def folder_of(path: Path, limit: int | None = None) -> CheckpointFolder:
    return CheckpointFolder(folder=path, writes=True, limit=limit)


def write_two(path: Path) -> None:
    (path / "weights").write_bytes(b"w" * 100)
    (path / "inner").mkdir()
    (path / "inner" / "part").write_bytes(b"p" * 7)


def full(path: Path) -> None:
    (path / "states").write_bytes(b"half of")
    raise OSError(errno.ENOSPC, "No space left on device")


def save(folder: CheckpointFolder, step: int, *parts: object, **options: object) -> Path:
    return folder.save(step, parts or (write_two,), needed=107, **options)  # type: ignore[arg-type]


def test_what_is_saved_is_found(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for step in (2, 10, 9):
        save(folder, step)
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.step, found.bytes, found.world_size, found.resumable) == (10, 107, 1, True)
    assert [one.step for one in complete_checkpoints(tmp_path)] == [2, 9, 10]
    assert not list(tmp_path.glob(".*")), "nothing is left over"


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert find_latest(tmp_path / "nowhere") is None


@pytest.mark.parametrize("fault", [full, lambda path: (_ for _ in ()).throw(RuntimeError("file write failed"))])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, fault: object) -> None:
    folder = folder_of(tmp_path)
    save(folder, 1)
    with pytest.raises(ArtifactError) as caught:
        save(folder, 2, write_two, fault)
    text = str(caught.value)
    assert "about 107 bytes" in text
    assert str(tmp_path / "checkpoint-1") in text
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert find_latest(tmp_path) == read_checkpoint(tmp_path / "checkpoint-1")


def test_a_disk_that_is_too_small_is_not_even_begun_with(tmp_path: Path) -> None:
    folder, begun = folder_of(tmp_path), []
    with pytest.raises(ArtifactError, match="are free, and it needs about"):
        folder.save(1, [lambda path: begun.append(path)], needed=2**62)
    assert begun == []
    assert list(tmp_path.iterdir()) == []


SHAPES: dict[str, Any] = {
    "files": 5,
    "files of a list": [1],
    "files without sums": {"weights": 100},
    "step": "two",
    "world_size": None,
    "resumable": 1,
    "version": 99,
    "older version": 1,
    "kind": 99,
}


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("what", SHAPES)
def test_a_list_of_another_shape_is_refused(tmp_path: Path, what: str, checked: bool) -> None:
    folder = folder_of(tmp_path)
    save(folder, 1)
    marker = save(folder, 2) / MARKER
    body = json.loads(marker.read_text()) | {what.split()[-1 if "version" in what else 0]: SHAPES[what]}
    del body["checksum"]
    if checked:
        body["checksum"] = digest(body)
    marker.write_text(json.dumps(body))
    complete, broken = survey(tmp_path)
    assert [one.step for one in complete] == [1]
    assert "checkpoint-2" in broken[2]


def test_any_bytes_for_a_list_are_refused_in_words(tmp_path: Path) -> None:
    path = save(folder_of(tmp_path), 2)
    content, draw = (path / MARKER).read_bytes(), random.Random(0)
    whole, refused = read_checkpoint(path), 0
    for _ in range(300):
        changed, at = bytearray(content), draw.randrange(len(content))
        changed[at : at + draw.choice((0, 1, 1, 9))] = draw.randbytes(draw.choice((0, 1, 1, 5)))
        (path / MARKER).write_bytes(changed)
        complete, broken = survey(tmp_path)
        assert complete in ([], [whole]), "never another step or other files"
        refused += bool(broken)
    assert refused > 200


def test_one_that_goes_away_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a shared disk another machine may rename it."""
    folder = folder_of(tmp_path)
    for step in (1, 2):
        save(folder, step)
    real = os.scandir

    def gone(path: Any) -> Any:
        if str(path).endswith("checkpoint-2"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return real(path)

    monkeypatch.setattr("os.scandir", gone)
    assert [one.step for one in complete_checkpoints(tmp_path)] == [1]


def test_one_of_an_older_version_says_how_to_go_on(tmp_path: Path) -> None:
    path = save(folder_of(tmp_path), 2)
    write_json(path / MARKER, KIND, VERSION - 1, {"step": 2})
    with pytest.raises(ArtifactError, match=r"(?s)older version.*packtrain train CONFIG model\.model_name_or_path"):
        read_checkpoint(path)


@pytest.mark.parametrize("what", ["marker", "file", "size"])
def test_what_is_incomplete_is_never_chosen(tmp_path: Path, what: str) -> None:
    folder = folder_of(tmp_path)
    save(folder, 1)
    broken = save(folder, 2)
    if what == "marker":
        (broken / MARKER).unlink()
    elif what == "file":
        (broken / "inner" / "part").unlink()
    elif what == "size":
        os.truncate(broken / "weights", 99)
    found = find_latest(tmp_path)
    assert found is not None
    assert found.step == 1
    with pytest.raises(ArtifactError, match="checkpoint"):
        read_checkpoint(broken)


def test_weights_alone_cannot_be_resumed_from(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    save(folder, 1)
    save(folder, 2, resumable=False)
    found = find_latest(tmp_path)
    assert found is not None
    assert found.step == 1


def test_the_oldest_go_but_not_the_best(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, limit=2)
    for step in range(1, 7):
        save(folder, step, best=folder.path(2) if step >= 2 else None)
    assert [one.step for one in complete_checkpoints(tmp_path)] == [2, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-6"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    save(folder, 1)
    save(folder, 1, lambda path: (path / "new").write_bytes(b"n"))
    assert sorted(path.name for path in (tmp_path / "checkpoint-1").iterdir()) == sorted([MARKER, "new"])


def test_other_files_of_the_folder_are_left_alone(tmp_path: Path) -> None:
    for name in ("checkpoint-old", "notes", ".checkpoint-x.saving"):
        (tmp_path / name).mkdir()
    (tmp_path / ".checkpoint-7.saving").mkdir()
    (tmp_path / ".checkpoint-8.removing").mkdir()
    folder_of(tmp_path).clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".checkpoint-x.saving", "checkpoint-old", "notes"]


KILLED = """
import os, signal, sys
from pathlib import Path
from typing import Any
from packtrain.training import checkpoints
write = lambda path: [(path / f"part-{n}").write_bytes(b"x" * 1000) for n in range(20)]
calls = 0
def run(name, at):
    folder = checkpoints.CheckpointFolder(folder=Path(sys.argv[1], name), writes=True)
    folder.save(1, [write], needed=1)
    def tracer(frame, event, arg):
        global calls
        calls += 1
        if calls == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return tracer
    sys.settrace(tracer)
    folder.save(2, [write], needed=1)
    folder.save(2, [write], needed=1)
    sys.settrace(None)
    print(calls, flush=True)
def in_a_process(name, at):
    if not (child := os.fork()):
        run(name, at)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
lines = Path(sys.argv[1], "lines")
sys.stdout = lines.open("w")
assert in_a_process("whole", 0) == 0
for number in range(8):
    at = 1 + int(lines.read_text()) * number // 8
    assert in_a_process(f"killed-{number}", at) == -9, at
"""


@pytest.mark.full
def test_killed_at_any_line_there_is_always_a_whole_one(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", KILLED, tmp_path], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    seen = set()
    for number in range(8):
        found = find_latest(tmp_path / f"killed-{number}")
        assert found is not None, number
        seen.add(found.step)
        folder_of(tmp_path / f"killed-{number}").clean()
        assert not list((tmp_path / f"killed-{number}").glob(".checkpoint*"))
    assert seen == {1, 2}, "some were killed before the second had its name, and some after"


# ---- another run in the same folder


def text_of(path: Path) -> str:
    return (path / "words").read_text()


def test_checkpoints_of_an_abandoned_run_are_nobodys(tmp_path: Path) -> None:
    """A run goes on from step 20, and what was trained beyond is neither resumed from nor in the way."""

    def write(words: str) -> object:
        return lambda path: (path / "words").write_text(words)

    folder = folder_of(tmp_path, limit=2)
    for step in (10, 20, 30):
        save(folder, step, write("first"), best=folder.path(20))
    assert [one.step for one in complete_checkpoints(tmp_path)] == [20, 30]
    moved = folder.set_aside(folder.path(20))
    assert moved == [tmp_path / "set-aside-checkpoint-30"]
    assert text_of(moved[0]) == "first", "nothing is lost"
    for step in (22, 24, 26):
        save(folder, step, write("second"))
    assert [one.step for one in complete_checkpoints(tmp_path)] == [24, 26]
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.step, text_of(found.path)) == (26, "second")
    folder.clean()
    assert moved[0].is_dir()


def aside(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("set-aside-*"))


def test_what_was_set_aside_goes_when_the_run_has_come_as_far(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for step in (10, 20, 30, 40):
        save(folder, step)
    folder.set_aside(folder.path(10))
    save(folder, 19)
    save(folder, 31, resumable=False)
    assert aside(tmp_path) == [f"set-aside-checkpoint-{step}" for step in (20, 30, 40)], "nothing to go on from yet"
    with pytest.raises(ArtifactError):
        save(folder, 30, write_two, full)
    assert len(aside(tmp_path)) == 3, "what could not be saved takes nothing's place"
    save(folder, 30)
    assert aside(tmp_path) == ["set-aside-checkpoint-40"]
    assert len(folder.set_aside(folder.path(19))) == 2
    save(folder, 20)
    assert aside(tmp_path) == ["set-aside-checkpoint-30", "set-aside-checkpoint-31", "set-aside-checkpoint-40"]
    save(folder, 40)
    assert aside(tmp_path) == []


def test_of_what_was_set_aside_no_more_stay_than_of_its_own(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, limit=2)
    save(folder, 1)
    for step in (50, 40, 30):  # runs that begin at step 1 and are abandoned
        save(folder_of(tmp_path), step)
        folder.set_aside(folder.path(1))
    assert len(aside(tmp_path)) == 3
    save(folder, 2)
    assert aside(tmp_path) == ["set-aside-checkpoint-40", "set-aside-checkpoint-50"]


# ---- what cannot be read now


@pytest.mark.parametrize("what", ["stat", "open"])
def test_what_cannot_be_read_at_the_moment_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    folder = folder_of(tmp_path)
    for step in (1, 2):
        save(folder, step)
    real_open, real_stat = builtins.open, Path.stat

    def fail(path: object) -> None:
        if str(path).endswith(f"checkpoint-2/{MARKER if what == 'open' else 'weights'}"):
            raise OSError(errno.EMFILE, "Too many open files")

    def opened(path: object, *args: object, **options: object) -> object:
        fail(path)
        return real_open(path, *args, **options)  # type: ignore[call-overload]

    def looked(path: Path, **options: bool) -> os.stat_result:
        fail(path)
        return real_stat(path, **options)

    monkeypatch.setattr(*(("builtins.open", opened) if what == "open" else ("pathlib.Path.stat", looked)))
    for look in (find_latest, complete_checkpoints):
        with pytest.raises(UnreadableError, match="Too many open files"):
            look(tmp_path)
    save(folder_of(tmp_path, limit=1), 3)
    monkeypatch.undo()
    assert [one.step for one in complete_checkpoints(tmp_path)] == [1, 2, 3], "a save is no less good for it"


def test_a_run_whose_checkpoints_are_all_broken_does_not_begin_anew(tmp_path: Path) -> None:
    refuse_broken(tmp_path)  # none at all
    folder = folder_of(tmp_path)
    for step in (1, 2):
        (save(folder, step) / "weights").unlink()
    with pytest.raises(ArtifactError, match="weights is missing"):
        refuse_broken(tmp_path)
    save(folder, 3)
    refuse_broken(tmp_path)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_run_that_begins_anew_has_no_checkpoints(tmp_path: Path, elsewhere: bool) -> None:
    folder, other = folder_of(tmp_path / "run"), folder_of(tmp_path / "other")
    for step in (1, 2, 3):
        save(folder, step)
    save(folder, 4, resumable=False)
    (tmp_path / "run" / "checkpoint-5").mkdir()
    assert len(folder.set_aside(save(other, 2) if elsewhere else None)) == 4
    assert complete_checkpoints(tmp_path / "run") == []
    assert (tmp_path / "run" / "checkpoint-5").is_dir(), "what is not complete is left to the user"
    assert folder.set_aside(None) == []


def test_ranks_that_do_not_write_rename_nothing(tmp_path: Path) -> None:
    save(folder_of(tmp_path), 1)
    assert CheckpointFolder(folder=tmp_path, writes=False).set_aside(None) == []
    assert find_latest(tmp_path) is not None


def test_how_large_it_will_be() -> None:
    model = torch.nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 10)).sum().backward()
    optimizer.step()
    assert bytes_to_save(model, None, only_trained=False) == 440
    assert 440 * 3 <= bytes_to_save(model, optimizer, only_trained=False) <= 440 * 3 + 16
    model.weight.requires_grad_(False)
    assert bytes_to_save(model, None, only_trained=True) == 40
