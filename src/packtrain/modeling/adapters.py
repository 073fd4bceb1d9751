"""What of a model is trained: whole parts of it, or adapters on its frozen weights.

Adapters sit on every matrix of the decoder's layers. Parts that are trained whole beside them become peft's modules to
save, so that checkpoints and saved adapters hold them without further help; the model then has those weights twice, as
they were and as they are trained.

Adapters compute in the precision of the model where the optimizer has fp32 masters of them. In fp32, as peft makes
them, every adapted matrix would cast its input, keep the copy for the backward pass, and multiply in fp32.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packtrain.core.errors import ConfigError, nearest
from packtrain.modeling.model_parts import PARTS, decoder_layers, model_parts, part_of_weight, transformers_model
from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.patches import is_on, put, set_back
from packtrain.modeling.vision import has_small_image, small_image_features

ALL_LINEAR = "all-linear"  # peft's own word for every matrix of a model but its head
_UNTRAINED_COPY = "original_module"  # what peft keeps of a module that is trained whole
_SAMPLED = 16  # numbers of a frozen weight, from all over it
_CAST = "_cast_adapter_dtype"  # of peft's tuners: called after every loading


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedPart:
    """Numbers of one part of a model."""

    name: str  # of PARTS
    weights: int  # without adapters
    trained: int
    adapters: int  # of what is trained: in adapters


def set_trainable(model: Any, settings: ModelSettings, *, half_adapters: bool = False) -> Any:
    """Freeze what is not trained and add adapters where requested; the model to train is returned.

    `half_adapters`: beside half-precision weights adapters are in half precision too, for an optimizer that keeps fp32
    masters; else they are fp32. DoRA's always are: it takes norms of weights, for which half precision is too coarse.

    Weights that no image reaches (layers after the one whose features are used) are frozen as well: they would get no
    gradients, for which ranks would wait.
    """
    _require_parts(model, settings)
    adapters = settings.has_adapters and settings.train_language
    wanted = {
        "language": settings.train_language and not adapters,
        "vision": settings.trains_vision,
        "projector": settings.trains_projector,
    }
    for name, weight in model.named_parameters():
        weight.requires_grad_(wanted[part_of_weight(name)] and weight.is_floating_point())
    _freeze_unreached(model)
    if adapters:
        model = _with_adapters(model, settings, half=half_adapters and settings.method != "dora")
        _freeze_unreached(model)  # peft trains all of a module
    if not any(part.trained for part in describe_trainable(model)):
        raise ConfigError(
            "model",
            got=f"a {model.config.model_type} model with every part frozen",
            expected="a trainable part",
            fix="set train_language: true",
        )
    return model


def describe_trainable(model: Any) -> tuple[TrainedPart, ...]:
    """Count trainable parameters by part; parts that a model does not have are left out."""
    counted = {name: [0, 0, 0] for name in PARTS}
    for name, weight in model.named_parameters():
        pieces = name.split(".")
        if _UNTRAINED_COPY in pieces:
            continue
        adapter = any(piece.startswith("lora_") for piece in pieces)
        size, trained = _numel(weight), weight.requires_grad
        counts = counted[part_of_weight(name)]
        counts[0] += 0 if adapter else size
        counts[1] += size if trained else 0
        counts[2] += size if trained and adapter else 0
    return tuple(
        TrainedPart(name=name, weights=weights, trained=trained, adapters=adapters)
        for name, (weights, trained, adapters) in counted.items()
        if weights or trained
    )


def _numel(weight: nn.Parameter) -> int:
    """Numbers of a weight; 4-bit ones are stored two to a byte, and know what they were."""
    state: Any = getattr(weight, "quant_state", None)
    return int(torch.Size(state.shape).numel()) if state is not None else weight.numel()


def _require_parts(model: Any, settings: ModelSettings) -> None:
    asked = [name for name in ("train_vision", "train_projector") if getattr(settings, name)]
    if asked and model_parts(model).vision is None:
        raise ConfigError(
            f"model.{asked[0]}",
            got=f"true, but {model.config.model_type} has no vision encoder",
            expected="a model that takes images",
            fix=f"leave {asked[0]} out",
        )
    if settings.method == "qlora" and not settings.train_language:
        raise ConfigError(
            "model.train_language",
            got="false with the method qlora",
            expected="adapters on the 4-bit weights, which are not trainable",
            fix="use the method full with train_language: false, or train_language: true",
        )


# ---- adapters


def _with_adapters(model: Any, settings: ModelSettings, *, half: bool) -> Any:
    """Adapters, and the parts trained in full as modules beside them."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ConfigError(
            f"model.method {settings.method}", got=str(error), fix="pip install 'packtrain[train]'"
        ) from error
    alpha: Any = settings.scale
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=alpha,
        lora_dropout=settings.lora_dropout,
        use_dora=settings.method == "dora",
        target_modules=_targets(model, settings),
        modules_to_save=list(_modules_trained_whole(model)) or None,
    )
    try:
        adapted = get_peft_model(model, config, autocast_adapter_dtype=not half)
    except ValueError as error:
        raise ConfigError(
            "model.lora_target_modules", got=str(error), expected="modules that adapters can be added to"
        ) from error
    keep_adapter_precision(adapted)
    _share_configs(adapted)
    return adapted


