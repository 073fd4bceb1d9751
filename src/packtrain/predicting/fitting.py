"""Fits a few positive numbers of a frozen value so that predictions come near measurements, in ratios.

Each number has a place where it starts and a spread: how far from there it may reasonably be. Where measurements say
little about a number it stays near its start, so that few of them are enough and none can make it absurd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Value = TypeVar("Value")
Floats = NDArray[np.float64]
NOISE = 0.03  # a measurement, or the model's form, is off by about this share
_OUTLIER = 2.5  # times the noise: from there on a measurement pulls no harder
_ROUNDS, _STEP, _LARGEST_MOVE = 60, 1e-4, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """A number that is fitted: by about which factor it may move, and between which bounds."""

    name: str
    spread: float  # of its logarithm
    low: float
    high: float


def fit_ratios(
    start: Value, knobs: Sequence[Knob], predict: Callable[[Value], Sequence[float]], measured: Sequence[float]
) -> Value:
    """The value whose predictions are nearest to the measurements, by damped Gauss-Newton steps on log ratios."""
    if not measured or not knobs:
        return start
    begin = np.log([getattr(start, knob.name) for knob in knobs])
    low, high = (np.log([getattr(knob, end) for knob in knobs]) for end in ("low", "high"))
    spread = np.array([knob.spread for knob in knobs])
    target = np.log(np.asarray(measured, np.float64))

    def of(place: Floats) -> Value:
        values = {knob.name: float(value) for knob, value in zip(knobs, np.exp(place), strict=True)}
        return replace(start, **values)  # type: ignore[type-var]

    def off(place: Floats) -> Floats:
        return np.asarray((np.log(predict(of(place))) - target) / NOISE)

    def cost(place: Floats) -> float:
        size = np.abs(off(place))
        bent = np.where(size <= _OUTLIER, size**2, _OUTLIER * (2 * size - _OUTLIER))  # Huber's
        return float(bent.sum() + (((place - begin) / spread) ** 2).sum())

    place, damping = np.clip(begin, low, high), 1e-3
    now = cost(place)
    for _ in range(_ROUNDS):
        inward = np.where(place + _STEP > high, -_STEP, _STEP)  # no value is ever asked for beyond its bounds
        move = _move(place, begin, spread, off, damping, inward)
        there = np.clip(place + np.clip(move, -_LARGEST_MOVE, _LARGEST_MOVE), low, high)
        then = cost(there)
        if then < now:
            finished = now - then < 1e-9 * (1 + now)
            place, now, damping = there, then, damping / 3
            if finished:
                break
        elif damping > 1e8:
            break
        else:
            damping *= 5
    return of(place)


def _move(
    place: Floats, begin: Floats, spread: Floats, off: Callable[[Floats], Floats], damping: float, steps: Floats
) -> Floats:
    """One damped step towards the least squares of what is off, outliers weighed down."""
    here = off(place)
    columns = [(off(place + step * unit) - here) / step for step, unit in zip(steps, np.eye(len(place)), strict=True)]
    slopes = np.stack(columns, axis=1)
    weights = np.minimum(1.0, _OUTLIER / np.maximum(np.abs(here), 1e-12))
    weighed: Any = slopes * weights[:, None]
    matrix = slopes.T @ weighed + np.diag(spread**-2)
    gradient = weighed.T @ here + (place - begin) / spread**2
    return np.asarray(np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -gradient))
