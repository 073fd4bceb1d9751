"""A run in a few numbers, and two or more runs at equal samples: the only fair place to compare losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from packtrain.runs.training_run import Steps, TrainingRun

LAST = 0.1  # the share of a run's samples that its final loss is a mean of; at least those of a step
FEWEST = 20  # steps of each run after warm-up, below which neither speeds are compared nor losses called the same
_NEAR = 0.02  # how far, relatively, from equal samples an evaluation may be
_UNREST = 16  # the last steps, by which it is judged how much the loss of one says


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The numbers of one run; None where the run does not say."""

    steps: int
    samples: float | None
    tokens: float | None
    seconds: float | None  # of training
    loss_start: float | None  # of the first step that has one
    loss_end: float | None  # mean over the last samples
    loss_window: float  # how many they are
    fall: (
        float | None
    )  # of the loss from the window before to the last one, relatively; None: not to be told from noise
    loss_not_finite: int  # steps
    eval_start: float | None
    eval_end: float | None
    eval_best: float | None
    tokens_per_second: float | None
    samples_per_second: float | None
    samples_per_step: float | None
    warm_steps: int  # in which workers start and layers are compiled: in no speed
    warm_seconds: float | None  # that they took
    step_seconds: float | None  # median
    padding: float | None  # share of computed positions that are padding
    mfu: float | None
    wait_share: float | None
    spread: float | None  # slowest rank over mean
    memory: float | None  # the peak
    memory_limit: float | None
    memory_share: float | None
    predicted_memory: float | None
    predicted_seconds: float | None  # of a step, median


