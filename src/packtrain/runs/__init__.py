"""A training run as its folder tells it: metrics, early warnings, evaluations; several runs compared.

The process that trains writes through `RunFolder` (run.json is a `RunFacts`, whose `Derived` numbers follow from config
and data) and `MetricsLog`. A run can be read at any time, also during training or after a crash: `read_run` gives a
`TrainingRun`, `summarise_run` its numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.runs.derived import Derived as Derived
    from packtrain.runs.metrics_log import MetricsLog as MetricsLog
    from packtrain.runs.metrics_log import read_metrics as read_metrics
    from packtrain.runs.run_folder import Invocation as Invocation
    from packtrain.runs.run_folder import RunFacts as RunFacts
    from packtrain.runs.run_folder import RunFolder as RunFolder
    from packtrain.runs.run_folder import RunOutcome as RunOutcome
    from packtrain.runs.run_summary import compare_runs as compare_runs
    from packtrain.runs.run_summary import summarise_run as summarise_run
    from packtrain.runs.training_run import TrainingRun as TrainingRun
    from packtrain.runs.training_run import read_run as read_run

__getattr__, __dir__, __all__ = lazy_names(__name__)
