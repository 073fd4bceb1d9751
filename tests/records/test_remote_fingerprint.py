"""Remote data files are part of the fingerprint, and of mixtures, as they are called."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from packtrain.measuring.request import _data_state
from packtrain.records.mixture import read_mixture


@pytest.fixture
def memory() -> fsspec.AbstractFileSystem:
    found = fsspec.filesystem("memory")
    yield found
    found.store.clear()


def test_a_changed_remote_file_changes_the_fingerprint(memory: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    local = tmp_path / "a.jsonl"
    local.write_text("{}\n")
    memory.pipe_file("/data/b.jsonl", b"{}\n")
    remote = ("memory://data/b.jsonl", "memory://data/gone.jsonl")
    files = {"a.jsonl": str(local), **{url: url for url in remote}}
    before = _data_state(files, content=False)
    assert list(before) == list(files)
    assert before["memory://data/gone.jsonl"] == {"missing": True}
    assert before["memory://data/b.jsonl"] != {"missing": True}
    memory.pipe_file("/data/b.jsonl", b'{"text": "more"}\n')
    after = _data_state(files, content=False)
    assert after["memory://data/b.jsonl"] != before["memory://data/b.jsonl"]
    assert after["a.jsonl"] == before["a.jsonl"]


def test_a_mixture_keeps_the_address_of_a_remote_dataset(tmp_path: Path) -> None:
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("datasets:\n  - path: memory://data/b.jsonl\n  - path: local.jsonl\n")
    paths = [item.path for item in read_mixture(str(mixture))]
    assert paths == ["memory://data/b.jsonl", str(tmp_path / "local.jsonl")]
