"""packtrain: measure, pack and train multimodal datasets at the speed the GPUs have."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "CostTable",
    "DatasetConfig",
    "FailureWatch",
    "Family",
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
    "register_family",
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
    from packtrain.core.errors import PacktrainError
    from packtrain.delivery.loader.failures import FailureWatch
    from packtrain.delivery.loader.loader import PackLoader
    from packtrain.delivery.loader.sampler import check_ranks
    from packtrain.delivery.online.dataset import OnlineDataset
    from packtrain.delivery.trainers.loss import step_tokens, token_loss
    from packtrain.delivery.trainers.mixin import PackedTraining, trainer_arguments
    from packtrain.delivery.trainers.watch import RankWatch
    from packtrain.families.family import Family
    from packtrain.families.registry import register_family
    from packtrain.measuring.table import CostTable
    from packtrain.modeling.load import load_model
    from packtrain.modeling.prepare import prepare_model
    from packtrain.modeling.settings import ModelSettings
    from packtrain.packing.arrays import Packing, pack_arrays
    from packtrain.packing.config import PackingConfig
    from packtrain.packing.plan import PackPlan
    from packtrain.packing.schedule import LoaderState, Schedule
    from packtrain.records.schemas.options import SchemaOptions
    from packtrain.training.settings import StepSettings
    from packtrain.training.trainer import PackedTrainer

# Imported when first used, so that `import packtrain` and `packtrain --help` stay fast.
_LAZY = {
    "train": "packtrain.app.train.run",
    "StepSettings": "packtrain.training.settings",
    "PackedTrainer": "packtrain.training.trainer",
    "ModelSettings": "packtrain.modeling.settings",
    "PackLoader": "packtrain.delivery.loader.loader",
    "PackedTraining": "packtrain.delivery.trainers.mixin",
    "trainer_arguments": "packtrain.delivery.trainers.mixin",
    "check_ranks": "packtrain.delivery.loader.sampler",
    "token_loss": "packtrain.delivery.trainers.loss",
    "step_tokens": "packtrain.delivery.trainers.loss",
    "load_model": "packtrain.modeling.load",
    "prepare_model": "packtrain.modeling.prepare",
    "verify": "packtrain.app.verify",
    "FailureWatch": "packtrain.delivery.loader.failures",
    "RankWatch": "packtrain.delivery.trainers.watch",
    "OnlineDataset": "packtrain.delivery.online.dataset",
    "CostTable": "packtrain.measuring.table",
    "DatasetConfig": "packtrain.app.datasets.build",
    "LoaderState": "packtrain.packing.schedule",
    "MultiModalDataset": "packtrain.app.datasets.build",
    "MultiModalIterableDataset": "packtrain.app.datasets.build",
    "PackPlan": "packtrain.packing.plan",
    "Packing": "packtrain.packing.arrays",
    "PackingConfig": "packtrain.packing.config",
    "Schedule": "packtrain.packing.schedule",
    "PacktrainError": "packtrain.core.errors",
    "SchemaOptions": "packtrain.records.schemas.options",
    "Family": "packtrain.families.family",
    "measure": "packtrain.app.measure",
    "register_family": "packtrain.families.registry",
    "pack": "packtrain.app.pack",
    "pack_arrays": "packtrain.packing.arrays",
    "plan": "packtrain.app.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
