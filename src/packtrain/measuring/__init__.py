"""A dataset and a model's settings -> the cost table, one exact row per record; parallel and resumable.

Takes a `Request` (sources, model, limits, filters) and leaves a folder that `CostTable.load` opens: costs.parquet,
media.parquet, ledger.jsonl, and measure.json, which is a `MeasureSummary`. Later stages read nothing but that table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.measuring.failure_budget import FailureBudget as FailureBudget
    from packtrain.measuring.measure_summary import MeasureSummary as MeasureSummary
    from packtrain.measuring.measurement import MeasureOutcome as MeasureOutcome
    from packtrain.measuring.measurement import MeasureProgress as MeasureProgress
    from packtrain.measuring.measurement import Policy as Policy
    from packtrain.measuring.measurement import run_measurement as run_measurement
    from packtrain.measuring.request import Filters as Filters
    from packtrain.measuring.request import Request as Request
    from packtrain.measuring.table import CostTable as CostTable

__getattr__, __dir__, __all__ = lazy_names(__name__)
