"""`calibrate`: training steps are measured on the available GPU, and the estimates are fitted to them.

Some settings are fitted to, others held out. Each thing that costs time or memory is large in one setting and small in
another: attention (long samples), the encoder (many patches), recomputing, adapters, dense masks, the width of the
decoder, launches (short packs), a waiting host (the wide decoder). Held-out settings differ from all fitted ones in
length, method, recomputing or model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ArtifactError, ConfigError, nearest
from packtrain.core.numbers import GIB
from packtrain.families.model_folder import PREFIX, resolve_model
from packtrain.families.registry import known_config, known_shapes
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
from packtrain.predicting.memory import estimate_memory
from packtrain.predicting.shapes import shape_from_config
from packtrain.predicting.values import Load, TrainingSetup

if TYPE_CHECKING:
    from packtrain.training.trial import Trial


Modes = Literal["both", "eager", "compiled"]
MAIN, WIDE, TEXT, TILED = "qwen3-vl-2b", "qwen2.5-vl-3b", "llama-1b", "smolvlm-2.2b"
_SMALL = {MAIN: "small", WIDE: "small-wide", TEXT: "small-text", TILED: "small"}
_ROOM = 0.85  # of a GPU's memory: estimates before a calibration are not exact
_LEAST_TOKENS = 1024
_KEPT = {"gradient_checkpointing": False, "vision_checkpointing": False}
_LORA: dict[str, Any] = {"method": "lora", "train_vision": False, "train_projector": False}
_LONG: dict[str, Any] = {"mean_tokens": 6000}
_SEEN: dict[str, Any] = {"patches_per_token": 2.2}

# model, tokens (of a pack, or (rows, tokens) of a padded batch), setup, mix
_Row = tuple[str, Any, dict[str, Any], dict[str, Any]]
_FITTED: dict[str, tuple[_Row, ...]] = {
    "eager": (
        (MAIN, 8192, _KEPT, {}),
        (MAIN, 16_384, {}, {}),
        (MAIN, 8192, {**_KEPT, **_LORA}, {}),
        (MAIN, (4, 2048), {"attn_implementation": "sdpa"}, {}),
        (TEXT, 16_384, _KEPT, _LONG),
        (TEXT, 8192, {}, {}),
        (WIDE, 8192, {}, {}),
        (MAIN, 8192, {"gradient_checkpointing": False}, _SEEN),
        (TEXT, (8, 1024), {"attn_implementation": "sdpa"}, {}),
        (WIDE, 4096, _KEPT, {}),
    ),
    "compiled": (
        (MAIN, 8192, _KEPT, {}),
        (MAIN, 16_384, {}, _SEEN),
        (TEXT, 16_384, _KEPT, _LONG),
        (MAIN, 8192, {**_KEPT, **_LORA}, {}),
        (WIDE, 8192, {}, {}),
        (MAIN, 12_288, {}, {}),
        (TEXT, 4096, {}, {}),
    ),
}
_HELD_OUT: dict[str, tuple[_Row, ...]] = {
    "eager": (
        (MAIN, 12_288, {}, {}),
        (MAIN, 16_384, _LORA, {}),
        (WIDE, 6144, {**_KEPT, **_LORA}, {}),
        (TEXT, (6, 1536), {**_KEPT, "attn_implementation": "sdpa"}, {}),
        (MAIN, 5120, _KEPT, {"mean_tokens": 800, "patches_per_token": 1.6}),
        (TILED, 8192, {}, {}),
    ),
    "compiled": (
        (MAIN, 20_480, {}, {}),
        (TEXT, 8192, {}, {}),
        (WIDE, 12_288, _KEPT, {}),
        (MAIN, 16_384, {**_KEPT, **_LORA}, {}),
    ),
}
# A fit of two modes in a minute: enough for a test, not for predictions.
_QUICK = {"fitted": 4, "held_out": 2}
MEMORY_GOAL, TIME_GOAL = 0.08, 0.12  # relative errors that predictions of held-out settings should stay below
BUDGET = 400.0  # seconds after which no further setting is begun
DEVICES = ("cuda", "cpu")
# A CPU has no data sheet: numbers of this order, from which the fit starts.
CPU = Gpu(name="cpu", memory_bytes=8 * GIB, bf16_flops=1e11, bandwidth=2e10, link_bandwidth=1e9)


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationOutcome:
    """The measurements, the fit, and how good it is."""

    gpu: str
    trials: tuple[str, ...]  # all settings, in order
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
        return tuple(one for one in self.calibration.measurements if one.error) if self.calibration else ()

    def missed(self) -> tuple[Predicted, ...]:
        """Held-out settings whose prediction misses the goals."""
        return tuple(
            row
            for row in self.held_out
            if abs(row.time_error) > TIME_GOAL or abs(row.memory_error or 0.0) > MEMORY_GOAL
        )

    def as_json(self) -> dict[str, object]:
        calibration = self.calibration
        return {
            "gpu": self.gpu,
            **{name: getattr(calibration, name, None) for name in ("device", "torch", "transformers", "date")},
            "seconds": self.seconds,
            "fits": {mode: asdict(one) for mode, one in calibration.fits.items()} if calibration else {},
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
    measured = ("name", "mode", "seconds", "pass_seconds", "allocated", "reserved", "context")
    return {
        **{name: getattr(one, name) for name in measured},
        **{name: getattr(row, name) for name in ("held_out", "time_error", "memory_error")},
        "predicted_seconds": row.seconds,
        "predicted_allocated": row.allocated,
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
    """Measure training steps, fit the models to them and keep the result for later estimates.

    `gpu` names the data sheet if the driver's name is unknown. A mode that is not measured now keeps its results of an
    earlier calibration with the same versions; with `only`, words in names of settings, so does every other setting.
    Without a GPU nothing is measured unless `device` is "cpu"; the outcome then lists the settings.
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
    earlier = _earlier(place, by_name=bool(only), now=measurements)
    order = {trial.name: number for number, trial in enumerate(every)}
    together = sorted((*earlier, *measurements), key=lambda one: order.get(one.name, -1))
    torch_version, transformers_version = _versions()
    calibration = Calibration(
        gpu=place.gpu.name,
        device=place.name,
        torch=torch_version,
        transformers=transformers_version,
        date=datetime.now(UTC).date().isoformat(),
        fits={},
        measurements=tuple(together),
    )
    _save(calibration, files)  # minutes of a GPU, even if the fit fails
    return replace(
        _fit_and_save(calibration, place.gpu, files),
        trials=names,
        skipped=tuple(name for name in names if name not in done),
        seconds=time.monotonic() - begun,
    )


