"""Batches -> optimizer steps: the trainer, its checkpoints, metrics and early warnings.

Takes a prepared model, a packed dataset, transformers' TrainingArguments and `StepSettings`; `PackedTrainer.train()`
leaves checkpoints from which it resumes exactly. `StepMeter` measures steps, `Monitors` warn early.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.training.meter import StepMeter as StepMeter
    from packtrain.training.monitors import Monitors as Monitors
    from packtrain.training.step_settings import StepSettings as StepSettings
    from packtrain.training.trainer import PackedTrainer as PackedTrainer

__getattr__, __dir__, __all__ = lazy_names(__name__)
