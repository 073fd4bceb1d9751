"""Questions for the tests of studies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from made_tables import TWO_B, write_table

from packtrain.measuring.table import CostTable
from packtrain.planning.question import MOST_ROWS, Baseline, Question, packing_from, read_rows
from packtrain.planning.study import StudyOutcome, study_outcome
from packtrain.predicting.gpus import find_gpu
from packtrain.predicting.values import TrainingSetup


def ask(folder: Path, columns: Mapping[str, np.ndarray], **given: Any) -> Question:
    """A question about a synthetic table; what is not given is usual."""
    return question_of(write_table(folder, columns), **given)


def question_of(table: CostTable, **given: Any) -> Question:
    """A question about a table."""
    packing = packing_from(given.pop("packing", {}), seed=0)
    setup = TrainingSetup(gpus=given.pop("gpus", 1))
    gpu, rows = find_gpu(given.pop("gpu", "h200")), read_rows(table, 0, given.pop("most_rows", MOST_ROWS))
    usual = {"shape": TWO_B, "model": "two-b", "setup": setup, "baseline": Baseline()}
    return Question(**{**usual, "rows": rows, "gpu": gpu, "packing": packing, **given})


def study_of(table: CostTable, **given: Any) -> StudyOutcome:
    """The study of a question about a table, with the user's config trained as asked for."""
    how = {name: given.pop(name) for name in ("lengths", "limits", "progress") if name in given}
    question = question_of(table, **given)
    return study_outcome(table, replace(question, configured=question.setup), **how)