def refit(path: str | Path, *, out: str | Path | None = None) -> CalibrationOutcome:
    """Fit again to the measurements of a stored file, of any machine, and keep the result here."""
    calibration = read_calibration(Path(path))
    gpu = CPU if calibration.gpu == CPU.name else find_gpu(calibration.gpu)
    return _fit_and_save(calibration, gpu, _files(gpu, out))


def _fit_and_save(known: Calibration, gpu: Gpu, files: tuple[Path, ...]) -> CalibrationOutcome:
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
    torch_device: Any  # None: there is no GPU
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

    measurements = []
    for number, trial in enumerate(trials):
        if time.monotonic() > until:
            break
        progress(number, len(trials), trial.name)
        measurements.append(measure_trial(trial, place.torch_device))
    progress(len(measurements), len(trials), "fitting")
    return tuple(measurements)


def _earlier(place: _Place, *, by_name: bool, now: Sequence[Measurement]) -> tuple[Measurement, ...]:
    """Results of an earlier calibration with the same versions, for modes or settings that were not measured now."""
    path = calibration_path(place.gpu)
    try:
        earlier = read_calibration(path) if path.is_file() else None
    except ArtifactError:
        return ()  # another format: it is replaced
    if earlier is None or (earlier.torch, earlier.transformers, earlier.device) != (*_versions(), place.name):
        return ()
    if by_name:
        again = {one.name for one in now}
        return tuple(one for one in earlier.measurements if one.name not in again)
    measured: set[Mode] = {one.mode for one in now}
    return tuple(one for one in earlier.measurements if one.mode not in measured)


