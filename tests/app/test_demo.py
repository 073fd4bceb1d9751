"""The demo: every fault it plants is in the ledger, and a second run finds nothing to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from packtrain.app.demo_data import BROKEN, write_dataset
from packtrain.cli import app


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))


def test_data_are_the_same_every_time_and_grow_with_their_number(tmp_path: Path) -> None:
    first, again = (write_dataset(tmp_path / name, 16).read_bytes() for name in ("a", "b"))
    assert first == again
    other = write_dataset(tmp_path / "c", 16, seed=1).read_bytes()
    assert other != first
    pictures = {path.name: Image.open(path).size for path in (tmp_path / "a" / "images").glob("0*.jpg")}
    assert len(pictures) == 16
    sizes = {
        Path(record["images"][0]).name: (record["width"], record["height"])
        for line in first.splitlines()
        if b'"objects"' in line and (record := json.loads(line))
    }
    assert sizes == pictures


@pytest.mark.full
@pytest.mark.contract
def test_the_smallest_demo_and_its_second_run(tmp_path: Path) -> None:
    """As a user calls it, the check against the real processor included."""
    run = ["demo", "--out", str(tmp_path / "demo"), "--pictures", "32", "--workers", "1"]
    first = CliRunner().invoke(app, [*run, "--json"], catch_exceptions=False)
    assert first.exit_code == 0
    said = json.loads(first.stdout)["measure"]
    assert said["counts"]["failed"] == BROKEN == len(said["counts"]["reasons"]), "two faults are the same"
    assert said["counts"]["rows"] == 32 + 2 + 2
    assert said["check"] == {"records": 32, "note": ""}
    costs = tmp_path / "demo" / "costs"
    before = {path.name: path.stat().st_mtime_ns for path in costs.iterdir()}
    second = CliRunner().invoke(app, run, catch_exceptions=False)
    assert second.exit_code == 0
    assert "Nothing has changed" in second.stdout
    assert {path.name: path.stat().st_mtime_ns for path in costs.iterdir()} == before
