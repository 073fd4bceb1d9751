"""Is the loss still falling? Two warnings that look further back than the last steps: a plateau, and overfitting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean as mean
from statistics import variance
from typing import Any

from packtrain.runs.history import MonitorLimits
from packtrain.runs.step_metrics import EvalMetrics, StepMetrics
from packtrain.training.monitor_rules import Found

_COMPARED = (3, 6, 12, 24, 48)  # spans, with as many before them
_CERTAIN = 3.0  # standard errors: it is checked often


class Plateau:
    """The mean loss over spans of samples is not 0.5 % below that over as many before.

    Noise decides how many: three where losses are smooth, more where only more can rule out that it fell by 2 %.
    Spans are of samples, not of steps, so that packed and padded runs are judged alike. While the learning rate
    rises, or where it is nearly used up, nothing is judged.
    """

    def __init__(self, limits: MonitorLimits) -> None:
        self._limits = limits
        self._spans: list[tuple[float, float]] = []  # mean loss, and its squared standard error
        self._highest = 0.0  # learning rate
        self._samples, self._first_rate = 0, 0.0  # of the span that is not finished
        self._losses: list[float] = []

    def after(self, metrics: StepMetrics) -> Found | None:
        """Add a step."""
        rate = max(metrics.learning_rates.values(), default=0.0)
        self._highest = max(self._highest, rate)
        if not self._losses:
            self._first_rate = rate
        if metrics.loss is not None and math.isfinite(metrics.loss):
            self._losses.append(metrics.loss)
        self._samples += metrics.samples
        if self._samples < self._limits.plateau_samples or len(self._losses) < self._limits.plateau_steps:
            return None
        finished = (mean(self._losses), variance(self._losses) / len(self._losses))
        warming = rate > self._first_rate
        self._spans = [] if warming else [*self._spans, finished][-2 * _COMPARED[-1] :]
        self._samples, self._losses = 0, []
        return None if rate < self._highest / 10 else self._judge()

    def state_dict(self) -> dict[str, Any]:
        return {
            "spans": [list(span) for span in self._spans],
            "highest": self._highest,
            "samples": self._samples,
            "losses": list(self._losses),
            "first_rate": self._first_rate,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._spans = [(float(one), float(other)) for one, other in state["spans"]]
        self._highest, self._first_rate = float(state["highest"]), float(state["first_rate"])
        self._samples, self._losses = int(state["samples"]), list(state["losses"])

    def _judge(self) -> Found | None:
        for number in _COMPARED:
            if len(self._spans) < 2 * number:
                return None
            before, after = self._spans[-2 * number : -number], self._spans[-number:]
            was, now = (mean(one for one, _ in part) for part in (before, after))
            error = math.sqrt(sum(squared for _, squared in (*before, *after))) / number
            least, most = (share * abs(was) for share in (self._limits.plateau_improvement, 0.02))
            if was - now < least and was - now + _CERTAIN * error < most:
                return self._found(number, was, now)
        return None

    def _found(self, number: int, was: float, now: float) -> Found:
        samples = number * self._limits.plateau_samples
        return Found(
            f"the mean loss over the last {samples:,} samples or more is {now:.4g}, over as many before that {was:.4g}",
            "try a higher or decaying learning_rate, more trainable parameters or a larger lora_rank; if the "
            "evaluation loss is good enough, stop here",
        )


class Overfitting:
    """Evaluation loss rose twice in a row and is 1 % above its best, while the training loss fell."""

    def __init__(self, limits: MonitorLimits) -> None:
        self._limits = limits
        self._evaluations: list[tuple[float, float]] = []  # evaluation loss, mean training loss before it
        self._best: float | None = None
        self._sum, self._steps = 0.0, 0

    def trained(self, loss: float | None) -> None:
        """Add a step."""
        if loss is not None and math.isfinite(loss):
            self._sum, self._steps = self._sum + loss, self._steps + 1

    def after(self, metrics: EvalMetrics) -> Found | None:
        """Add an evaluation."""
        if self._steps == 0 or not math.isfinite(metrics.eval_loss):
            return None
        self._evaluations = [*self._evaluations, (metrics.eval_loss, self._sum / self._steps)][-3:]
        self._sum, self._steps = 0.0, 0
        best = metrics.eval_loss if self._best is None else min(self._best, metrics.eval_loss)
        self._best = best
        if len(self._evaluations) < 3:
            return None
        losses, training = zip(*self._evaluations, strict=True)
        rising = losses[0] < losses[1] < losses[2] and losses[2] > (1 + self._limits.eval_rise) * best
        if not rising or training[2] >= training[0]:
            return None
        return Found(
            f"evaluation loss rose from {losses[0]:.4g} to {losses[2]:.4g} while training loss fell from "
            f"{training[0]:.4g} to {training[2]:.4g}; each sample was seen {metrics.epoch:.1f} times",
            "stop early (early_stopping_patience) or use the best checkpoint; fewer epochs, more data, a smaller "
            "lora_rank or lora_dropout prevent overfitting",
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "evaluations": [list(pair) for pair in self._evaluations],
            "best": self._best,
            "training": [self._sum, self._steps],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._evaluations = [(float(one), float(other)) for one, other in state["evaluations"]]
        self._best = None if state["best"] is None else float(state["best"])
        self._sum, self._steps = state["training"]
