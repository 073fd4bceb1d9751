"""Steps of a run that never was: numbers as a healthy run on one GPU has them, and whatever a test changes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from packtrain.runs.step_metrics import EvalMetrics, StepMetrics

GIB = 1 << 30
NOISE = random.Random(5)
_WOBBLE = [1 + 0.01 * NOISE.uniform(-1, 1) for _ in range(997)]


def step_of(step: int = 1, **given: Any) -> StepMetrics:
    """One step; learning goes on and the loss wobbles by a percent."""
    wobble = _WOBBLE[step % len(_WOBBLE)]
    values: dict[str, Any] = {
        "step": step,
        "epoch": step / 100,
        "loss": (1 + 4 * 0.995**step) * wobble,
        "grad_norm": 0.8 * wobble,
        "learning_rates": {"language": 1e-4},
        "batches": 8,
        "samples": 128,
        "tokens": 64_000,
        "supervised_tokens": 30_000,
        "images": 100,
        "patches": 50_000,
        "seq_len_avg": 8_000.0,
        "seq_len_min": 7_900,
        "seq_len_max": 8_100,
        "fill": 0.98,
        "padding_share": 0.02,
        "step_seconds": 2.0 * wobble,
        "tokens_per_second": 32_000.0,
        "samples_per_second": 64.0,
        "images_per_second": 50.0,
        "patches_per_second": 25_000.0,
        "data_wait_seconds": 0.02,
        "data_wait_share": 0.01,
        "rank_seconds": (2.0, 2.02),
        "spread": 1.005,
        "work_spread": 1.01,
        "flops": 8.8e14,
        "mfu": 0.44,
        "memory_bytes": 60 * GIB,
        "memory_limit": 80 * GIB,
        "samples_seen": 128 * step,
        "tokens_seen": 64_000 * step,
        "predicted_seconds": 2.1,
        "predicted_memory_bytes": 61 * GIB,
    }
    return StepMetrics(**{**values, **given})


def eval_of(step: int, loss: float, epoch: float = 1.0) -> EvalMetrics:
    return EvalMetrics(step=step, epoch=epoch, eval_loss=loss, samples_seen=128 * step)


def healthy(steps: int, start: int = 1) -> Iterable[StepMetrics]:
    return [step_of(step) for step in range(start, start + steps)]
