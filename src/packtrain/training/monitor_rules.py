"""The rules of early warnings that look at the last steps. Each is a pure function: steps -> a diagnosis, or None.

Middle values and their spread are medians, so that one outlier neither raises a
warning about others nor hides the next.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, mean, median, variance
from typing import Any, NamedTuple

from packtrain.core.numbers import gib, percent
from packtrain.runs.early_warnings import Kind, MonitorLimits
from packtrain.runs.step_metrics import EvalMetrics, StepMetrics

_NORMAL = 1.4826  # median deviation of a normal distribution -> its standard deviation
_INSPECT = "`packtrain inspect RUN --step {step}` names its samples"


class Diagnosis(NamedTuple):
    """The message and the advice of a rule."""

    message: str
    advice: str


class History(NamedTuple):
    """The last steps that rules look at, with the present one at the end."""

    steps: Sequence[StepMetrics]
    steady: Sequence[StepMetrics]  # whose times count: without the first steps of a process


MonitorRule = Callable[[History, MonitorLimits], Diagnosis | None]


def loss_not_finite(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """The loss is not a number, or infinite."""
    now = history.steps[-1]
    if now.loss is None or math.isfinite(now.loss):
        return None
    return Diagnosis(
        "the loss is not a finite number",
        "resume from the last checkpoint with a lower learning_rate or a longer warm-up; with fp16, train in bf16. "
        f"{_INSPECT.format(step=now.step)}",
    )


def loss_spike(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """The loss is six robust standard deviations, and a fifth, above the median of the last 16 steps.

    In the first steps: four times their median, and one above it. The deviation is that of changes over 64 steps, so
    that a loss that falls steeply does not hide what jumps.
    """
    steps = history.steps
    now, past = _finite(steps[-1].loss), _numbers(one.loss for one in steps[-limits.window - 1 : -1])
    if now is None or not past:
        return None
    middle = median(past[-limits.min_steps :])
    if len(past) < limits.min_steps:
        explodes = now > limits.early_factor * middle and now - middle > 1
        finding = f"the loss is {now:.4g}, up from about {middle:.4g} in the first steps"
        return (
            Diagnosis(finding, "stop the run: lower learning_rate, lengthen the warm-up, set max_grad_norm")
            if explodes
            else None
        )
    changes = [after - before for before, after in pairwise(past)]
    sigma = max((_deviation(changes) if changes else 0.0) / math.sqrt(2), 0.01 * abs(middle))
    if now - middle <= max(limits.spike_sigmas * sigma, limits.spike_rise * abs(middle)):
        return None
    above = f"{(now - middle) / sigma:.0f} standard deviations above" if sigma else "above"  # exactly 0 until now
    return Diagnosis(
        f"the loss is {now:.4g}, {above} the {middle:.4g} before",
        "if it does not recover within a few steps, lower learning_rate or max_grad_norm, or lengthen the warm-up. "
        f"{_INSPECT.format(step=steps[-1].step)}",
    )


def gradient_high(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """The gradient norm is ten times the median of the last 64 steps."""
    steps = history.steps
    now, past = _finite(steps[-1].grad_norm), _numbers(one.grad_norm for one in steps[-limits.window - 1 : -1])
    if now is None or len(past) < limits.min_steps or now <= limits.gradient_factor * median(past):
        return None
    return Diagnosis(
        f"the gradient norm is {now:.4g}, usually {median(past):.4g}",
        f"set max_grad_norm (1.0 is common) to clip such steps. {_INSPECT.format(step=steps[-1].step)}",
    )


def gradient_exploding(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """Not finite three times in a row, or the median of five steps is ten times that of those before."""
    advice = "lower learning_rate, lengthen the warm-up, set max_grad_norm; with fp16, train in bf16"
    steps = history.steps
    if len(steps) >= 3 and all(one.grad_norm is not None and not math.isfinite(one.grad_norm) for one in steps[-3:]):
        return Diagnosis("the gradient norm was not finite three times in a row", advice)
    last, past = (_numbers(one.grad_norm for one in part) for part in (steps[-5:], steps[-limits.window - 5 : -5]))
    if len(last) < 5 or len(past) < limits.min_steps or median(last) <= limits.gradient_factor * median(past):
        return None
    return Diagnosis(
        f"the gradient norm went from about {median(past):.4g} to about {median(last):.4g} and stays", advice
    )


def gradient_zero(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """The gradient norm is exactly zero."""
    now = history.steps[-1]
    if now.grad_norm != 0.0:
        return None
    if now.loss is None:
        return Diagnosis(
            "the step has no supervised tokens: the weights do not change",
            "answers are cut off (overlong: truncate or split, with too short a packing_length) or masked out of the "
            f"loss (loss_on). {_INSPECT.format(step=now.step)}",
        )
    return Diagnosis(
        "the gradient norm is zero: nothing is trained",
        "check the trainable parameters (train_language, train_vision, train_projector, lora_target_modules) and the "
        f"loss mask (loss_on). {_INSPECT.format(step=now.step)}",
    )


def learning_rate_zero(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """All learning rates have been zero for three steps; one or two are the ends of many schedules."""
    last = history.steps[-3:]
    if len(last) < 3 or any(max(one.learning_rates.values(), default=None) != 0.0 for one in last):
        return None
    return Diagnosis(
        "all learning rates have been zero for three steps",
        "the schedule is shorter than the run, or learning_rate is 0: compare max_steps, num_train_epochs and warm-up",
    )


def memory_near_limit(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """At least 92 % of the GPU were allocated."""
    now = history.steps[-1]
    share, used, limit = now.memory_share, now.memory_bytes, now.memory_limit
    if not share or not used or not limit or share < limits.memory_share:
        return None
    return Diagnosis(
        f"{gib(used)} of {gib(limit)} were allocated ({percent(share)})",
        "a larger pack may not fit: lower packing_length, set vision_batch_patches or max_patches_per_pack, or turn "
        "on gradient_checkpointing or vision_checkpointing",
    )


def data_bound(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """Over 20 steps more than a tenth of the time was waiting for batches."""
    last = history.steady
    seconds = sum(one.step_seconds for one in last)
    share = sum(one.data_wait_seconds for one in last) / seconds if seconds else 0.0
    if len(last) < limits.timing_window or share <= limits.wait_share:
        return None
    return Diagnosis(
        f"{percent(share)} of the time of the last {len(last)} steps was spent waiting for data",
        "raise dataloader_num_workers or dataloader_prefetch_factor; when streaming, raise cache_bytes or put the "
        "cache on a faster disk; lower media limits make decoding cheaper",
    )


def unequal_ranks(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """Over 20 steps the slowest rank took 1.15 times the mean."""
    last = history.steady
    if len(last) < limits.timing_window or (spread := mean(one.spread for one in last)) <= limits.rank_imbalance:
        return None
    rank, times = Counter(one.slowest_rank for one in last).most_common(1)[0]
    work = _numbers(one.work_spread for one in last)
    planned = mean(work) if work else None
    finding = f"the slowest rank takes {spread:.2f} times the mean; in {times} of {len(last)} steps it was rank {rank}"
    if planned is not None and planned > (1 + limits.rank_imbalance) / 2:
        advice = "the ranks have unequal work: raise packs_per_step, or set balance: strict"
        return Diagnosis(f"{finding}; their work differs by {planned:.2f}", advice)
    return Diagnosis(finding, f"their work is equal: check the GPU, host and disk of rank {rank}")


def instability(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """From one half of the last 100 steps to the other, changes of the loss or the norm became three times as large."""
    half, steps = max(limits.min_steps, 50), history.steps
    before, after = steps[-2 * half : -half], steps[-half:]
    if len(before) < half:
        return None
    for name, least in (("loss", 0.02), ("grad_norm", 0.5)):
        old, new = (_numbers(getattr(one, name) for one in part) for part in (before, after))
        if min(len(old), len(new)) < limits.min_steps:
            continue
        was, now = _variability(old), _variability(new)
        if now > least and now > limits.variance_factor * was:
            what = "loss" if name == "loss" else "gradient norm"
            return Diagnosis(
                f"the {what} changes by {percent(now)} from step to step, up from {percent(was)}",
                "lower learning_rate or max_grad_norm, or raise packs_per_step",
            )
    return None


def time_mismatch(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """Over 20 steps the time without waiting for data is 1.25 times the predicted time, or the other way round."""
    last = [(one.step_seconds - one.data_wait_seconds, one.predicted_seconds) for one in history.steady]
    ratios = [real / predicted for real, predicted in last if predicted]
    if len(ratios) < limits.timing_window or _near(median(ratios), limits.time_mismatch):
        return None
    faster = median(ratios) < 1
    return Diagnosis(
        f"steps take {median(ratios):.2f} times the predicted time",
        "`packtrain calibrate` fits the prediction to this machine"
        + ("" if faster else "; if already calibrated, something else uses the GPU or the host is too slow"),
    )


def memory_mismatch(history: History, limits: MonitorLimits) -> Diagnosis | None:
    """Over 20 steps the memory is 1.1 times the predicted memory of their packs, or the other way round."""
    last = [(one.memory_bytes, one.predicted_memory_bytes) for one in history.steady]
    ratios = [real / predicted for real, predicted in last if real and predicted]
    if len(ratios) < limits.timing_window or _near(median(ratios), limits.memory_mismatch):
        return None
    return Diagnosis(
        f"steps need {median(ratios):.2f} times the predicted memory",
        "`packtrain calibrate` fits the prediction to this machine; until then do not rely on the predicted "
        "packing_length",
    )


RULES: Mapping[Kind, MonitorRule] = {
    "loss_not_finite": loss_not_finite,
    "loss_spike": loss_spike,
    "gradient_high": gradient_high,
    "gradient_exploding": gradient_exploding,
    "gradient_zero": gradient_zero,
    "learning_rate_zero": learning_rate_zero,
    "memory_near_limit": memory_near_limit,
    "data_bound": data_bound,
    "unequal_ranks": unequal_ranks,
    "instability": instability,
    "time_mismatch": time_mismatch,
    "memory_mismatch": memory_mismatch,
}


def _numbers(values: Iterable[float | None]) -> list[float]:
    """Those that are known and finite."""
    return [value for value in values if value is not None and math.isfinite(value)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _deviation(values: Sequence[float]) -> float:
    """A standard deviation that outliers do not move."""
    middle = median(values)
    return _NORMAL * median(abs(value - middle) for value in values)


def _variability(values: Sequence[float]) -> float:
    """How much values change from one to the next, as a share of their size; a steady trend is no unrest."""
    changes = [after - before for before, after in pairwise(values)] or [0.0]
    return _deviation(changes) / max(abs(median(values)), 1e-12)


def _near(ratio: float, apart: float) -> bool:
    return abs(math.log(ratio)) <= math.log1p(apart) if ratio > 0 else False


# ---- rules that look further back than the last steps: is the loss still falling?

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

    def after(self, metrics: StepMetrics) -> Diagnosis | None:
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
        finished = (fmean(self._losses), variance(self._losses) / len(self._losses))
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

    def _judge(self) -> Diagnosis | None:
        for number in _COMPARED:
            if len(self._spans) < 2 * number:
                return None
            before, after = self._spans[-2 * number : -number], self._spans[-number:]
            was, now = (fmean(one for one, _ in part) for part in (before, after))
            error = math.sqrt(sum(squared for _, squared in (*before, *after))) / number
            least, most = (share * abs(was) for share in (self._limits.plateau_improvement, 0.02))
            if was - now < least and was - now + _CERTAIN * error < most:
                return self._diagnosis(number, was, now)
        return None

    def _diagnosis(self, number: int, was: float, now: float) -> Diagnosis:
        samples = number * self._limits.plateau_samples
        return Diagnosis(
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

    def after(self, metrics: EvalMetrics) -> Diagnosis | None:
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
        return Diagnosis(
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
