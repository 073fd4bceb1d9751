"""Measured training steps -> the coefficients of the time and memory models for one GPU, and the file that keeps them.

Layers that run as they are written and compiled layers are fitted apart: they keep and move different things.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from packtrain.core.artifacts import read_json, write_json
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ArtifactError
from packtrain.families.shape import LanguageShape, VisionShape
from packtrain.predicting.fitting import Knob, fit_ratios
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
from packtrain.predicting.values import Load, ModelShape, ParameterCounts, TrainingSetup

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
    context: int = 0  # what the driver says is in use beyond that
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
    found: dict[Mode, Fit] = {}
    for mode in MODES:
        known = [one for one in measurements if one.mode == mode and not one.held_out and not one.error]
        if known:
            found[mode] = Fit(time=_fit_time(known, gpu, mode), memory=_fit_memory(known))
    return found


def _fit_time(known: Sequence[Measurement], gpu: Gpu, mode: Mode) -> Coefficients:
    start = _with_bandwidth(_STARTS[mode], known, gpu)
    masked = any(_is_masked(one) for one in known)
    knobs = (*_TIME, _WAITING, _MASKED) if masked else (*_TIME, _WAITING)

    def predict(chosen: Coefficients) -> list[float]:
        return [seconds(one, chosen, gpu) for one in known]

    found = fit_ratios(start, knobs, predict, [one.seconds for one in known])
    if not masked:  # nothing was measured of it: as it is by default, beside attention without a mask
        usual = default_coefficients(compiled=mode == "compiled")
        beside = usual.masked_attention_efficiency / usual.attention_efficiency
        found = replace(found, masked_attention_efficiency=min(1.0, beside * found.attention_efficiency))
    return replace(found, fitted=True)


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

    found = fit_ratios(DEFAULT_COEFFICIENTS, knobs, predict, [one.allocated for one in seen])
    # Of the sums: runs with little data hold as much that they cannot use, and would make it seem a large share.
    held = [one for one in seen if one.reserved]
    beyond = sum(one.reserved - one.allocated for one in held)
    return replace(
        found,
        framework_bytes=int(median(one.context for one in seen)),
        fragmentation=max(0.0, beyond / sum(_data_bytes(one, found) for one in held)) if held else found.fragmentation,
        fitted=True,
    )


def _is_masked(one: Measurement) -> bool:
    return one.setup.attention != "varlen"


def _data_bytes(one: Measurement, chosen: MemoryCoefficients) -> int:
    return max(1, estimate_memory(one.shape, one.setup, one.load, chosen).activations)


def allocated(one: Measurement, chosen: MemoryCoefficients) -> int:
    """The peak that torch should have allocated: what the driver and the allocator need beside stands outside it."""
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
    found: list[Predicted] = []
    for one in known:
        others = [other for other in known if other is not one]
        found += [replace(seen, held_out=True) for seen in predict([one], fit(others, gpu), gpu)]
    return found


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
        fits: dict[Mode, Fit] = {
            mode: Fit(time=Coefficients(**one["time"]), memory=MemoryCoefficients(**one["memory"]))
            for mode, one in body["fits"].items()
        }
        measurements = tuple(_measurement(one) for one in body["measurements"])
        about: dict[str, Any] = {name: str(body[name]) for name in ("gpu", "device", "torch", "transformers", "date")}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(
            str(path), got=f"{type(error).__name__}: {error}", expected="a calibration", fix="run packtrain calibrate"
        ) from None
    known = Calibration(**about, fits=fits, measurements=measurements)
    whole = all(_IN_EVERY_FIT in one["time"] for one in body["fits"].values())
    return known if whole else replace(known, fits={})


def load_calibration(gpu: Gpu) -> Calibration | None:
    """The stored calibration of this kind of GPU, if there is one, with notes on what is different now."""
    path = calibration_path(gpu)
    if not path.is_file():
        return None
    found = read_calibration(path)
    if not found.fits:  # it was fitted to another form of the models, or not at all: the measurements are still true
        found = replace(found, fits=fit(found.measurements, gpu))
    now = _installed("torch")
    if now and now != found.torch:
        note = f"it was calibrated with torch {found.torch}, and this is {now}: run packtrain calibrate again"
        return replace(found, notes=(note,))
    return found


def coefficients_for(gpu: Gpu, *, compiled: bool = False) -> tuple[Coefficients, MemoryCoefficients, tuple[str, ...]]:
    """What to predict with on such a GPU, and what that rests on: the stored calibration, or else defaults."""
    defaults = default_coefficients(compiled=compiled), DEFAULT_COEFFICIENTS
    try:
        found = load_calibration(gpu)
    except ArtifactError as error:  # estimates are still possible
        return *defaults, (f"the stored calibration is not used: {error}",)
    fitted = found.fits.get("compiled" if compiled else "eager") if found is not None else None
    if found is None or fitted is None:
        return *defaults, ()
    about = f"time and memory are predicted by the calibration of {found.device} of {found.date}"
    return fitted.time, fitted.memory, (about, *found.notes)


def _installed(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _measurement(body: dict[str, Any]) -> Measurement:
    shape = body["shape"]
    vision = VisionShape(**shape["vision"]) if shape["vision"] is not None else None
    known = {
        **shape,
        "language": LanguageShape(**shape["language"]),
        "vision": vision,
        "parameters": ParameterCounts(**shape["parameters"]),
        "notes": tuple(shape["notes"]),
    }
    setup = TrainingSetup(**{"master_weights": False, **body["setup"]})  # what does not say it had none
    parts = {"shape": ModelShape(**known), "setup": setup, "load": Load(**body["load"])}
    return Measurement(**{"waited": True, **body, **parts})  # which was not always said, either
