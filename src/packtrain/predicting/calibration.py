"""Measured training steps -> the coefficients of the time and memory models for one GPU, and the file that keeps them.

Layers that run as they are written and compiled layers are fitted apart: they keep and move different things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from packtrain.core.artifacts import read_json, write_json
from packtrain.core.cache_root import cache_dir
from packtrain.core.dataclass_json import from_json
from packtrain.core.errors import ArtifactError
from packtrain.predicting.gpus import Gpu
from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, MemoryCoefficients, estimate_memory
from packtrain.predicting.time import (
    Coefficients,
    default_coefficients,
    optimizer_seconds,
    step_time,
    waiting_seconds,
    waits,
)
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

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


KIND, VERSION = "calibration", 1
Mode = Literal["eager", "compiled"]
MODES: tuple[Mode, ...] = ("eager", "compiled")
_TIME = (
    Knob(name="matmul_efficiency", spread=0.1, low=0.002, high=1.0),
    Knob(name="attention_efficiency", spread=0.3, low=0.002, high=1.0),
    Knob(name="elementwise_passes", spread=0.4, low=0.5, high=200.0),
    Knob(name="vision_factor", spread=0.2, low=0.3, high=5.0),
    Knob(name="recomputed_share", spread=0.12, low=0.5, high=1.3),
    Knob(name="layer_seconds", spread=1.5, low=1e-6, high=0.05),
)
# Where a fit starts. Not at the defaults, which are themselves a calibration: what it found would count twice.
_STARTS: dict[Mode, Coefficients] = {
    "eager": Coefficients(
        matmul_efficiency=0.75,
        attention_efficiency=0.35,
        elementwise_passes=4.88,
        vision_factor=1.0,
        recomputed_share=1.0,
        layer_seconds=0.00384,
        waiting_seconds=0.05,
    ),
}
_STARTS["compiled"] = replace(_STARTS["eager"], elementwise_passes=4.3, layer_seconds=0.003, waiting_seconds=0.025)
_IN_EVERY_FIT = "bandwidth_efficiency"  # of the time model in its present form
_WAITING = Knob(name="waiting_seconds", spread=1.0, low=1e-6, high=5.0)
_MASKED = Knob(name="masked_attention_efficiency", spread=0.5, low=0.001, high=1.0)
_MEMORY = (
    Knob(name="activation_scale", spread=0.2, low=0.3, high=3.0),
    Knob(name="vision_scale", spread=0.2, low=0.3, high=3.0),
)
_MASKS = Knob(name="attention_scale", spread=0.3, low=0.2, high=5.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One setting, run for a few steps. Bytes are 0 where there is no GPU to ask."""

    name: str
    model: str
    shape: ModelShape
    setup: TrainingSetup
    load: Load
    held_out: bool = False  # not fitted to: what predictions are judged by
    seconds: float = 0.0  # of a step, its optimizer included; the median
    pass_seconds: float = 0.0  # of it, forward and backward
    allocated: int = 0  # the most that torch had allocated
    reserved: int = 0  # the most that it had asked the driver for
    context: int = 0  # what the driver reports beyond that
    waited: bool = False  # the host asked the GPU for sizes of images, which training may spare it
    error: str = ""  # why there are no numbers: memory was not enough, or the setting does not run

    @property
    def mode(self) -> Mode:
        return "compiled" if self.setup.compiled else "eager"

    @property
    def padded(self) -> bool:
        return self.load.rows > 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Coefficients of one mode."""

    time: Coefficients
    memory: MemoryCoefficients


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """One measurement beside what the models say of it."""

    measurement: Measurement
    seconds: float
    allocated: int
    held_out: bool  # the coefficients do not know it

    @property
    def time_error(self) -> float:
        """By which share of the measured time the prediction is too long."""
        return self.seconds / self.measurement.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """The same of allocated memory; None where nothing was measured."""
        return self.allocated / self.measurement.allocated - 1 if self.measurement.allocated else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was measured on one kind of GPU, and what was fitted to it."""

    gpu: str  # as in the catalogue of GPUs
    device: str  # as the driver calls it
    torch: str
    transformers: str
    date: str
    fits: dict[Mode, Fit]
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)  # why it may not hold here any more


