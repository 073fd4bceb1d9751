"""Weights of a folder -> a model that is there already: all of them, or an error.

Transformers saves some models under other names than their modules have (those of the model's first release), and only
`from_pretrained` translates them back. `load_state_dict(strict=False)`, by which Trainer resumes, leaves nearly every
weight of such a model as it was, without a word. Adapters have their names, but Trainer does not look at what peft says
about those that were missing.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from packtrain.core.errors import ArtifactError, in_one_line
from packtrain.modeling.pretrained import ADAPTER_CONFIG, WeightsError, from_pretrained, in_words

_ADAPTERS = "adapter_model.safetensors"
_MAIN_ADAPTER = "default"  # peft saves others in folders of their names
# Of a peft config: what decides which numbers there are and what is computed with them.
_SAME = (
    *("peft_type", "r", "lora_alpha", "target_modules", "modules_to_save", "use_dora"),
    *("use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform", "layers_pattern", "exclude_modules"),
)
_ANOTHER = "resume from another checkpoint, or start without resuming"


def reload_weights(model: Any, folder: Path) -> None:
    """Set every weight of a model to what `save_pretrained` wrote into a folder."""
    if (folder / ADAPTER_CONFIG).is_file():
        raise ArtifactError(
            str(folder),
            got=f"adapters ({ADAPTER_CONFIG}) of a run that trained only them",
            expected="the weights of this model, all of them",
            fix="resume with that run's method, or start without resuming",
        )
    own = copy.deepcopy(model.config)  # that of the folder could ask for a model of any size
    try:
        saved = from_pretrained(
            type(model), str(folder), config=own, unused=False, dtype=_common(model), local_files_only=True
        )
        model.load_state_dict(saved.state_dict(), strict=True)
    except (WeightsError, RuntimeError) as error:
        raise ArtifactError(
            str(folder),
            got=" ".join(str(error).split()),
            expected="the weights of this model, all of them",
            fix=_ANOTHER,
        ) from error


def _common(model: Any) -> torch.dtype:
    """In which nothing is rounded: what all weights have, or else fp32."""
    kinds = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    return kinds.pop() if len(kinds) == 1 else torch.float32


# ---- adapters


def reload_adapters(model: Any, folder: Path) -> None:
    """Set every adapter of a peft model, and what is trained whole beside them, to what its `save_pretrained` wrote.

    The parameters stay the same objects, in their precision.
    """
    for name, config in model.peft_config.items():
        place = folder if name == _MAIN_ADAPTER else folder / name
        _require_same_adapters(place, config)
        try:
            found = model.load_adapter(str(place), name, is_trainable=True, torch_device="cpu")
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise _other_adapters(place, in_one_line(error)) from error
        wrong = {"missing": found.missing_keys, "unexpected": found.unexpected_keys}
        if any(wrong.values()):
            raise _other_adapters(
                place, "; ".join(in_words(kind, sorted(names)) for kind, names in wrong.items() if names)
            )


def _require_same_adapters(place: Path, config: Any) -> None:
    """Before anything is read into the model: adapters are there, and made as its own are."""
    for name in (ADAPTER_CONFIG, _ADAPTERS):
        if not (place / name).is_file():
            whole = any(place.glob("model*.safetensors"))
            raise _other_adapters(place, "whole weights, of a run without adapters" if whole else f"no {name}")
    try:
        saved = json.loads((place / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise _other_adapters(place, f"{ADAPTER_CONFIG}: {error}") from error
    if other := list(_differences(saved, config.to_dict())):
        raise _other_adapters(place, f"adapters with {', '.join(other)}")


def _differences(saved: dict[str, Any], own: dict[str, Any]) -> Iterator[str]:
    for name in _SAME:
        before, now = _plain(saved.get(name)), _plain(own.get(name))
        if name in saved and before != now:
            yield f"{name} {before} instead of {now}"


def _plain(value: Any) -> Any:
    """As JSON has it; the order of names does not matter, and no names are none."""
    if isinstance(value, (set, list, tuple)):
        value = sorted(value)
    return getattr(value, "value", value) or None


def _other_adapters(place: Path, got: str) -> ArtifactError:
    expected = "the adapters of this model, all of them"
    return ArtifactError(str(place), got=" ".join(got.split()), expected=expected, fix=_ANOTHER)