@dataclass(frozen=True, kw_only=True, slots=True)
class AtEqualSamples:
    """Where one run stood when it had seen as many samples as the others; speed and times need FEWEST steps."""

    loss: float | None  # in training
    eval_loss: float | None  # None: no evaluation was near
    seconds: float | None  # its warm-up counted as fast as the rest
    tokens_per_second: float | None  # real tokens of these samples over those seconds
    steps: int
    to_target: float | None  # such seconds until its loss was as low as the highest of the runs' losses
    speedup: float | None  # seconds of the baseline over its own


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Runs side by side; positions are those of the list of runs."""

    samples: float  # seen by every run
    window: float  # samples that a loss is a mean over
    target: float | None  # the loss that all of them reached
    baseline: int
    fastest: int
    subject: int  # what the baseline is compared with: the fastest of the others
    evaluated: bool  # every run has an evaluation there, of which the losses are compared
    apart: float | None  # largest relative difference of the losses
    noise: float | None  # what losses in training may differ by because of single steps; None: too few to tell
    enough: bool  # every run has FEWEST steps after warm-up there
    runs: tuple[AtEqualSamples, ...]


def summarise_run(run: TrainingRun, window: float | None = None) -> Summary:
    """One run in numbers; its final loss is a mean over `window` samples, or as many as are usual."""
    steps = run.steps
    seconds = np.nan_to_num(steps["step_seconds"])
    window = loss_window(steps) if window is None else window
    warm = steps.warm
    timed = ~warm
    lasting = float(seconds[timed].sum())
    memory, limit = _most(steps["memory_bytes"]), _most(steps["memory_limit"])
    losses = [one.eval_loss for one in run.evaluations if np.isfinite(one.eval_loss)]
    taught = steps["supervised_tokens"] != 0  # others have no loss
    return Summary(
        steps=len(steps),
        samples=_last(steps["samples_seen"]),
        tokens=_last(steps["tokens_seen"]),
        seconds=float(seconds.sum()) or None,
        loss_start=_finite(steps["loss"][taught][0]) if taught.any() else None,
        loss_end=_finite(smooth_loss(steps, window)[taught][-1]) if taught.any() else None,
        loss_window=window,
        fall=_fall(steps, window),
        loss_not_finite=int((~np.isfinite(steps["loss"][taught])).sum()),
        eval_start=losses[0] if losses else None,
        eval_end=losses[-1] if losses else None,
        eval_best=min(losses, default=None),
        tokens_per_second=_per_second(steps, "tokens", timed, lasting),
        samples_per_second=_per_second(steps, "samples", timed, lasting),
        samples_per_step=_mean(steps["samples"]),
        warm_steps=int(warm.sum()),
        warm_seconds=float(seconds[warm].sum()) or None,
        step_seconds=_median(steps["step_seconds"][timed]),
        padding=_padding(steps),
        mfu=_weighted_mean(steps["mfu"][timed], seconds[timed]),
        wait_share=_waiting(steps, seconds, timed),
        spread=_weighted_mean(steps["spread"][timed], seconds[timed]),
        memory=memory,
        memory_limit=limit,
        memory_share=memory / limit if memory and limit else None,
        predicted_memory=_most(steps["predicted_memory_bytes"]),
        predicted_seconds=_median(steps["predicted_seconds"][timed]),
    )


def compare_runs(runs: Sequence[TrainingRun]) -> RunComparison | None:
    """Runs at as many samples as the shortest of them has seen; None where one has seen none."""
    samples_seen = [_last(run.steps["samples_seen"]) or 0.0 for run in runs]
    if len(runs) < 2 or min(samples_seen) <= 0:
        return None
    samples = min(samples_seen)
    window = max(loss_window(run.steps, samples) for run in runs)
    losses = [along(run.steps, samples, window) for run in runs]
    present = [loss for loss in losses if loss is not None]
    target = max(present) if len(present) == len(runs) else None
    times = [_at_samples(run.steps, run.steps.elapsed, samples) or None for run in runs]
    baseline = next((at for at, run in enumerate(runs) if run.facts.mode == "padded"), 0)
    judged = [_eval_loss_at(run, samples) for run in runs]
    evaluated = None not in judged
    reached = [int(np.searchsorted(run.steps["samples_seen"], samples * (1 - 1e-9)) + 1) for run in runs]
    enough = all((~run.steps.warm[:number]).sum() >= FEWEST for number, run in zip(reached, runs, strict=True))
    tokens = [_at_samples(run.steps, run.steps["tokens_seen"], samples) for run in runs]
    compared = tuple(
        AtEqualSamples(
            loss=losses[at],
            eval_loss=judged[at],
            seconds=times[at] if enough else None,
            tokens_per_second=_over(tokens[at], times[at]) if enough else None,
            steps=reached[at],
            to_target=_reaches(run.steps, target, window) if enough else None,
            speedup=_over(times[baseline], times[at]) if enough else None,
        )
        for at, run in enumerate(runs)
    )
    return RunComparison(
        samples=samples,
        window=window,
        target=target,
        baseline=baseline,
        fastest=min(range(len(runs)), key=lambda at: times[at] or np.inf),
        subject=min((at for at in range(len(runs)) if at != baseline), key=lambda at: times[at] or np.inf),
        evaluated=evaluated,
        apart=_apart(judged if evaluated else losses),
        noise=None if evaluated else _noise([(run.steps, number) for run, number in zip(runs, reached, strict=True)]),
        enough=enough,
        runs=compared,
    )


def loss_window(steps: Steps, samples: float | None = None) -> float:
    """The samples that a loss is a mean over: the last tenth, and those of the last step at least."""
    samples_seen = (samples if samples is not None else _last(steps["samples_seen"])) or 1.0
    last = steps["samples"][: np.searchsorted(steps["samples_seen"], samples_seen * (1 - 1e-9)) + 1][-1:]
    return float(max(LAST * samples_seen, np.nan_to_num(last).sum()))


def along(steps: Steps, samples: float, window: float) -> float | None:
    """The mean loss over the last samples, at a number of samples seen; None before the first step has ended."""
    if not len(steps) or samples < steps["samples_seen"][0]:
        return None
    sums = _Sums(steps["samples_seen"], steps["loss"], steps["supervised_tokens"])
    loss = _finite(float(sums.mean(np.array([samples - window]), sums.at(np.array([samples])))[0]))
    return loss if loss is not None else _at_samples(steps, smooth_loss(steps, window), samples)


def smooth_loss(steps: Steps, window: float) -> np.ndarray:
    """The mean loss of a token over the last samples, at each step."""
    return trailing_mean(steps["samples_seen"], steps["loss"], steps["supervised_tokens"], window)


def trailing_mean(x: np.ndarray, y: np.ndarray, weights: np.ndarray, width: float) -> np.ndarray:
    """The weighted mean over exactly the last `width` along x, at each step; what is not finite is left out.

    >>> trailing_mean(np.array([1.0, 2, 3]), np.array([3.0, 1, 2]), np.ones(3), 2.0).tolist()
    [3.0, 2.0, 1.5]
    """
    sums = _Sums(x, y, weights)
    return sums.mean(x - width, sums.after)


class _Sums:
    """Weighted sums along x, from its beginning: a step that is partly in a window counts by that part."""

    def __init__(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> None:
        good = np.isfinite(y) & np.isfinite(weights) & (weights > 0)
        weight = np.where(good, weights, 0.0)
        self._x = np.concatenate([[0.0], x])
        self._sums = np.stack([np.cumsum([0.0, *part]) for part in (weight * np.where(good, y, 0.0), weight)])

    @property
    def after(self) -> np.ndarray:
        """After each step."""
        return self._sums[:, 1:]

    def at(self, places: np.ndarray) -> np.ndarray:
        """Up to these places."""
        return np.stack([np.interp(places, self._x, part) for part in self._sums])

    def mean(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """From these places on, to where the sums are `ends`."""
        total, weight = ends - self.at(starts)
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.asarray(np.where(weight > 0, total / weight, np.nan))


def drawn_loss(steps: Steps, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smoothed loss for drawing: each mean is drawn at the middle of its window."""
    window = loss_window(steps)
    return trailing_mean(steps["samples_seen"], x, steps["supervised_tokens"], window), smooth_loss(steps, window)


