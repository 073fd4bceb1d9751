"""sample_stats.jsonl: every line is the JSON of its sample, whatever its names are."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from studies import HOSTILE

from packtrain.reports import study_files as module
from packtrain.reports.study_files import NUMBERS, SampleChunk, write_samples

NAMES = st.one_of(st.text(max_size=20), st.sampled_from(HOSTILE))


def chunk_of(ids: list[str], sources: list[str], packs: list[int]) -> SampleChunk:
    numbers = {name: np.arange(len(ids), dtype=np.int32) * (at + 1) for at, name in enumerate(NUMBERS)}
    why = {at: f"reason {ids[at]}" for at, pack in enumerate(packs) if pack < 0}
    return SampleChunk(id=ids, source=sources, pack=np.array(packs, np.int64), why=why, **numbers)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(NAMES, NAMES, st.integers(-1, 1 << 40)), min_size=1, max_size=12))
def test_lines_are_their_samples(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, int]]) -> None:
    ids, sources, packs = (list(column) for column in zip(*rows, strict=True))
    path = tmp_path_factory.mktemp("lines") / "s.jsonl"
    assert write_samples(path, [chunk_of(ids, sources, packs)] * 2) == 2 * len(rows)
    lines = path.read_bytes().decode("utf-8").split("\n")
    assert lines.pop() == ""
    assert lines[: len(rows)] == lines[len(rows) :]
    for at, (line, name, source, pack) in enumerate(zip(lines, ids, sources, packs, strict=False)):
        expected = {"id": name, "source": source, **{n: at * (k + 1) for k, n in enumerate(NUMBERS)}}
        expected |= {"pack": pack} if pack >= 0 else {"pack": None, "why": f"reason {name}"}
        assert json.loads(line) == expected
        assert list(json.loads(line)) == list(expected)


def test_chunks_larger_than_what_is_formatted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = chunk_of([str(at) for at in range(100)], ["a", "b"] * 50, [at if at % 7 else -1 for at in range(100)])
    assert write_samples(tmp_path / "one", [chunk]) == 100
    monkeypatch.setattr(module, "_ROWS", 9)
    write_samples(tmp_path / "many", [chunk])
    assert (tmp_path / "one").read_bytes() == (tmp_path / "many").read_bytes()
    assert (tmp_path / "one").read_text().count('"why"') == 15


def test_no_samples_are_no_lines(tmp_path: Path) -> None:
    assert write_samples(tmp_path / "none", [chunk_of([], [], [])]) == 0
    assert (tmp_path / "none").read_bytes() == b""


def test_a_sample_in_no_pack_needs_a_reason() -> None:
    numbers = {name: np.zeros(1) for name in NUMBERS}
    with pytest.raises(AssertionError, match="has a reason"):
        SampleChunk(id=["a"], source=["s"], pack=np.array([-1]), **numbers)
    with pytest.raises(AssertionError, match="different lengths"):
        SampleChunk(id=["a", "b"], source=["s"], pack=np.array([0]), **numbers)
