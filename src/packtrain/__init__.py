"""packtrain: measure, pack and train multimodal datasets at the speed the GPUs have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "CostTable",
    "DatasetConfig",
    "FailureWatch",
    "LoaderState",
    "ModelSettings",
    "MultiModalDataset",
    "MultiModalIterableDataset",
    "OnlineDataset",
    "PackLoader",
    "PackPlan",
    "PackedTrainer",
    "PackedTraining",
    "Packing",
    "PackingConfig",
    "PacktrainError",
    "RankWatch",
    "Schedule",
    "SchemaOptions",
    "StepSettings",
    "__version__",
    "check_ranks",
    "load_model",
    "measure",
    "pack",
    "pack_arrays",
    "plan",
    "prepare_model",
    "step_tokens",
    "token_loss",
    "train",
    "trainer_arguments",
    "verify",
]

if TYPE_CHECKING:
    from packtrain.app.datasets.build import DatasetConfig, MultiModalDataset, MultiModalIterableDataset
    from packtrain.app.measure import measure
    from packtrain.app.pack import pack
    from packtrain.app.plan import plan
    from packtrain.app.train.run import train
    from packtrain.app.verify import verify
    from packtrain.batches.failures import FailureWatch
    from packtrain.batches.loader import PackLoader
    from packtrain.batches.loss import step_tokens, token_loss
    from packtrain.batches.online import OnlineDataset
    from packtrain.batches.sampler import check_ranks
    from packtrain.batches.trainer import PackedTraining, trainer_arguments
    from packtrain.batches.watch import RankWatch
    from packtrain.core.errors import PacktrainError
    from packtrain.costs.table import CostTable
    from packtrain.models.load import load_model
    from packtrain.models.prepare import prepare_model
    from packtrain.models.settings import ModelSettings
    from packtrain.plans.arrays import Packing, pack_arrays
    from packtrain.plans.config import PackingConfig
    from packtrain.plans.plan import PackPlan
    from packtrain.plans.schedule import LoaderState, Schedule
    from packtrain.records.schemas.options import SchemaOptions
    from packtrain.training.settings import StepSettings
    from packtrain.training.trainer import PackedTrainer

# Imported when first used, so that `import packtrain` and `packtrain --help` stay fast.
_LAZY = {
    "train": "packtrain.app.train.run",
    "StepSettings": "packtrain.training.settings",
    "PackedTrainer": "packtrain.training.trainer",
    "ModelSettings": "packtrain.models.settings",
    "PackLoader": "packtrain.batches.loader",
    "PackedTraining": "packtrain.batches.trainer",
    "trainer_arguments": "packtrain.batches.trainer",
    "check_ranks": "packtrain.batches.sampler",
    "token_loss": "packtrain.batches.loss",
    "step_tokens": "packtrain.batches.loss",
    "load_model": "packtrain.models.load",
    "prepare_model": "packtrain.models.prepare",
    "verify": "packtrain.app.verify",
    "FailureWatch": "packtrain.batches.failures",
    "RankWatch": "packtrain.batches.watch",
    "OnlineDataset": "packtrain.batches.online",
    "CostTable": "packtrain.costs.table",
    "DatasetConfig": "packtrain.app.datasets.build",
    "LoaderState": "packtrain.plans.schedule",
    "MultiModalDataset": "packtrain.app.datasets.build",
    "MultiModalIterableDataset": "packtrain.app.datasets.build",
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