def _at_samples(steps: Steps, values: np.ndarray, samples: float) -> float | None:
    """A column at a number of samples seen, interpolated between steps."""
    good = np.isfinite(values) & np.isfinite(steps["samples_seen"])
    return float(np.interp(samples, steps["samples_seen"][good], values[good])) if good.any() else None


def _padding(steps: Steps) -> float | None:
    """The share of padding among all positions that were computed."""
    share, tokens = steps["padding_share"], steps["tokens"]
    good = np.isfinite(share) & np.isfinite(tokens) & (tokens > 0) & (share < 1)
    if not good.any():
        return _weighted_mean(share, np.ones(len(steps)))
    return float(1 - tokens[good].sum() / (tokens[good] / (1 - share[good])).sum())


def _eval_loss_at(run: TrainingRun, samples: float) -> float | None:
    """The loss of the evaluation that is nearest to this many samples, if it is near and of every sample."""
    near = [
        one
        for one in run.evaluations
        if abs(one.samples_seen - samples) <= _NEAR * samples and np.isfinite(one.eval_loss) and not one.eval_failures
    ]
    return min(near, key=lambda one: abs(one.samples_seen - samples)).eval_loss if near else None


def _apart(losses: Sequence[float | None]) -> float | None:
    """How far the highest is above the lowest, relatively."""
    present = [loss for loss in losses if loss is not None]
    if len(present) < len(losses) or not min(present):
        return None
    return (max(present) - min(present)) / abs(min(present))


def _fall(steps: Steps, window: float) -> float | None:
    samples_seen = _last(steps["samples_seen"]) or 0.0
    noise = _noise([(steps, len(steps))] * 2)
    if len(steps) < FEWEST or samples_seen < 2 * window or noise is None:
        return None
    before, after = (along(steps, place, window) for place in (samples_seen - window, samples_seen))
    fall = 1 - after / before if before and after is not None else 0.0
    return fall if abs(fall) > noise else None


def _noise(runs: Sequence[tuple[Steps, int]]) -> float | None:
    """Two standard errors of the difference of two such losses, relatively, by how losses change from step to step."""
    errors = []
    for steps, reached in runs:
        losses = steps["loss"][max(0, reached - _UNREST) : reached]
        losses = losses[np.isfinite(losses)]
        if len(losses) < 4 or not losses.mean():
            return None
        deviation = float(np.diff(losses).std() / np.sqrt(2) / abs(losses.mean()))
        errors.append(deviation / np.sqrt(max(1.0, LAST * reached)))
    return float(2 * np.sqrt(sum(sorted((error**2 for error in errors), reverse=True)[:2])))


def _reaches(steps: Steps, target: float | None, window: float) -> float | None:
    """Seconds until the smoothed loss is at the target; a window that is not full yet says nothing."""
    if target is None:
        return None
    low = (smooth_loss(steps, window) <= target * (1 + 1e-9)) & (steps["samples_seen"] >= window * (1 - 1e-9))
    return float(steps.elapsed[np.argmax(low)]) if low.any() and steps.known("step_seconds") else None


def _per_second(steps: Steps, name: str, timed: np.ndarray, seconds: float) -> float | None:
    added = steps[name][timed]
    return float(np.nansum(added)) / seconds if seconds > 0 and np.isfinite(added).any() else None


def _waiting(steps: Steps, seconds: np.ndarray, timed: np.ndarray) -> float | None:
    if steps.known("data_wait_seconds") and seconds[timed].sum() > 0:
        return float(np.nansum(steps["data_wait_seconds"][timed]) / seconds[timed].sum())
    return _weighted_mean(steps["data_wait_share"][timed], seconds[timed])


def _weighted_mean(values: np.ndarray, weights: np.ndarray) -> float | None:
    good = np.isfinite(values) & (weights > 0)
    return float(np.average(values[good], weights=weights[good])) if good.any() else None


def _median(values: np.ndarray) -> float | None:
    good = values[np.isfinite(values)]
    return float(np.median(good)) if len(good) else None


def _mean(values: np.ndarray) -> float | None:
    return _weighted_mean(values, np.ones(len(values)))


def _most(values: np.ndarray) -> float | None:
    good = values[np.isfinite(values)]
    return float(good.max()) or None if len(good) else None


def _last(values: np.ndarray) -> float | None:
    good = values[np.isfinite(values)]
    return float(good[-1]) if len(good) else None


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None