def fit(measurements: Sequence[Measurement], gpu: Gpu) -> dict[Mode, Fit]:
    """Coefficients for each mode of which anything was measured; held-out measurements are not looked at."""
    fits: dict[Mode, Fit] = {}
    for mode in MODES:
        known = [one for one in measurements if one.mode == mode and not one.held_out and not one.error]
        if known:
            fits[mode] = Fit(time=_fit_time(known, gpu, mode), memory=_fit_memory(known))
    return fits


def _fit_time(known: Sequence[Measurement], gpu: Gpu, mode: Mode) -> Coefficients:
    start = _with_bandwidth(_STARTS[mode], known, gpu)
    masked = any(_is_masked(one) for one in known)
    knobs = (*_TIME, _WAITING, _MASKED) if masked else (*_TIME, _WAITING)

    def predict(chosen: Coefficients) -> list[float]:
        return [seconds(one, chosen, gpu) for one in known]

    fitted = fit_ratios(start, knobs, predict, [one.seconds for one in known])
    if not masked:  # nothing was measured of it: as it is by default, beside attention without a mask
        usual = default_coefficients(compiled=mode == "compiled")
        beside = usual.masked_attention_efficiency / usual.attention_efficiency
        fitted = replace(fitted, masked_attention_efficiency=min(1.0, beside * fitted.attention_efficiency))
    return replace(fitted, fitted=True)


def _with_bandwidth(start: Coefficients, known: Sequence[Measurement], gpu: Gpu) -> Coefficients:
    """What the memory reaches is measured by itself: an optimizer that updates everything does nothing else."""
    sheet = replace(start, bandwidth_efficiency=1.0)
    reached = [
        optimizer_seconds(one.shape, one.setup, gpu, sheet) / (one.seconds - one.pass_seconds)
        for one in known
        if one.setup.method == "full" and 0 < one.pass_seconds < one.seconds
    ]
    return replace(start, bandwidth_efficiency=min(1.0, median(reached))) if reached else start


def seconds(one: Measurement, chosen: Coefficients, gpu: Gpu) -> float:
    """What the step should have taken, as it was measured."""
    predicted = step_time(one.shape, one.setup, one.load, gpu, chosen).seconds
    spared = one.waited and not waits(one.shape)
    return predicted + (waiting_seconds(one.shape, one.setup, one.load, chosen) if spared else 0.0)


def _fit_memory(known: Sequence[Measurement]) -> MemoryCoefficients:
    seen = [one for one in known if one.allocated]
    if not seen:
        return DEFAULT_COEFFICIENTS
    knobs = (*_MEMORY, _MASKS) if any(_is_masked(one) for one in seen) else _MEMORY

    def predict(chosen: MemoryCoefficients) -> list[float]:
        return [float(allocated(one, chosen)) for one in seen]

    fitted = fit_ratios(DEFAULT_COEFFICIENTS, knobs, predict, [one.allocated for one in seen])
    # Of the sums: runs with little data hold as much that they cannot use, and would make it seem a large share.
    held = [one for one in seen if one.reserved]
    beyond = sum(one.reserved - one.allocated for one in held)
    return replace(
        fitted,
        framework_bytes=int(median(one.context for one in seen)),
        fragmentation=max(0.0, beyond / sum(_data_bytes(one, fitted) for one in held))
        if held
        else fitted.fragmentation,
        fitted=True,
    )


def _is_masked(one: Measurement) -> bool:
    return one.setup.attn_implementation != "varlen"


def _data_bytes(one: Measurement, chosen: MemoryCoefficients) -> int:
    return max(1, estimate_memory(one.shape, one.setup, one.load, chosen).activations)