def keep_adapter_precision(model: Any) -> None:
    """Leave adapters in the precision they have when others are loaded into them, as Trainer does to resume.

    peft would replace those in half precision by fp32 ones, which the optimizer does not know.
    """
    tuner = getattr(model, "base_model", None)
    if isinstance(tuner, nn.Module) and hasattr(tuner, _CAST) and not is_on(tuner, "adapter_precision"):
        put(tuner, "adapter_precision", partial(set_back, tuner, _CAST, tuner.__dict__.get(_CAST)))
        setattr(tuner, _CAST, _cast_nothing)


def _cast_nothing(adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
    """Instead of peft's own."""


def _share_configs(adapted: Any) -> None:
    """Let copies follow the config of the model: its attention is switched there, once for all modules."""
    for module in adapted.modules():
        for copied in getattr(module, "modules_to_save", {}).values() if hasattr(module, _UNTRAINED_COPY) else ():
            for before, after in zip(getattr(module, _UNTRAINED_COPY).modules(), copied.modules(), strict=True):
                if "config" in before.__dict__:
                    after.config = before.config


def _targets(model: Any, settings: ModelSettings) -> str | list[str]:
    """The user's names, as peft takes them, or a pattern for the matrices of the decoder's layers."""
    asked = settings.lora_target_modules
    if asked is None:
        return decoder_linear_pattern(model)
    if asked == (ALL_LINEAR,):
        return ALL_LINEAR
    names = [name for name, _ in model.named_modules()]
    for given in asked:
        if not any(name == given or name.endswith(f".{given}") for name in names):
            last = sorted({name.rsplit(".", 1)[-1] for name in names if name} - {"", *map(str, range(1000))})
            raise ConfigError(
                "model.lora_target_modules",
                got=given,
                expected=f"module names or their suffixes, or {ALL_LINEAR}",
                fix=nearest(given, last) or "leave it out for all linear layers of the decoder",
            )
    return list(asked)


def decoder_linear_pattern(model: Any) -> str:
    """A pattern for the names of all linear maps in the layers of the language model, and of nothing else."""
    layers = decoder_layers(model)
    prefix = next(name for name, module in model.named_modules() if module is layers)
    inside = {
        name for layer in layers for name, module in layer.named_modules() if name and isinstance(module, nn.Linear)
    }
    if not inside:
        raise ConfigError(
            "model.method",
            got=f"{model.config.model_type}: no linear layers in its language model",
            expected="linear layers that adapters can be added to",
            fix="set lora_target_modules",
        )
    return rf"{re.escape(prefix)}\.\d+\.(?:{'|'.join(re.escape(name) for name in sorted(inside))})"


def _modules_trained_whole(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """The names of modules to train whole: layers, and whatever holds parameters itself.

    Larger ones would do as well, but peft's wrapper stands in for a module only when it is called with its input
    first, which is sure for these. A parameter of the model itself (LLaVA-NeXT's `image_newline`) cannot be wrapped
    and stays frozen.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    if not any(weight.requires_grad for weight in module.parameters()):
        return
    holds = any(parameter is not None for parameter in module._parameters.values())
    parts = {part_of_weight(f"{prefix}{name}") for name, _ in module.named_parameters()}
    if "language" not in parts and (holds or isinstance(module, GradientCheckpointingLayer)):
        yield prefix.removesuffix(".")
        return
    for name, child in module.named_children():
        yield from _modules_trained_whole(child, f"{prefix}{name}.")


# ---- weights that nothing depends on


def _freeze_unreached(model: Any) -> None:
    """Freeze trained weights of the vision side on which the features of an image do not depend."""
    base, parts = transformers_model(model), model_parts(model)
    trained = [
        weight
        for name, weight in base.named_parameters()
        if weight.requires_grad and part_of_weight(name) != "language"
    ]
    if parts.vision is None or not trained or not has_small_image(base.config.model_type):
        return
    place = next(iter(parts.vision.parameters()))
    with torch.enable_grad():
        features = small_image_features(parts.inner, device=place.device, dtype=place.dtype)
        reached = {id(weight) for feature in features for weight in _weights_of_graph(feature)}
    for weight in trained:
        weight.requires_grad_(id(weight) in reached)


def _weights_of_graph(result: Tensor) -> Iterator[Tensor]:
    """What a tensor was computed from, by the graph that its backward pass would take; none is computed."""
    seen, waiting = set[Any](), [result.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting.extend(following for following, _ in node.next_functions)


# ---- what frozen weights are known by


@torch.no_grad()
def frozen_state(model: Any) -> dict[str, str]:
    """A hash of some numbers of every frozen weight, by its precision: that may be another elsewhere.

    Checkpoints of adapters do not hold the weights that they belong to. Names and order of weights are left to the
    library, and weights of 4 bits to the GPU: neither is part of it.
    """
    samples: dict[str, list[torch.Tensor]] = {}
    for weight in model.parameters():
        if not (weight.requires_grad or weight.is_meta) and weight.is_floating_point() and weight.numel():
            flat = weight.detach().reshape(-1)
            kept = flat[:: max(1, len(flat) // _SAMPLED)][:_SAMPLED].float()
            samples.setdefault(str(weight.dtype).removeprefix("torch."), []).append(kept)
    return {dtype: _hash(parts) for dtype, parts in sorted(samples.items())}


def _hash(parts: list[torch.Tensor]) -> str:
    values = torch.cat(parts).cpu().numpy()  # waits for the GPU once
    stops = torch.tensor([len(part) for part in parts]).cumsum(0).tolist()
    each = sorted(values[stop - len(part) : stop].tobytes() for part, stop in zip(parts, stops, strict=True))
    return hashlib.sha256(b"".join(each)).hexdigest()[:20]
