"""Ranks without media: the vision encoder takes part in every forward pass, so that collectives match on all ranks.

A pack of text only (or an empty one) never calls the encoder. Then DDP waits for gradients that do not come, and FSDP
for shards that this rank does not ask for. A hook adds `0 * encoder(small image)` to the embeddings of such a batch:
the encoder and its projector run and get gradients of zero. In a step in which no rank has media the optimizer has to
pass over them, or decay and momentum would move them: `training.reached` sees to it.

Models that take images and videos apart run their encoder once for each. Where it is sharded, every rank has to run it
as often as the others, so that a pack with images only is given a small image in place of the videos, and the other way
round.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from packtrain.core.modality import PIXELS
from packtrain.families.contracts import BatchContract
from packtrain.families.registry import find_family
from packtrain.modeling.model_parts import ModelParts, model_parts
from packtrain.modeling.patches import put, take_off


class EmptyMediaHook:
    """The hooks on one model; `remove` takes them away again."""

    def __init__(self, parts: ModelParts, contract: BatchContract) -> None:
        assert parts.vision is not None
        self._parts = parts
        self._pixels = tuple(name for name in PIXELS if name in contract.media)
        self._missing = 0
        self._handles = [
            parts.inner.register_forward_pre_hook(self._look, with_kwargs=True),
            parts.language.register_forward_pre_hook(self._add, with_kwargs=True),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _look(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Remember, for the call of the language model that follows, which pixels this batch does not have."""
        self._missing = sum(kwargs.get(name) is None for name in self._pixels)

    def _add(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        embeds = kwargs.get("inputs_embeds")
        if not self._missing or embeds is None:
            return None
        runs = self._runs()
        if not runs:
            return None
        nothing = sum(feature.float().sum() for _ in range(runs) for feature in self._features(embeds))
        return args, {**kwargs, "inputs_embeds": embeds + (0.0 * nothing).to(embeds.dtype)}

    def _runs(self) -> int:
        """How often the encoder has still to run.

        Shards are gathered by all ranks equally often. What is whole on every rank matters for its gradients only.
        """
        vision = self._parts.vision
        assert vision is not None
        parameters = [*vision.parameters(), *self._parts.projector()]
        if is_gathered(self._parts.inner, beside=self._parts.language, parameters=parameters):
            return self._missing
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        return int(trains and self._missing == len(self._pixels))

    def _features(self, embeds: Tensor) -> Iterator[Tensor]:
        return small_image_features(self._parts.inner, device=embeds.device, dtype=embeds.dtype)


def small_image_features(inner: Any, *, device: torch.device, dtype: torch.dtype) -> Iterator[Tensor]:
    """Everything a model makes of a small image: what replaces tokens, and what is added in deeper layers."""
    family = find_family(inner.config.model_type)
    make = family.small_image if family is not None else None
    assert make is not None, "contracts with media have a small image"
    dummy = {name: torch.from_numpy(value).to(device) for name, value in make(inner.config).items()}
    dummy["pixel_values"] = dummy["pixel_values"].to(dtype)
    outputs = inner.get_image_features(**dummy, return_dict=True)
    yield from _tensors(outputs.pooler_output)
    yield from _tensors(getattr(outputs, "deepstack_features", None))


def has_small_image(model_type: str) -> bool:
    """Whether it is known what an image looks like to models of this type."""
    family = find_family(model_type)
    return family is not None and family.small_image is not None


def add_empty_media_hook(model: Any, contract: BatchContract) -> EmptyMediaHook | None:
    """Let a model's vision encoder take part in batches without media; None where there is no encoder.

    Hooks that an earlier call put there are replaced.
    """
    parts = model_parts(model)
    if parts.vision is None or not contract.media:
        return None
    take_off(parts.inner, "empty_media")
    hook = EmptyMediaHook(parts, contract)
    put(parts.inner, "empty_media", hook.remove)
    return hook


def is_gathered(inner: nn.Module, *, beside: nn.Module, parameters: Iterable[nn.Parameter]) -> bool:
    """Whether vision modules gather their parameters from other ranks when they run (FSDP2, DeepSpeed ZeRO-3).

    Asked of modules, because FSDP's parameters look like whole ones between gathering and freeing them. What the inner
    model holds itself has been gathered with it.
    """
    from torch.distributed.fsdp import FSDPModule

    others = (child for child in inner.children() if child is not beside)
    if any(isinstance(module, FSDPModule) for child in others for module in child.modules()):
        return True
    return any(hasattr(parameter, "ds_id") for parameter in parameters)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif value is not None:
        for part in value:
            yield from _tensors(part)
