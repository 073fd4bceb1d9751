"""Sequence packing for fine-tuning vision-language and text models: measure a dataset, plan, pack, train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from packtrain.app.datasets import DatasetConfig as DatasetConfig
    from packtrain.app.datasets import MultiModalDataset as MultiModalDataset
    from packtrain.app.datasets import MultiModalIterableDataset as MultiModalIterableDataset
    from packtrain.app.measure import measure as measure
    from packtrain.app.pack import pack as pack
    from packtrain.app.plan import plan as plan
    from packtrain.app.train.train import train as train
    from packtrain.app.verify import verify as verify
    from packtrain.core.errors import PacktrainError as PacktrainError
    from packtrain.delivery.loader.failures import FailureCounter as FailureCounter
    from packtrain.delivery.loader.pack_loader import PackLoader as PackLoader
    from packtrain.delivery.loader.sampler import check_ranks as check_ranks
    from packtrain.delivery.trainers.mixin import PackedTrainerMixin as PackedTrainerMixin
    from packtrain.delivery.trainers.mixin import trainer_arguments as trainer_arguments
    from packtrain.delivery.trainers.token_loss import step_tokens as step_tokens
    from packtrain.delivery.trainers.token_loss import token_loss as token_loss
    from packtrain.delivery.trainers.watch import RankWatchdog as RankWatchdog
    from packtrain.families.family import Family as Family
    from packtrain.families.registry import register_family as register_family
    from packtrain.measuring.table import CostTable as CostTable
    from packtrain.modeling.load import load_model as load_model
    from packtrain.modeling.model_settings import ModelSettings as ModelSettings
    from packtrain.modeling.preparation import prepare_model as prepare_model
    from packtrain.packing.arrays import Packing as Packing
    from packtrain.packing.arrays import pack_arrays as pack_arrays
    from packtrain.packing.pack_plan import PackPlan as PackPlan
    from packtrain.packing.packing_config import PackingConfig as PackingConfig
    from packtrain.packing.schedule import LoaderState as LoaderState
    from packtrain.packing.schedule import Schedule as Schedule
    from packtrain.records.schemas.converters import SchemaOptions as SchemaOptions
    from packtrain.training.step_settings import StepSettings as StepSettings
    from packtrain.training.trainer import PackedTrainer as PackedTrainer

__getattr__, __dir__, __all__ = lazy_names(__name__)
__all__ += ["__version__"]
