"""The trained weights alone, in a folder that transformers or peft loads: with tokenizer and processor, without traces.

Weights are gathered by name first, adapters merged into them where asked for, and written by an empty model of the same
class. The model that was trained is unchanged, whatever wraps it.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from packtrain.core.artifacts import free_bytes, share_files, whole_folder
from packtrain.core.errors import ArtifactError, ConfigError, PacktrainError, RecordError
from packtrain.core.values import MediaHeader, MediaLimits
from packtrain.families.family import ProcessorSettings, Rule
from packtrain.families.registry import load_rule
from packtrain.families.settings import read_settings
from packtrain.modeling.load import keep_four_bits
from packtrain.modeling.model_parts import transformers_model

# Files of a model's folder that say how its inputs are made.
_INPUT_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_MODEL_FILES = ("config.json", "generation_config.json", "adapter_config.json", "trainer_state.json")
_ADAPTER = "default"
# How peft names what it keeps beside an adapter: the matrix below it, and a module before and while it is trained.
_BASE_LAYER, _UNTRAINED_COPY, _TRAINED_COPY = "base_layer", "original_module", "modules_to_save.default"
_OUTER_PREFIXES = ("module.", "_orig_mod.", "base_model.model.")
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def save_final(
    model: Any,
    folder: Path,
    *,
    merge_adapters: bool = False,
    processor_folder: Path | None = None,
    limits: MediaLimits | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    chat_template: str | None = None,
    card: str | None = None,
) -> None:
    """Write the weights of a model, their config and the files of tokenizer and processor; all of it or nothing.

    Adapters are saved as adapters, with the parts that were trained whole beside them, or merged. `processor_folder` is
    the folder of the model that training started from; its processor gets the media limits of the run, where its files
    can say them. `state_dict` holds whole weights by the names of `model`, where its own are sharded. `chat_template`
    is one that was trained with instead of the model's, `card` the text of README.md. Only one process may call this.
    """
    keep_four_bits(model)
    adapted = _adapted(model)
    if merge_adapters and state_dict is not None and _is_quantized(model):
        raise ConfigError(
            "merge_adapters",
            got="4-bit weights in a sharded model",
            expected="adapters alone, or full 4-bit weights to dequantize",
            fix="save the adapters, and merge them into the original model",
        )
    from safetensors import SafetensorError

    folder = Path(folder)
    try:
        with whole_folder(folder, replace=True) as temporary:
            if adapted is not None and not merge_adapters:
                _save_adapters(adapted, temporary, state_dict)
            else:
                _save_weights(model, temporary, processor_folder, state_dict)
            if processor_folder is not None:
                copy_input_files(Path(processor_folder), temporary)
                if limits is not None and limits.given():
                    write_limits(temporary, limited_parts(read_settings(processor_folder), limits) or {})
            if chat_template is not None:
                _put_template(temporary, chat_template)
            if card is not None:
                (temporary / "README.md").write_text(card, encoding="utf-8")
            share_files(temporary)
    except (OSError, SafetensorError) as error:
        needed = _bytes_needed(model, merge_adapters)
        raise ArtifactError(
            str(folder),
            got=getattr(error, "strerror", None) or str(error),
            expected=f"a disk with room for about {needed:,} bytes; {free_bytes(folder):,} are free",
            fix="make room and save again; what was there before is unchanged",
        ) from error


def _bytes_needed(model: Any, merge: bool) -> int:
    """About what the weights take."""
    alone = _adapted(model) is not None and not merge
    return sum(one.numel() * one.element_size() for one in model.parameters() if one.requires_grad or not alone)


def copy_input_files(source: Path, folder: Path) -> None:
    """Copy what a tokenizer and a processor are loaded from."""
    for path in sorted({path for pattern in _INPUT_FILES for path in source.glob(pattern)}):
        if path.is_file() and path.name not in _MODEL_FILES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    templates = source / "additional_chat_templates"
    if templates.is_dir():
        shutil.copytree(templates, folder / templates.name)


def _put_template(folder: Path, template: str) -> None:
    """One chat template, in the file that stands for tokenizer and processor; none is left that would be used first."""
    (folder / "chat_template.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    for name in ("processor_config.json", "tokenizer_config.json"):
        path = folder / name
        settings = _read(path)
        if settings.pop("chat_template", None) is not None:
            _write(path, settings)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


# ---- adapters


def _adapted(model: Any) -> Any:
    """The peft model inside wrappers, if it is one."""
    try:
        from peft import PeftModel
    except ImportError:
        return None
    while model is not None and not isinstance(model, PeftModel):
        held = getattr(model, "_modules", {})
        model = held.get("module") if held.get("module") is not None else held.get("_orig_mod")
    return model


def _save_adapters(adapted: Any, folder: Path, state_dict: Mapping[str, Tensor] | None) -> None:
    more = {} if state_dict is None else {"state_dict": dict(state_dict)}
    adapted.save_pretrained(str(folder), save_embedding_layers=False, **more)
    (folder / "README.md").unlink(missing_ok=True)  # a form that nobody filled in


# ---- whole weights


def _save_weights(model: Any, folder: Path, original: Path | None, state_dict: Mapping[str, Tensor] | None) -> None:
    base = transformers_model(model)
    given = base.state_dict() if state_dict is None else state_dict
    assert not any(hasattr(value, "full_tensor") for value in given.values()), "sharded weights: pass full ones"
    weights = _merged_weights(base, given)
    empty = _empty(base, _dtype(weights))
    if _differing(empty, weights):  # a head of its own, whatever the config says
        empty = _empty(base, _dtype(weights), tied=False)
    _require_all(empty, weights)
    # Tied weights have several names; one is enough, and the others follow from the config.
    written = set(empty.state_dict()) - set(_names_of_tied(empty))
    empty.save_pretrained(str(folder), state_dict={name: weights[name] for name in sorted(written)})
    _restore_config(folder / "config.json", original)


def _names_of_tied(empty: Any) -> dict[str, str]:
    """Further names of weights that a model has under several -> the first one."""
    first = {id(weight): name for name, weight in empty.named_parameters()}
    every = empty.named_parameters(remove_duplicate=False)
    return {name: first[id(weight)] for name, weight in every if first[id(weight)] != name}


def _differing(empty: Any, weights: Mapping[str, Tensor]) -> list[str]:
    """Names under which there are other numbers than the model, tied as it is, would have there."""
    return [
        name
        for name, first in _names_of_tied(empty).items()
        if {name, first} <= weights.keys() and not _equal(weights[name], weights[first])
    ]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.dtype == other.dtype and torch.equal(one, other.to(one.device)))


def _require_all(empty: Any, weights: Mapping[str, Tensor]) -> None:
    """Nothing that was trained may be lost: all weights are written, or are equal to one that they are tied to."""
    places = set(empty.state_dict())
    missing = sorted(places - set(_names_of_tied(empty)) - set(weights))
    assert not missing, f"no weights for {missing[:3]}"
    lost = sorted(set(weights) - places) + _differing(empty, weights)
    assert not lost, f"no checkpoint names for {lost[:3]}"


def _empty(base: Any, dtype: torch.dtype, *, tied: bool = True) -> Any:
    """A model of the same class, without weights and without what training changed about its computation.

    `tied`: the output head is that of the embeddings where the config says so.
    """
    from torch.distributed.fsdp import FSDPModule

    # FSDP puts a class of its own in front of a model's.
    plain: Any = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
    settings = base.config.to_dict()  # without the names of attention implementations
    settings.pop("quantization_config", None)
    if not tied:
        for part in (settings, settings.get("text_config")):
            if isinstance(part, dict):
                part["tie_word_embeddings"] = False
    with torch.device("meta"):
        empty = plain._from_config(type(base.config).from_dict(settings), dtype=dtype)
    if getattr(base, "generation_config", None) is not None:
        empty.generation_config = copy.deepcopy(base.generation_config)
    return empty


def _dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """What most numbers are kept in."""
    sizes: dict[torch.dtype, int] = {}
    for value in weights.values():
        if value.is_floating_point():
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.numel()
    return max(sizes, key=lambda dtype: sizes[dtype])


def _restore_config(path: Path, original: Path | None) -> None:
    """Caching as the original config has it (training turns it off), and no choice of an attention."""
    config = _read(path)
    _restore(config, _read(original / "config.json") if original is not None else {})
    _write(path, config)


def _restore(config: dict[str, Any], before: Any) -> None:
    before = before if isinstance(before, dict) else {}
    for name in [name for name in config if name == "use_cache" or "attn_implementation" in name]:
        del config[name]
    if "use_cache" in before:
        config["use_cache"] = before["use_cache"]
    for name, value in config.items():
        if isinstance(value, dict):
            _restore(value, before.get(name))


# ---- weights by the names of a model without wrappers and adapters


def _merged_weights(base: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every weight of the model as it computes, adapters included."""
    named = _dequantized(base, {_name_without_wrappers(name): value for name, value in weights.items()})
    layers = {
        _name_without_wrappers(name): module for name, module in base.named_modules() if hasattr(module, "lora_A")
    }
    merged: dict[str, Tensor] = {}
    for name, value in named.items():
        pieces = name.split(".")
        if _UNTRAINED_COPY in pieces or any(piece.startswith("lora_") for piece in pieces):
            continue
        path, _, kind = name.rpartition(".")
        if path.endswith(f".{_BASE_LAYER}"):
            path = path.removesuffix(f".{_BASE_LAYER}")
            value = _with_adapter(named, path, layers[path], value) if kind == "weight" else value
        merged[f"{path}.{kind}".removeprefix(".").replace(f".{_TRAINED_COPY}", "")] = value
    return merged


