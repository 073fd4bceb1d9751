"""The clock, the memory of processes, and what a benchmark says about its host."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from packtrain.bench import host
from packtrain.bench.host import time_work, tree_memory


def test_time_that_the_system_took(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new, old = tmp_path / "cpu.stat", tmp_path / "old"
    monkeypatch.setattr(host, "_CPU_STATS", (new, old))
    assert host.throttled_seconds() is None
    old.write_text("nr_throttled 3\nthrottled_time 2500000000\n")
    assert host.throttled_seconds() == 2.5
    new.write_text("usage_usec 9\nnr_throttled 3\nthrottled_usec 1500000\n")
    assert host.throttled_seconds() == 1.5
    new.write_text("throttled_usec nothing\n")
    assert host.throttled_seconds() == 2.5


def test_what_the_host_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_CPU_LIMIT", tmp_path / "cpu.max")
    assert host.host_facts(3)["cpu_limit"] == ""
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    facts = host.host_facts(3)
    assert (facts["cpu_limit"], facts["threads"]) == ("200000 100000", 3)
    assert facts["cpus"] >= facts["usable_cpus"] >= 1


def test_the_clock_takes_the_median_round_and_the_smaller_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = [(5.0, 4.0), (2.0, 7.0), (3.0, 3.0)]  # elapsed, processor
    now = {"wall": 0.0, "cpu": 0.0}
    monkeypatch.setattr(time, "perf_counter", lambda: now["wall"])
    monkeypatch.setattr(time, "process_time", lambda: now["cpu"])

    def work() -> int:
        wall, cpu = rounds[work.calls]  # type: ignore[attr-defined]
        now["wall"] += wall
        now["cpu"] += cpu
        work.calls += 1  # type: ignore[attr-defined]
        return int(work.calls)  # type: ignore[attr-defined]

    work.calls = 0  # type: ignore[attr-defined]
    assert time_work(work, rounds=3, seconds=99) == (3, 3.0)
    work.calls = 0  # type: ignore[attr-defined]
    assert time_work(work, rounds=3, seconds=1) == (1, 4.0)


def test_memory_of_grandchildren_counts() -> None:
    child = (
        "block = bytearray(60 << 20); block[::4096] = b'x' * len(block[::4096]); print('ready', flush=True); input()"
    )
    for _ in range(2):
        child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        before = host._process_memory(Path("/proc") / str(process.pid))
        assert process.stdout.readline().strip() == b"ready"
        found = tree_memory(process.pid)
        process.communicate(b"\n")
    assert found["processes"] >= 3
    kind = "pss" if "pss" in found else "rss"
    assert found[kind] - before[kind] > 50 << 20


def test_memory_is_told_by_kind_and_of_children_too() -> None:
    """A child that holds 60 MB of its own shows as such in its parent's sum, and as nothing else."""
    child = (
        "block = bytearray(60 << 20); block[::4096] = b'x' * len(block[::4096]); print('ready', flush=True); input()"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"ready"
        found = tree_memory(process.pid)
        process.communicate(b"\n")
    assert found["processes"] == 2
    assert found["rss"] > 60 << 20
    if "anonymous" in found:
        assert found["anonymous"] > 60 << 20 > found["file"]
        parts = found["anonymous"] + found["file"] + found["shared"]
        assert abs(parts - found["pss"]) < 1 << 20
    assert tree_memory(os.getpid())["processes"] >= 1
