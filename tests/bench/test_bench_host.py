"""What a benchmark says about its host is read from the system, or is said to be unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from packtrain.bench import this_host as host


def test_time_that_the_system_took(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    new, old = tmp_path / "cpu.stat", tmp_path / "old"
    monkeypatch.setattr(host, "_STATS", (new, old))
    assert host.throttled_seconds() is None
    old.write_text("nr_throttled 3\nthrottled_time 2500000000\n")
    assert host.throttled_seconds() == 2.5
    new.write_text("usage_usec 9\nnr_throttled 3\nthrottled_usec 1500000\n")
    assert host.throttled_seconds() == 1.5
    new.write_text("throttled_usec nothing\n")
    assert host.throttled_seconds() == 2.5


def test_what_the_host_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_LIMIT", tmp_path / "cpu.max")
    assert host.about_host(3)["cpu_limit"] == ""
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    found = host.about_host(3)
    assert (found["cpu_limit"], found["threads"]) == ("200000 100000", 3)
    assert found["cpus"] >= found["usable_cpus"] >= 1
