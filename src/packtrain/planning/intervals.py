"""The training settings that follow from another number of samples per step: intervals, warm-up, learning rates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from packtrain.planning.question import Baseline

MOVED = 0.05  # by how much the samples of a step may change before learning rates are looked at
_EVALUATIONS, _LOGS = 4, 100  # of an epoch, where the user has no interval
_LEAST = 10  # steps between evaluations or saves, unless an epoch is shorter
RATES = ("learning_rate", "vit_lr", "aligner_lr")


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals:
    """What to train with when a step has so many samples; rates are None where the user gave none."""

    steps: int  # an epoch
    factor: float  # samples per step, over those of the baseline
    eval_steps: int
    save_steps: int
    save_delay_steps: int
    logging_steps: int
    warmup_ratio: float | None
    warmup_steps: int | None
    learning_rate: float | None
    vit_lr: float | None
    aligner_lr: float | None

    @property
    def moved(self) -> bool:
        """Do learning rates need a look?"""
        return abs(self.factor - 1) > MOVED


def derive_intervals(baseline: Baseline, *, before: float, after: float, steps: int) -> Intervals:
    """Intervals that see as many samples as before; rates by the square root of the change, where it matters.

    `before` and `after` are samples per step, `steps` those of one epoch with `after`.
    """
    factor = after / before

    apart = factor if abs(factor - 1) > MOVED else 1.0  # steps of about as many samples keep their intervals

    def interval(given: int | None, parts: int, least: int) -> int:
        wanted = steps / parts if given is None else given / apart
        return max(min(least, steps), round(wanted))

    whole = steps * baseline.epochs  # beyond it nothing would be evaluated or saved
    evaluate = min(interval(baseline.eval_steps, _EVALUATIONS, _LEAST), whole)
    save = evaluate if baseline.save_steps is None else interval(baseline.save_steps, _EVALUATIONS, _LEAST)
    save = min(save, whole)
    if baseline.eval_steps and baseline.save_steps and baseline.save_steps % baseline.eval_steps == 0:
        # The best checkpoint can only be kept where it was evaluated.
        save = evaluate * min(baseline.save_steps // baseline.eval_steps, max(1, whole // evaluate))
    delay = baseline.save_delay_steps
    warmup = None if baseline.warmup_steps is None else round(baseline.warmup_steps / apart)
    scale = math.sqrt(factor) if abs(factor - 1) > MOVED else 1.0
    rates = {name: _scaled(getattr(baseline, name), scale) for name in RATES}
    return Intervals(
        steps=steps,
        factor=factor,
        eval_steps=evaluate,
        save_steps=save,
        save_delay_steps=save if delay is None else min(round(delay / apart), whole // 2),
        logging_steps=interval(baseline.logging_steps, _LOGS, 1),
        warmup_ratio=baseline.warmup_ratio,
        warmup_steps=warmup,
        **rates,
    )


def _scaled(rate: float | None, scale: float) -> float | None:
    if rate is None or scale == 1.0:
        return rate
    return float(f"{rate * scale:.3g}")
