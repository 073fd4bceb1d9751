"""Compiled layers: decoder layers for the static shapes of packs, vision blocks for any number of patches.

Each layer is compiled by itself and all layers of a kind share what was compiled, so that it takes seconds and one
graph is kept, not one for each layer. Everything else stays as transformers runs it: checkpointing calls a layer and
gets a compiled one, adapters inside a layer are compiled with it, and names of parameters do not change.

Tokens of a pack are constant (`StaticShapes`). The number of its samples and the length of the longest are not, and
compiled code takes any. Patches vary several times as much as tokens do between packs: filling them up to the most of
any pack would be more work than static shapes save, so encoders are compiled for any number of them from the start.

A layer that is recomputed must meet the graph that computed it first: another may keep other tensors for the backward
pass, and checkpointing ends the step. Where several graphs fit, torch prefers the one that ran last, which may be one
that a later layer had made. Here they are tried in the order in which they were made, so the first that fits stays
the first, whatever is compiled later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from packtrain.core.errors import ConfigError, PacktrainError, in_one_line
from packtrain.modeling.model_parts import model_parts
from packtrain.modeling.patches import put, set_back, take_off

_COMPILERS = ("torch._inductor", "torch._dynamo", "triton")
# Where layers find the length of the longest sample: a number that must not be taken for a constant.
_LONGEST = r"L\['kwargs'\]\['max_length_q'\]"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledLayers:
    """How many layers are compiled; none where a model is not built of layers that we recognise."""

    language: int
    vision: int


def compile_layers(
    model: Any,
    *,
    language: bool = True,
    vision: bool = True,
    static_shapes: bool = True,
    backend: str = "inductor",
    options: Mapping[str, Any] | None = None,
) -> CompiledLayers:
    """Let a model's layers be compiled when they are first called; those that are compiled already stay so.

    `static_shapes` says that batches have static shapes. Without it decoder layers too are compiled for any length.
    """
    parts = model_parts(model)
    encoders = list(_layers(parts.vision)) if parts.vision is not None and vision else []
    inside = set(parts.vision.modules()) if parts.vision is not None else set()
    decoders = [layer for layer in _layers(parts.language) if layer not in inside] if language else []
    _mark_longest_dynamic()
    _try_graphs_in_order()
    chosen: dict[str, Any] = {"backend": backend, "options": dict(options) if options else None}
    for layer in decoders:
        _compile(layer, dynamic=None if static_shapes else True, **chosen)
    for layer in encoders:
        _compile(layer, dynamic=True, **chosen)
    return CompiledLayers(language=len(decoders), vision=len(encoders))


def undo_compile(model: Any) -> None:
    """Run every layer eagerly again."""
    for layer in _layers(model_parts(model).inner):
        take_off(layer, "compiled")


def _mark_longest_dynamic() -> None:
    """Arguments that are numbers can be marked by their names only, and for the whole process."""
    import_module("torch._dynamo")  # from here on, attention marks what varies in tensors
    named = [name for name in torch.compiler.config.dynamic_sources.split(",") if name]
    if _LONGEST not in named:
        torch.compiler.config.dynamic_sources = ",".join([*named, _LONGEST])


def _try_graphs_in_order() -> None:
    """Of graphs; for the whole process, as torch has it. A version without this choice is left as it is."""
    recent_first = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)
    if recent_first is not None:
        recent_first(False)


def _compile(layer: nn.Module, **how: Any) -> None:
    if layer._compiled_call_impl is None:
        layer.compile(**how)
        layer._compiled_call_impl = partial(_call, layer._compiled_call_impl)
        put(layer, "compiled", partial(set_back, layer, "_compiled_call_impl", None))


def _call(compiled: Any, *args: Any, **kwargs: Any) -> Any:
    return compiled(*map(_without_view, args[:1]), *args[1:], **kwargs)


def _without_view(hidden: Any) -> Any:
    """The first block of an encoder is given a view, for which a graph would be made that no other block uses."""
    return hidden.clone() if isinstance(hidden, Tensor) and hidden._is_view() else hidden


def _layers(part: nn.Module) -> Iterator[nn.Module]:
    """What transformers checkpoints one by one: the layers of decoders and encoders, in every family."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for module in part.children():
        if isinstance(module, GradientCheckpointingLayer):
            yield module
        else:
            yield from _layers(module)


def refuse_uncompiled(error: BaseException) -> None:
    """A compiler that fails says nothing about the model, nor about packing: raise that in words, pass over others."""
    cause: BaseException | None = None if isinstance(error, PacktrainError) else error
    while cause is not None and not type(cause).__module__.startswith(_COMPILERS):
        cause = cause.__cause__ or cause.__context__
    if cause is not None:
        raise ConfigError(
            "attn_implementation or compiled layers",
            got=f"a kernel that could not be compiled here ({in_one_line(cause)[:300]})",
            expected="an attn_implementation that runs on this device",
            fix="set training.attn_implementation: varlen or sdpa, since flex is compiled for every model and shape; "
            "if it persists, set training.compile: false",
        ) from error
