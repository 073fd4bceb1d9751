"""A cost table, a model and GPUs -> the study: lengths compared, padding beside packing, a recommendation.

Takes a cost table and a `Question` (its rows, the model's shape, GPU, setup and baseline) and gives one frozen `Study`,
from which every file of a report is rendered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.planning.question import Baseline as Baseline
    from packtrain.planning.question import Question as Question
    from packtrain.planning.study import StudyOutcome as StudyOutcome
    from packtrain.planning.study import StudyProgress as StudyProgress
    from packtrain.planning.study import study_outcome as study_outcome
    from packtrain.planning.study_values import Study as Study

__getattr__, __dir__, __all__ = lazy_names(__name__)
