"""A model's config and costs -> parameters, FLOPs, GPU memory, time, host memory and disk. Numpy only.

Takes a `ModelShape` (`read_shape`), a `TrainingSetup` and a `Load`, which is what one forward pass sees, and predicts
its peak of GPU memory (`estimate_memory`), a step's seconds on a `Gpu` (`step_time`) and what a node needs
(`host_needs`); with the coefficients of a calibration of this GPU, if there is one (`coefficients_for`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from packtrain.core.lazy import lazy_names

if TYPE_CHECKING:
    from packtrain.predicting.calibration import coefficients_for as coefficients_for
    from packtrain.predicting.flops import training_flops as training_flops
    from packtrain.predicting.gpus import Gpu as Gpu
    from packtrain.predicting.gpus import find_gpu as find_gpu
    from packtrain.predicting.host_memory import host_needs as host_needs
    from packtrain.predicting.memory import MemoryEstimate as MemoryEstimate
    from packtrain.predicting.memory import estimate_memory as estimate_memory
    from packtrain.predicting.memory import largest_tokens as largest_tokens
    from packtrain.predicting.shapes import read_shape as read_shape
    from packtrain.predicting.time import StepTime as StepTime
    from packtrain.predicting.time import step_time as step_time
    from packtrain.predicting.values import Load as Load
    from packtrain.predicting.values import ModelShape as ModelShape
    from packtrain.predicting.values import TrainingSetup as TrainingSetup

__getattr__, __dir__, __all__ = lazy_names(__name__)