def _versions() -> tuple[str, str]:
    from importlib.metadata import version

    return version("torch"), version("transformers")


def _files(gpu: Gpu, out: str | Path | None) -> tuple[Path, ...]:
    stored = calibration_path(gpu)
    return (stored,) if out is None else (stored, Path(out))


def calibration_trials(
    gpu: Gpu, *, model: str | None = None, modes: Modes = "both", quick: bool = False, held_out: bool = True
) -> tuple[Trial, ...]:
    """The trials for a GPU, in the order in which they are run; packs are shorter where memory is small.

    `model` replaces the main shape. On a CPU (its name is the data sheet's) all shapes are small ones, in fp32.
    """
    own = model_config(model) if model is not None else None
    trials: list[Trial] = []
    for mode in ("eager", "compiled") if modes == "both" else (modes,):
        rows = [(row, False) for row in _FITTED[mode][: _QUICK["fitted"] if quick else None]]
        rows += [(row, True) for row in (_HELD_OUT[mode][: _QUICK["held_out"] if quick else None] if held_out else ())]
        for row, out in rows:
            trial = _trial(row, gpu, mode == "compiled", out, own if row[0] == MAIN else None, model)
            # Settings that were made shorter may have become the same.
            if trial is not None and trial.name not in {other.name for other in trials}:
                trials.append(trial)
    return tuple(trials)


def model_config(name: str) -> Mapping[str, Any]:
    """The config of a known shape, of a model's folder, or of a tiny model."""
    import json

    if name in known_shapes():
        return known_config(name)
    if not name.startswith(PREFIX) and not Path(name).expanduser().is_dir():
        known_config(name)  # says which there are
    path = resolve_model(name, cache_dir() / "models") / "config.json"
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(str(path), got=str(error), expected="a model's config.json") from None


def _trial(
    row: _Row, gpu: Gpu, compiled: bool, held_out: bool, own: Mapping[str, Any] | None, own_name: str | None
) -> Trial | None:
    """One trial, with packs that this GPU has room for; None where even short ones do not fit."""
    from packtrain.delivery.encode.synthetic_samples import Mix
    from packtrain.training.trial import Trial

    name, size, changes, looks = row
    small = gpu.name == "cpu"
    name = _SMALL[name] if small else name
    config = own if own is not None else known_config(name)
    rows, tokens = size if isinstance(size, tuple) else (None, size)
    mix = Mix(**looks)
    setup = TrainingSetup(**{**changes, "compiled": compiled})
    if shape_from_config(config).vision is None:
        mix = replace(mix, patches_per_token=0.0)
    if small:  # the kernel for packs is a loop there
        tokens, mix = tokens // 64, replace(mix, mean_tokens=mix.mean_tokens // 20)
        setup = replace(
            setup, weights_dtype="fp32", attn_implementation="sdpa" if compiled else setup.attn_implementation
        )
    trial = Trial(
        model=own_name if own is not None and own_name is not None else name,
        config=config,
        setup=setup,
        tokens=tokens,
        rows=rows,
        mix=mix,
        held_out=held_out,
        backend="aot_eager" if small else "inductor",
    )
    return trial if small else _fitting(trial, gpu)


def _fitting(trial: Trial, gpu: Gpu) -> Trial | None:
    while trial.tokens >= _LEAST_TOKENS:
        whole = trial.tokens * (trial.rows or 1)
        patches = int(trial.mix.patches_per_token * whole)
        load = Load.from_counts(
            tokens=whole,
            squared_tokens=whole * trial.mix.mean_tokens,
            longest=trial.tokens,
            samples=whole // trial.mix.mean_tokens,
            rows=trial.rows or 1,
            supervised_tokens=whole // 2,
            vision_tokens=patches // 4,
            patches=patches,
            squared_patches=patches * 1500,
            largest_patches=min(patches, 1500),
            images=0,
        )
        if estimate_memory(shape_from_config(trial.config), trial.setup, load).total <= _ROOM * gpu.memory_bytes:
            return trial
        trial = replace(trial, tokens=trial.tokens // 2)
    return None