def _name_without_wrappers(name: str) -> str:
    """A weight's name without what wrappers add in front of it or on the way."""
    while name.startswith(_OUTER_PREFIXES):
        name = next(name.removeprefix(outer) for outer in _OUTER_PREFIXES if name.startswith(outer))
    return ".".join(piece for piece in name.split(".") if piece not in _WRAPPERS)


def _dequantized(base: Any, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """4-bit weights as the numbers they stand for; what describes them falls away."""
    packed = {
        _name_without_wrappers(name): weight
        for name, weight in base.named_parameters()
        if hasattr(weight, "quant_state")
    }
    if not packed:
        return weights
    from bitsandbytes.functional import dequantize_4bit

    numbers = {name: value for name, value in weights.items() if ".weight." not in name}
    for name, weight in packed.items():
        numbers[name] = dequantize_4bit(weight.data, weight.quant_state).cpu()
    return numbers


def _with_adapter(named: Mapping[str, Tensor], path: str, layer: Any, weight: Tensor) -> Tensor:
    """A matrix with its adapter, computed in fp32 and rounded once; DoRA scales each row to a learned length."""
    if not isinstance(layer.get_base_layer(), nn.Linear):
        raise ConfigError(
            "merge_adapters",
            got=f"an adapter on {path}, a {type(layer.get_base_layer()).__name__}",
            expected="adapters on linear layers",
            fix="save the adapters, and merge them with peft",
        )
    down, up = (named[f"{path}.lora_{side}.{_ADAPTER}.weight"].to(weight.device).float() for side in "AB")
    merged = weight.float() + layer.scaling[_ADAPTER] * (up @ down)
    length = named.get(f"{path}.lora_magnitude_vector.{_ADAPTER}.weight")
    if length is not None:
        merged *= (length.to(weight.device).float() / merged.norm(dim=1))[:, None]
    return merged.to(weight.dtype).cpu()


def _is_quantized(model: Any) -> bool:
    return any(hasattr(weight, "quant_state") for weight in transformers_model(model).parameters())


# ---- media limits in a processor's own files

_PROCESSOR = "processor_config.json"
_FILES = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
_OLD_BOUNDS = ("min_pixels", "max_pixels")  # which would overrule `size`
_SAMPLING = ("num_frames", "fps")
# Media by which two rules are compared: small, usual, large and long ones.
_SIDES = ((20, 28), (224, 224), (480, 640), (1500, 2000), (3000, 240), (4032, 3024))
_CLIPS = ((8, 4.0), (30, 10.0), (240, 24.0), (1800, 30.0))
ProcessorPart = Mapping[str, Any]


def limited_parts(settings: ProcessorSettings, limits: MediaLimits) -> dict[str, ProcessorPart] | None:
    """Image and video settings with these limits in them; None where they cannot say the same as the limits do."""
    family = load_rule(settings, limits)
    if family is None:
        return None
    given = family.processor_kwargs()
    parts: dict[str, ProcessorPart] = {}
    if images := given.get("images_kwargs"):
        kept = {
            name: value for name, value in settings.image.items() if name not in _OLD_BOUNDS or "size" not in images
        }
        parts["image_processor"] = {**kept, **images}
    video = settings.video or settings.image
    if "video" in family.placeholders and (given.get("videos_kwargs") or "image_processor" in parts):
        sampled = any(getattr(limits, name) is not None for name in (*_SAMPLING, "max_frames"))
        own = given.get("videos_kwargs", {}) if sampled else {}
        kept = {name: value for name, value in video.items() if name not in _SAMPLING or not sampled}
        parts["video_processor"] = {**kept, **own}  # with nulls: classes have defaults of their own
    changed = replace(
        settings, image=parts.get("image_processor", settings.image), video=parts.get("video_processor", settings.video)
    )
    plain = load_rule(changed, MediaLimits())
    return parts if plain is not None and _counts(plain) == _counts(family) else None


def write_limits(folder: Path, parts: Mapping[str, ProcessorPart]) -> None:
    """Put the settings where the files of a folder have them."""
    outer = _read(folder / _PROCESSOR)
    for name, part in parts.items():
        if name in outer:
            outer[name] = dict(part)
            _write(folder / _PROCESSOR, outer)
        else:
            _write(folder / _FILES[name], dict(part))


def _counts(family: Rule) -> list[Any]:
    """What a rule makes of media of many sizes; a medium that it refuses, by the words."""
    media: list[MediaHeader] = [MediaHeader(kind="image", height=height, width=width) for height, width in _SIDES]
    if "video" in family.placeholders:
        media += [
            MediaHeader(kind="video", height=height, width=width, frames=frames, fps=fps, seconds=frames / fps)
            for height, width in _SIDES[1:4]
            for frames, fps in _CLIPS
        ]
    counts: list[Any] = []
    for header in media:
        try:
            counts.append(family.image(header, 1) if header.kind == "image" else family.video(header))
        except (PacktrainError, RecordError) as error:
            counts.append(str(error))
    return counts


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
