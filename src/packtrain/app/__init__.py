"""The verbs as functions, and the datasets: what the command line and users' programs call.

Takes names and paths (a dataset, a model, a config, the folder of a run) and gives the outcome of one stage or of
several in a row: `measure`, `pack`, `plan`, `train.train`, `verify`, `calibrate` and `convert`, one module each, and
`datasets` for your own training loop. Costs, packs, predictions and losses come from the stages: each function here
reads settings, looks for what was made before (`reuse`), runs a stage, and counts and says what was done. `cache` lists
and clears what the stages stored; `inspect_plan` and `inspect_batch` look into a plan, a pack and a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.app.calibrate import CalibrationOutcome as CalibrationOutcome
    from packtrain.app.datasets import DatasetSummary as DatasetSummary
    from packtrain.app.datasets import MultiModalDataset as MultiModalDataset
    from packtrain.app.datasets import MultiModalIterableDataset as MultiModalIterableDataset
    from packtrain.app.pack import PackOutcome as PackOutcome
    from packtrain.app.train.outcome import TrainOutcome as TrainOutcome

__getattr__, __dir__, __all__ = lazy_names(__name__)
