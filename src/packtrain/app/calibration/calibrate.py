"""Calibration for users: training steps are measured on the GPU at hand, and the estimates are fitted to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from packtrain.app.calibration.trials import Modes, calibration_trials
from packtrain.core.errors import ArtifactError, ConfigError, nearest
from packtrain.predicting.calibration import (
    Calibration,
    Measurement,
    Mode,
    Predicted,
    calibration_path,
    fit,
    leave_one_out,
    predict,
    read_calibration,
    save_calibration,
)
from packtrain.predicting.gpus import Gpu, find_gpu

if TYPE_CHECKING:
    from packtrain.training.trial import Trial

MEMORY_GOAL, TIME_GOAL = 0.08, 0.12  # how near predictions of held-out settings should come
BUDGET = 400.0  # seconds after which no further setting is begun
DEVICES = ("cuda", "cpu")
# A CPU has no data sheet: numbers of this order, from which the fit starts.
CPU = Gpu(name="cpu", memory_bytes=8 << 30, bf16_flops=1e11, bandwidth=2e10, link_bandwidth=1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationOutcome:
    """What was measured and fitted, and how near the fit comes."""

    gpu: str
    trials: tuple[str, ...]  # that there are, in order
    calibration: Calibration | None = None  # None: nothing was measured
    rows: tuple[Predicted, ...] = ()
    left_out: tuple[Predicted, ...] = ()  # each fitted measurement, predicted by a fit to the others
    skipped: tuple[str, ...] = ()  # trials for which there was no time
    seconds: float = 0.0
    files: tuple[Path, ...] = ()

    @property
    def held_out(self) -> tuple[Predicted, ...]:
        return tuple(row for row in self.rows if row.held_out)

    @property
    def failed(self) -> tuple[Measurement, ...]:
        found = self.calibration.measurements if self.calibration is not None else ()
        return tuple(one for one in found if one.error)

    def missed(self) -> tuple[Predicted, ...]:
        """Held-out settings that are not predicted as well as they should be."""
        return tuple(
            row
            for row in self.held_out
            if abs(row.time_error) > TIME_GOAL or abs(row.memory_error or 0.0) > MEMORY_GOAL
        )

    def as_json(self) -> dict[str, object]:
        known = self.calibration
        return {
            "gpu": self.gpu,
            "device": known.device if known else None,
            "torch": known.torch if known else None,
            "transformers": known.transformers if known else None,
            "date": known.date if known else None,
            "seconds": self.seconds,
            "fits": {mode: asdict(one) for mode, one in known.fits.items()} if known else {},
            "rows": [_row(row) for row in self.rows],
            "leave_one_out": [_row(row) for row in self.left_out],
            "failed": {one.name: one.error for one in self.failed},
            "skipped": list(self.skipped),
            "held_out": len(self.held_out),
            "held_out_missed": len(self.missed()),
            "trials": list(self.trials),
            "files": [str(path) for path in self.files],
        }


def _row(row: Predicted) -> dict[str, object]:
    one = row.measurement
    return {
        "name": one.name,
        "mode": one.mode,
        "held_out": row.held_out,
        "seconds": one.seconds,
        "pass_seconds": one.pass_seconds,
        "predicted_seconds": row.seconds,
        "time_error": row.time_error,
        "allocated": one.allocated,
        "predicted_allocated": row.allocated,
        "memory_error": row.memory_error,
        "reserved": one.reserved,
        "context": one.context,
        "tokens": one.load.tokens,
        "tokens_per_second": one.load.tokens / one.seconds,
    }


def calibrate(
    *,
    model: str | None = None,
    quick: bool = False,
    held_out: bool = True,
    modes: Modes = "both",
    only: Sequence[str] = (),
    device: str | None = None,
    gpu: str | None = None,
    out: str | Path | None = None,
    budget: float = BUDGET,
    progress: Callable[[int, int, str], None] = lambda done, total, doing: None,
) -> CalibrationOutcome:
    """Measure training steps, fit the models to them and keep the result for all later estimates.

    `gpu` names the data sheet where the driver's name is not known. A mode that is not measured now keeps what an
    earlier calibration with the same versions found, and with `only`, which has words of the names of settings, so does
    every setting. Without a GPU nothing is measured unless `device` is "cpu"; the outcome then says what would be.
    """
    if modes not in get_args(Modes):
        raise ConfigError("mode", got=modes, expected=", ".join(get_args(Modes)), fix=nearest(modes, get_args(Modes)))
    place = _Place.find(device, gpu)
    every = calibration_trials(place.gpu, model=model, modes=modes, quick=quick, held_out=held_out)
    trials = [trial for trial in every if not only or any(word in trial.name for word in only)]
    if not trials:
        raise ConfigError("only", got="; ".join(only), expected="words of: " + "; ".join(one.name for one in every))
    names = tuple(trial.name for trial in trials)
    if place.torch_device is None:
        return CalibrationOutcome(gpu=place.gpu.name, trials=names)
    begun = time.monotonic()
    measurements = _measure(trials, place, begun + budget, progress)
    done = {one.name for one in measurements}
    files = _files(place.gpu, out)
    kept = _earlier(place, by_name=bool(only), now=measurements)
    order = {trial.name: number for number, trial in enumerate(every)}
    together = sorted((*kept, *measurements), key=lambda one: order.get(one.name, -1))
    known = _calibration(place, tuple(together))
    _save(known, files)  # minutes of a GPU: whatever becomes of the fit
    return replace(
        _fitted(known, place.gpu, files),
        trials=names,
        skipped=tuple(name for name in names if name not in done),
        seconds=time.monotonic() - begun,
    )


def refit(path: str | Path, *, out: str | Path | None = None) -> CalibrationOutcome:
    """Fit again to the measurements of a stored file, wherever they were made, and keep the result here."""
    known = read_calibration(Path(path))
    gpu = CPU if known.gpu == CPU.name else find_gpu(known.gpu)
    return _fitted(known, gpu, _files(gpu, out))


def _fitted(known: Calibration, gpu: Gpu, files: tuple[Path, ...]) -> CalibrationOutcome:
    calibration = replace(known, fits=fit(known.measurements, gpu))
    _save(calibration, files)
    return CalibrationOutcome(
        gpu=gpu.name,
        trials=tuple(one.name for one in calibration.measurements),
        calibration=calibration,
        rows=tuple(predict(calibration.measurements, calibration.fits, gpu)),
        left_out=tuple(leave_one_out(calibration.measurements, gpu)),
        files=files,
    )


def _save(calibration: Calibration, files: Sequence[Path]) -> None:
    if any(not one.error for one in calibration.measurements):
        for path in files:
            save_calibration(calibration, path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where steps are measured."""

    gpu: Gpu
    torch_device: Any  # None: nowhere
    name: str

    @classmethod
    def find(cls, device: str | None, gpu: str | None) -> _Place:
        if device is not None and device.split(":")[0] not in DEVICES:
            raise ConfigError("device", got=device, expected=", ".join(DEVICES), fix=nearest(device, DEVICES))
        try:
            import torch

            from packtrain.modeling.load import quiet_libraries

            quiet_libraries()
        except ImportError as error:
            raise ConfigError("packtrain calibrate", got=str(error), fix="pip install 'packtrain[train]'") from error
        if device is not None and device.startswith("cpu"):
            return cls(gpu=CPU, torch_device=torch.device("cpu"), name="cpu")
        if not torch.cuda.is_available():
            return cls(gpu=find_gpu(gpu or "h200"), torch_device=None, name="")
        used = torch.device(device if device is not None and ":" in device else "cuda:0")
        torch.cuda.set_device(used)
        name = torch.cuda.get_device_name(used)
        return cls(gpu=find_gpu(gpu or name), torch_device=used, name=name)