def allocated(one: Measurement, chosen: MemoryCoefficients) -> int:
    """The peak that torch should have allocated: without what the driver and the allocator need."""
    estimate = estimate_memory(one.shape, one.setup, one.load, chosen)
    return estimate.total - estimate.part("framework").bytes


def predict(measurements: Iterable[Measurement], fits: dict[Mode, Fit], gpu: Gpu) -> list[Predicted]:
    """Measurements beside predictions, those that failed and modes without a fit left out."""
    return [
        Predicted(
            measurement=one,
            seconds=seconds(one, fits[one.mode].time, gpu),
            allocated=allocated(one, fits[one.mode].memory),
            held_out=one.held_out,
        )
        for one in measurements
        if not one.error and one.mode in fits
    ]


def leave_one_out(measurements: Sequence[Measurement], gpu: Gpu) -> list[Predicted]:
    """Each measurement that is fitted to, predicted by a fit to the others."""
    known = [one for one in measurements if not one.held_out and not one.error]
    predictions: list[Predicted] = []
    for one in known:
        others = [other for other in known if other is not one]
        predictions += [replace(seen, held_out=True) for seen in predict([one], fit(others, gpu), gpu)]
    return predictions


# ---- the file


def calibration_path(gpu: Gpu) -> Path:
    """Where the calibration of this kind of GPU is kept."""
    return cache_dir() / "calibration" / f"{gpu.name}.json"


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write it for later runs."""
    body = asdict(calibration)
    del body["notes"]
    write_json(path, KIND, VERSION, body)


def read_calibration(path: Path) -> Calibration:
    """A stored calibration, without fits where they are of an earlier form; one of another format is refused."""
    body = read_json(path, KIND, VERSION)
    try:
        stored = {**body, "measurements": [_as_now(one) for one in body["measurements"]]}
        calibration = from_json(Calibration, stored, ignore=("kind", "version"))
        whole = all(_IN_EVERY_FIT in one["time"] for one in body["fits"].values())
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            str(path), got=f"{type(error).__name__}: {error}", expected="a calibration", fix="run packtrain calibrate"
        ) from None
    return calibration if whole else replace(calibration, fits={})


def load_calibration(gpu: Gpu) -> Calibration | None:
    """The stored calibration of this kind of GPU, if there is one, with notes on what is different now."""
    path = calibration_path(gpu)
    if not path.is_file():
        return None
    calibration = read_calibration(path)
    if not calibration.fits:  # fitted to another form of the models, or not at all: measurements stay true
        calibration = replace(calibration, fits=fit(calibration.measurements, gpu))
    now = _installed("torch")
    if now and now != calibration.torch:
        note = f"it was calibrated with torch {calibration.torch}, and this is {now}: run packtrain calibrate again"
        return replace(calibration, notes=(note,))
    return calibration


def coefficients_for(gpu: Gpu, *, compiled: bool = False) -> tuple[Coefficients, MemoryCoefficients, tuple[str, ...]]:
    """What to predict with on such a GPU, and what that rests on: the stored calibration, or else defaults."""
    defaults = default_coefficients(compiled=compiled), DEFAULT_COEFFICIENTS
    try:
        calibration = load_calibration(gpu)
    except ArtifactError as error:  # estimates are still possible
        return *defaults, (f"the stored calibration is not used: {error}",)
    fitted = calibration.fits.get("compiled" if compiled else "eager") if calibration is not None else None
    if calibration is None or fitted is None:
        return *defaults, ()
    about = f"time and memory are predicted by the calibration of {calibration.device} of {calibration.date}"
    return fitted.time, fitted.memory, (about, *calibration.notes)


def _installed(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _as_now(measurement: dict[str, Any]) -> dict[str, Any]:
    """A stored measurement with fields that older files lack: they had no masters, and the host asked for sizes."""
    return {"waited": True, **measurement, "setup": {"master_weights": False, **measurement["setup"]}}
