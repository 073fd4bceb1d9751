"""The parts of a transformers model that packing touches: the inner model, its language model, its vision encoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from packtrain.core.errors import ConfigError
from packtrain.families.family import ModuleNames
from packtrain.families.registry import find_family
from packtrain.predicting.weights import part_of

HALF = (torch.bfloat16, torch.float16)
Arguments = dict[str, Any]  # the keyword arguments of a forward pass, in a hook
PARTS = ("language", "vision", "projector")
_LANGUAGE = ("language_model", "text_model")
_VISION = ("visual", "vision_tower", "vision_model")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelParts:
    """Where hooks go. They go on the inner model, because adapters call the outer one past its hooks."""

    inner: nn.Module  # gets the whole batch, media included
    language: nn.Module  # gets embeddings; the inner model itself where there is no vision
    vision: nn.Module | None

    def projector(self) -> list[nn.Parameter]:
        """What is in neither; mergers inside an encoder belong to the projector as well (`part_of_weight`)."""
        if self.vision is None:
            return []
        inside = {id(p) for part in (self.language, self.vision) for p in part.parameters()}
        return [p for p in self.inner.parameters() if id(p) not in inside]


def part_of_weight(name: str) -> str:
    """Which of PARTS a parameter belongs to, by its name, in wrappers too; counted as checkpoints are counted.

    Embeddings and the output head belong to the language model, mergers inside a vision encoder to the projector.
    """
    part = part_of(name)
    return part if part in PARTS else "language"


def model_parts(model: Any) -> ModelParts:
    """The parts of a model, also of one inside DDP, a compiled one, or one with adapters."""
    inner = transformers_model(model)
    inner = getattr(inner, getattr(inner, "base_model_prefix", "") or "model", inner)
    family = find_family(getattr(getattr(inner, "config", None), "model_type", ""))
    own = family.modules if family is not None else ModuleNames()

    def first(*names: str) -> nn.Module | None:
        return next((part for name in names if (part := getattr(inner, name, None)) is not None), None)

    language, vision = first(own.language, *_LANGUAGE), first(own.vision, *_VISION)
    return ModelParts(inner=inner, language=inner if language is None else language, vision=vision)


def decoder_layers(model: Any) -> nn.ModuleList:
    """The layers of the language model: the largest list of modules in it."""
    language = model_parts(model).language
    lists = [module for module in language.children() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ConfigError(
            "model.method",
            got=f"{type(language).__name__}: its layers were not found",
            expected="a language model with a list of layers",
            fix="use the method full",
        )
    return max(lists, key=lambda layers: sum(weight.numel() for weight in layers.parameters()))


def transformers_model(model: Any) -> Any:
    """The transformers model inside wrappers."""
    from transformers import PreTrainedModel

    inner = model
    while not isinstance(inner, PreTrainedModel):
        # Modules they hold themselves: adapters hand other names on to the model inside.
        held = getattr(inner, "_modules", {})
        inside = next(
            (held[name] for name in ("module", "_orig_mod", "base_model", "model") if held.get(name) is not None), None
        )
        if inside is None:
            return model
        inner = inside
    return inner
