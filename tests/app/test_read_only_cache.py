"""A cache on a disk that cannot be written: what is complete in it is used, and what is not is said."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from commands import Run, files
from made_runs_data import write_chats, write_config

from packtrain import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
from packtrain.core.artifacts import alone

pytestmark = pytest.mark.filterwarnings("ignore:shard cache")  # which says that it reads directly
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")
_folders: list[str] = []
_hooked: list[bool] = []


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """What Python would change below the folder fails as on such a disk, also for the superuser."""
    if not _hooked:  # a hook stays for ever
        sys.addaudithook(_refuse)
        _hooked.append(True)
    _folders.append(os.path.realpath(folder))
    before = files(folder)
    try:
        yield
    finally:
        _folders.pop()
    assert files(folder) == before


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if not _folders or not (event in _CHANGES or (event == "open" and (arguments[2] or 0) & _WRITES)):
        return
    named = arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1]
    for path in (os.path.realpath(os.fsdecode(one)) for one in named if isinstance(one, str | bytes | os.PathLike)):
        if any(path.startswith(folder + os.sep) for folder in _folders):
            code = errno.EEXIST if event == "os.mkdir" and os.path.isdir(path) else errno.EROFS
            raise OSError(code, os.strerror(code), path)


@pytest.mark.parametrize("kind", [MultiModalDataset, MultiModalIterableDataset])
def test_a_dataset_that_is_complete_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    config = DatasetConfig(
        dataset_path=str(write_chats(tmp_path / "train.jsonl", 20)),
        model="tiny:llama",
        packing_length=192,
        packs_per_step=2,
        cache_tokens=True,
        workers=1,
        check=0,
    )

    def batches() -> list[Any]:
        dataset = kind(config)
        dataset.build()
        return [batch["input_ids"].tolist() for batch in dataset.loader(num_workers=0)]

    made = batches()
    with read_only(tmp_path / "cache"):
        assert batches() == made
        with pytest.raises(OSError, match="Read-only"):
            (tmp_path / "cache" / "new").write_text("")
    assert len(made) > 1


@pytest.mark.full
def test_a_run_uses_it_and_says_what_it_would_have_to_write(run: Run, tmp_path: Path) -> None:
    command = ("train", write_config(tmp_path, max_steps=3), "--dry-run", "--json", "training.packing_check=false")
    assert run(*command)[0] == 0
    with read_only(tmp_path / "cache"):
        code, out, _ = run(*command)
        assert code == 0
        assert "plan reused" in "\n".join(json.loads(out)["prepared"])
        code, out, err = run(*command, "data.packing_length=256")
        assert (code, out, "Read-only file system" in err) == (1, "", True)


def test_a_writer_is_waited_for_where_only_it_may_write(tmp_path: Path) -> None:
    lock, entered = tmp_path / "locks" / "a.lock", threading.Event()

    def enter() -> None:
        with alone(lock) as held:
            assert held
            entered.set()

    with alone(lock) as held:
        assert held
    with lock.open("rb") as other, read_only(tmp_path):
        fcntl.flock(other, fcntl.LOCK_EX)
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.2)
        fcntl.flock(other, fcntl.LOCK_UN)
        assert entered.wait(30)
        thread.join()
        with alone(tmp_path / "locks" / "b.lock") as held:
            assert not held, "there is none, and none can be made"


def test_a_disk_that_is_full_is_another_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("packtrain.core.artifacts.os.open", full)
    with pytest.raises(OSError, match="No space"), alone(tmp_path / "a.lock"):
        pass