def _measure(
    trials: Sequence[Trial], place: _Place, until: float, progress: Callable[[int, int, str], None]
) -> tuple[Measurement, ...]:
    from packtrain.training.trial import measure_trial

    found = []
    for number, trial in enumerate(trials):
        if time.monotonic() > until:
            break
        progress(number, len(trials), trial.name)
        found.append(measure_trial(trial, place.torch_device))
    progress(len(found), len(trials), "fitting")
    return tuple(found)


def _earlier(place: _Place, *, by_name: bool, now: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """What an earlier calibration with the same versions knows of modes, or settings, that were not measured now."""
    path = calibration_path(place.gpu)
    try:
        found = read_calibration(path) if path.is_file() else None
    except ArtifactError:
        return ()  # of another format: it is replaced
    if found is None or (found.torch, found.transformers, found.device) != (*_versions(), place.name):
        return ()
    if by_name:
        again = {one.name for one in now}
        return tuple(one for one in found.measurements if one.name not in again)
    measured: set[Mode] = {one.mode for one in now}
    return tuple(one for one in found.measurements if one.mode not in measured)


def _calibration(place: _Place, measurements: tuple[Measurement, ...]) -> Calibration:
    """Not fitted yet."""
    torch_version, transformers_version = _versions()
    return Calibration(
        gpu=place.gpu.name,
        device=place.name,
        torch=torch_version,
        transformers=transformers_version,
        date=datetime.now(UTC).date().isoformat(),
        fits={},
        measurements=measurements,
    )


def _versions() -> tuple[str, str]:
    from importlib.metadata import version

    return version("torch"), version("transformers")


def _files(gpu: Gpu, out: str | Path | None) -> tuple[Path, ...]:
    stored = calibration_path(gpu)
    return (stored,) if out is None else (stored, Path(out))
