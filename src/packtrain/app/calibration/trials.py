"""Which settings are measured to calibrate a GPU: those that coefficients are fitted to, and those held out.

Each thing that costs time or memory is large in one setting and small in another: attention (long samples), the encoder
(many patches), recomputing, adapters, dense masks, the width of the decoder, launches (short packs), a host that waits
(the wide one). Held-out settings differ from all fitted ones in length, method, recomputing or model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError
from packtrain.families.model_folder import PREFIX, resolve
from packtrain.families.registry import known_config, known_shapes
from packtrain.predicting.gpus import Gpu
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
        (MAIN, (4, 2048), {"attention": "sdpa"}, {}),
        (TEXT, 16_384, _KEPT, _LONG),
        (TEXT, 8192, {}, {}),
        (WIDE, 8192, {}, {}),
        (MAIN, 8192, {"gradient_checkpointing": False}, _SEEN),
        (TEXT, (8, 1024), {"attention": "sdpa"}, {}),
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
        (TEXT, (6, 1536), {**_KEPT, "attention": "sdpa"}, {}),
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
# A fit of two modes in a minute: enough to see that it works, not enough to trust.
_QUICK = {"fitted": 4, "held_out": 2}


def calibration_trials(
    gpu: Gpu, *, model: str | None = None, modes: Modes = "both", quick: bool = False, held_out: bool = True
) -> tuple[Trial, ...]:
    """The trials for a GPU, in the order in which they are run; packs are shorter where memory is small.

    `model` stands in for the main shape. On a CPU (its name is the data sheet's) all shapes are small ones, in fp32.
    """
    own = model_config(model) if model is not None else None
    found: list[Trial] = []
    for mode in ("eager", "compiled") if modes == "both" else (modes,):
        rows = [(row, False) for row in _FITTED[mode][: _QUICK["fitted"] if quick else None]]
        rows += [(row, True) for row in (_HELD_OUT[mode][: _QUICK["held_out"] if quick else None] if held_out else ())]
        for row, out in rows:
            trial = _trial(row, gpu, mode == "compiled", out, own if row[0] == MAIN else None, model)
            # Settings that were made shorter may have become the same.
            if trial is not None and trial.name not in {other.name for other in found}:
                found.append(trial)
    return tuple(found)


def model_config(name: str) -> Mapping[str, Any]:
    """The config of a known shape, of a model's folder, or of a tiny model."""
    import json

    if name in known_shapes():
        return known_config(name)
    if not name.startswith(PREFIX) and not Path(name).expanduser().is_dir():
        known_config(name)  # says which there are
    path = resolve(name, cache_dir() / "models") / "config.json"
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
        setup = replace(setup, weights_dtype="fp32", attention="sdpa" if compiled else setup.attention)
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
        load = Load(
            tokens=whole,
            squared_tokens=whole * trial.mix.mean_tokens,
            longest=trial.tokens,
            samples=max(1, whole // trial.mix.mean_tokens),
            rows=trial.rows or 1,
            supervised_tokens=whole // 2,
            vision_tokens=patches // 4,
            patches=patches,
            squared_patches=patches * 1500,
            largest_patches=min(patches, 1500),
        )
        if estimate_memory(shape_from_config(trial.config), trial.setup, load).total <= _ROOM * gpu.memory_bytes:
            return trial
        trial = replace(trial, tokens=trial.tokens // 2)
    return None
