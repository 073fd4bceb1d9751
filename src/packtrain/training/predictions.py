"""BatchInfo -> its `Load`, and the time and memory that the estimates expect of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

from packtrain.delivery.collate.batch_values import BatchInfo
from packtrain.predicting.gpus import Gpu
from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, MemoryCoefficients, estimate_memory
from packtrain.predicting.time import Coefficients, step_time
from packtrain.predicting.values import Load, ModelShape, TrainingSetup


class Prediction(Protocol):
    """What a rank's part of a step should take."""

    def seconds(self, loads: Sequence[Load]) -> float: ...

    def memory_bytes(self, loads: Sequence[Load]) -> int: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPrediction:
    """By the time and memory models, with default or fitted coefficients."""

    shape: ModelShape
    setup: TrainingSetup
    gpu: Gpu
    time: Coefficients | None = None
    memory: MemoryCoefficients = DEFAULT_COEFFICIENTS

    def seconds(self, loads: Sequence[Load]) -> float:
        """One optimizer step over these passes. Time is a sum over their numbers, so their mean stands for them."""
        mean = _mean(loads)
        return step_time(self.shape, self.setup, mean, self.gpu, self.time, micro_batches=len(loads)).seconds

    def memory_bytes(self, loads: Sequence[Load]) -> int:
        """The peak of what torch allocates; the context and what the allocator cannot use stand outside of that."""
        estimates = [estimate_memory(self.shape, self.setup, load, self.memory) for load in loads]
        return max(estimate.total - estimate.part("framework").bytes for estimate in estimates)


def useful_load(info: BatchInfo) -> Load:
    """The real samples of a batch, without padding: what model FLOP utilisation counts."""
    patches, pictures = info.patches or 0, max(info.tiles, info.images + info.videos, 1)
    return Load(
        tokens=info.tokens,
        squared_tokens=info.squared_tokens or sum(length * length for length in info.lengths),
        longest=max(info.lengths, default=0),
        samples=max(info.samples, 1),
        rows=max(info.samples, 1) if len(info.keys) > 1 else 1,  # a padded batch has a row for each sample
        supervised_tokens=info.supervised_tokens,
        vision_tokens=info.vision_tokens,
        patches=patches,
        squared_patches=info.squared_patches or patches * patches // pictures,  # as if all were of one size
        largest_patches=-(-patches // pictures),
        images=info.images,
        frames=info.frames,
    )


def batch_load(info: BatchInfo) -> Load:
    """A batch as the GPU computes it, as plans and studies count it: padding attends too.

    In a pack the padding is a segment of its own; in a padded batch every row is as long as the longest.
    """
    load, tokens = useful_load(info), info.tokens + info.padding
    if load.rows > 1:
        return replace(load, tokens=tokens, squared_tokens=tokens * tokens // load.rows)
    return replace(
        load,
        tokens=tokens,
        squared_tokens=load.squared_tokens + info.padding**2,
        longest=max(load.longest, info.padding),
    )


def _mean(loads: Sequence[Load]) -> Load:
    """The load whose numbers are the mean of these; the longest and the largest stay what they are."""
    largest = ("longest", "largest_patches")
    values = {}
    for one in fields(Load):
        numbers = [getattr(load, one.name) for load in loads]
        values[one.name] = max(numbers) if one.name in largest else round(sum(numbers) / len(numbers))
    return Load(**values)
