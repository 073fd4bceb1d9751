"""Questions for the tests of studies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from made_tables import TWO_B, write_table

from packtrain.planning.question import Baseline, Question, packing_from, read_rows
from packtrain.predicting.gpus import find_gpu
from packtrain.predicting.memory import MemoryCoefficients
from packtrain.predicting.values import TrainingSetup


def ask(folder: Path, columns: Mapping[str, np.ndarray], **given: Any) -> Question:
    """A question about a synthetic table; what is not given is usual."""
    table = write_table(folder, columns)
    packing = packing_from(given.pop("packing", {}), seed=0)
    setup = TrainingSetup(gpus=given.pop("gpus", 1))
    gpu = find_gpu(given.pop("gpu", "h200"))
    usual = {"shape": TWO_B, "model": "two-b", "setup": setup, "baseline": Baseline(), "epochs": 1, "seed": 0}
    fixed = {"rows": read_rows(table, 0), "gpu": gpu, "packing": packing, "time": None, "memory": MemoryCoefficients()}
    return Question(**{**usual, **fixed, **given})
