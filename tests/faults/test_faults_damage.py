"""Plans, rows and cost tables whose bytes have changed: refused in words, never a crash, never other numbers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "packing"))  # tables made from arrays, as the tests of plans make them
from tables import write_table

from packtrain.app.pack import GENERIC_WORK
from packtrain.delivery.encode.row_table import RowTable
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.plan_builder import build_plan

PROGRAM = Path(__file__).with_name("damage.py")


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 60), *(pytest.param(seed, 400, marks=pytest.mark.full) for seed in (1, 2))]
)
def test_damage_is_refused_in_words(tmp_path: Path, seed: int, count: int) -> None:
    numbers = np.random.default_rng(0)
    columns = {name: numbers.integers(1, 2000, 500) for name in ("tokens", "patches")}
    table = write_table(tmp_path / "costs", columns, row_group=100)
    build_plan(table, PackingConfig(packing_length=4096, epochs=2), GENERIC_WORK, tmp_path / "plan")
    RowTable.make(table, tmp_path / "rows")
    command = [sys.executable, PROGRAM, tmp_path, str(seed), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout[-3000:] + done.stderr[-3000:]
    assert done.returncode == 0, f"ended by {done.returncode}: {said}"
    refused = int(done.stdout.rpartition("refused: ")[2])
    assert refused > 2 * count, "hardly anything was damaged"
