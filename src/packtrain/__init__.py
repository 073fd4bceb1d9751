"""packtrain: measure, pack and train multimodal datasets at the speed the GPUs have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "CostTable",
    "DatasetConfig",
    "LoaderState",
    "MultiModalDataset",
    "MultiModalIterableDataset",
    "PackPlan",
    "Packing",
    "PackingConfig",
    "PacktrainError",
    "Schedule",
    "SchemaOptions",
    "__version__",
    "measure",
    "pack",
    "pack_arrays",
    "plan",
]

if TYPE_CHECKING:
    from packtrain.app.datasets import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
    from packtrain.app.measure import measure
    from packtrain.app.pack import pack
    from packtrain.app.plan import plan
    from packtrain.core.errors import PacktrainError
    from packtrain.costs.table import CostTable
    from packtrain.plans.arrays import Packing, pack_arrays
    from packtrain.plans.config import PackingConfig
    from packtrain.plans.plan import PackPlan
    from packtrain.plans.schedule import LoaderState, Schedule
    from packtrain.records.schemas.options import SchemaOptions

# Imported when first used, so that `import packtrain` and `packtrain --help` stay fast.
_LAZY = {
    "CostTable": "packtrain.costs.table",
    "DatasetConfig": "packtrain.app.datasets",
    "LoaderState": "packtrain.plans.schedule",
    "MultiModalDataset": "packtrain.app.datasets",
    "MultiModalIterableDataset": "packtrain.app.datasets",
    "PackPlan": "packtrain.plans.plan",
    "Packing": "packtrain.plans.arrays",
    "PackingConfig": "packtrain.plans.config",
    "Schedule": "packtrain.plans.schedule",
    "PacktrainError": "packtrain.core.errors",
    "SchemaOptions": "packtrain.records.schemas.options",
    "measure": "packtrain.app.measure",
    "pack": "packtrain.app.pack",
    "pack_arrays": "packtrain.plans.arrays",
    "plan": "packtrain.app.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
