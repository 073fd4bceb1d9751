"""The benchmark itself works and prints what it promises; the numbers are the benchmark's business, not a test's."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from packtrain.bench.measure import TEXT_SIZES, bench_measure
from packtrain.bench.printing import show_measure


@pytest.mark.full
def test_benchmark_runs_and_shows_its_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr("packtrain.bench.measure.ROUNDS", 1)
    result = bench_measure(records=60, workers=1, memory_sizes=[200], model="tiny:qwen2_5_vl")
    assert result.processor.ratio > 1
    assert [row.answer_words for row in result.floor] == list(TEXT_SIZES)
    assert all(row.ratio > 0 for row in result.floor)
    assert result.memory[0].peak_mib > 20
    page = io.StringIO()
    show_measure(result, Console(file=page, width=120))
    assert "Against the HF processor" in page.getvalue()
    assert "Memory of all processes" in page.getvalue()
