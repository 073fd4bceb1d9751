"""A cost table -> packs (sequence packing): packers, limits, the plan as files, and the order of packs in training.

Takes a `CostTable` and a `PackingConfig` and gives a `PackPlan`: a folder with the packs of every epoch and plan.json,
which is a `PlanSummary`. A `Schedule` puts its packs into steps, and a `LoaderState` is a place in it. `pack_arrays`
packs plain arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.packing.arrays import Packing as Packing
    from packtrain.packing.arrays import pack_arrays as pack_arrays
    from packtrain.packing.pack_plan import EpochCounts as EpochCounts
    from packtrain.packing.pack_plan import EpochPacks as EpochPacks
    from packtrain.packing.pack_plan import Pack as Pack
    from packtrain.packing.pack_plan import PackPlan as PackPlan
    from packtrain.packing.pack_plan import PlanSummary as PlanSummary
    from packtrain.packing.packing_config import PackingConfig as PackingConfig
    from packtrain.packing.plan_builder import PackProgress as PackProgress
    from packtrain.packing.plan_builder import build_plan as build_plan
    from packtrain.packing.schedule import LoaderState as LoaderState
    from packtrain.packing.schedule import Schedule as Schedule

__getattr__, __dir__, __all__ = lazy_names(__name__)
