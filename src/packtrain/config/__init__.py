"""Settings: YAML and other systems' configs in, checked sections and dataset settings out.

`load_config` takes a file (YAML, or another system's) and gives a `RunConfig` of typed sections; every key, its type,
default, help and aliases are declared there once. `DatasetConfig` holds those that a dataset needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.config.data_section import DataSection as DataSection
    from packtrain.config.dataset_config import DatasetConfig as DatasetConfig
    from packtrain.config.run_config import RunConfig as RunConfig
    from packtrain.config.run_config import load_config as load_config
    from packtrain.config.sections import ModelSection as ModelSection
    from packtrain.config.training_section import TrainingSection as TrainingSection

__getattr__, __dir__, __all__ = lazy_names(__name__)
