"""What one optimizer step was, as the trainer of one rank saw it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from packtrain.batches.values import BatchInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """One optimizer step of one rank. The trainer makes it, the meter turns those of all ranks into metrics."""

    step: int  # counted from 1, over the whole run
    epoch: float
    loss: float  # of the step over all ranks: sum over its tokens divided by their number
    grad_norm: float | None
    learning_rates: Mapping[str, float]  # by part: language, vision, connector
    batches: tuple[BatchInfo, ...]  # of this rank
    seconds: float  # from the end of the step before to the end of this one
    data_seconds: float  # of it: waiting for batches
    own_seconds: float  # of it: until this rank was done and waited for the others
    memory_bytes: int = 0  # the most that torch had allocated on this rank's GPU; 0 without one
    memory_limit: int = 0  # what that GPU has
