"""The vision encoder in training on packs: in sub-batches, checkpointed, without slow convolutions, on every rank.

Sub-batches (`split_vision`) bound the memory that is needed for a moment, checkpointing (`checkpoint_parts`) bounds
what a trained encoder keeps for its backward pass, however its images are batched. A frozen encoder keeps nothing.

A pack of text only (or an empty one) never calls the encoder. Then DDP waits for gradients that do not come, and FSDP
for shards that this rank does not ask for. So `add_empty_media_hook` adds `0 * encoder(small image)` to the embeddings
of such a batch: the encoder and its projector run and get gradients of zero. In a step in which no rank has media the
optimizer has to pass over them, or decay and momentum would move them: `training.loss` sees to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from packtrain.core.errors import ConfigError, DataError
from packtrain.core.modality import PIXELS
from packtrain.families.family import BatchContract
from packtrain.families.registry import find_family
from packtrain.modeling.model_parts import Arguments, ModelParts, model_parts, transformers_model
from packtrain.modeling.patches import is_on, put, set_back, take_off

_ROWS, _GRIDS, _ENDS = "hidden_states", "grid_thw", "cu_seqlens"
_PER_PATCH = (_ROWS, "position_ids", "interp_indices", "interp_weights")
_TILES, _MASKS = "pixel_values", "patch_attention_mask"
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


# ---- sub-batches


class SplitVision:
    """The forward pass of one encoder, a part of its images at a time; `remove` makes it as it was.

    Images stay whole, and so does every frame of a video; one that is larger than the limit runs alone. Where layers
    of the encoder are sharded, running them is a collective: ranks agree on how often, and those with fewer images run
    their first ones again, without effect.
    """

    def __init__(self, encoder: Any, max_patches: int) -> None:
        self._encoder, self._max_patches = encoder, max_patches
        self._replaced = encoder.__dict__.get("forward")
        self._whole = encoder.forward
        self._names = list(inspect.signature(self._whole).parameters)
        self._takes_rows = _GRIDS in self._names
        encoder.forward = self._forward

    def remove(self) -> None:
        set_back(self._encoder, "forward", self._replaced)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        pieces = list(self._pieces(given))
        runs = len(pieces)
        encoder = self._encoder
        if _is_sharded((one for one in encoder.modules() if one is not encoder), encoder.parameters()):
            most = torch.tensor(runs, device=given[_ROWS if self._takes_rows else _TILES].device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            runs = int(most)
        if runs == 1:
            return self._whole(*args, **kwargs)
        outputs = [self._whole(**{**given, **piece}) for piece in pieces]
        again = [self._whole(**{**given, **pieces[0]}) for _ in range(runs - len(pieces))]
        return _concatenated(outputs, again)

    def _pieces(self, given: Arguments) -> Iterator[dict[str, Tensor]]:
        """The tensors of each piece, taken out of the arguments."""
        names = (*_PER_PATCH, _GRIDS, _ENDS) if self._takes_rows else (_TILES, _MASKS)
        whole = {name: given[name] for name in names if isinstance(given.get(name), Tensor)}
        others = [name for name, value in given.items() if isinstance(value, Tensor) and name not in whole]
        if others:
            raise ConfigError(
                "training.vision_batch_patches",
                got=f"a vision encoder called with {', '.join(others)}",
                expected="an encoder whose arguments can be split between images",
                fix="leave vision_batch_patches out",
            )
        yield from _rows(whole, self._max_patches) if self._takes_rows else self._tiles(whole)

    def _tiles(self, whole: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Encoders that take tiles, all of one size."""
        tiles, patch = whole[_TILES], self._encoder.config.patch_size
        down, across = patch if isinstance(patch, list | tuple) else (patch, patch)
        patches = (tiles.shape[-2] // down) * (tiles.shape[-1] // across)
        each = max(1, self._max_patches // patches)
        for start in range(0, len(tiles), each):
            yield {name: value[start : start + each] for name, value in whole.items()}


def _rows(whole: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Encoders that take the patches of all images as one row, and (time, height, width) of each.

    What was worked out for them before is cut as well: numbers of each patch, and the ends of frames.
    """
    grids = whole[_GRIDS]
    if len(whole[_ROWS]) <= limit:  # known without waiting for the GPU
        yield dict(whole)
        return
    patch = frame = 0
    for sizes in grid_pieces(grids.tolist(), limit):
        following = patch + sum(time * height * width for time, height, width in sizes)
        frames = sum(time for time, _, _ in sizes)
        piece = {name: whole[name][patch:following] for name in _PER_PATCH if name in whole}
        if _ENDS in whole:
            ends = whole[_ENDS][frame : frame + frames + 1]
            piece[_ENDS] = ends - ends[0]
        yield {**piece, _GRIDS: grids.new_tensor(sizes)}
        patch, frame = following, frame + frames


def grid_pieces(grids: Iterable[Sequence[int]], limit: int) -> Iterator[list[list[int]]]:
    """Grids in chunks of at most this many patches; videos are cut between frames, which do not attend to each other.

    >>> list(grid_pieces([(1, 2, 4), (3, 2, 2), (1, 4, 4)], 12))
    [[[1, 2, 4], [1, 2, 2]], [[2, 2, 2]], [[1, 4, 4]]]
    """
    piece: list[list[int]] = []
    used = 0
    for time, height, width in grids:
        while time:
            fitting = (limit - used) // (height * width)
            if fitting < 1 and piece:
                yield piece
                piece, used = [], 0
                continue
            taken = min(time, max(fitting, 1))
            piece.append([taken, height, width])
            used += taken * height * width
            time -= taken
    if piece:
        yield piece


def split_vision(model: Any, max_patches: int) -> SplitVision | None:
    """Let a model's vision encoder run on at most this many patches at a time; None where there is no encoder.

    Numbers stay the same up to the order of summation. An earlier split is replaced.
    """
    encoder: Any = model_parts(model).vision
    if encoder is None:
        return None
    unsplit_vision(model)
    split = SplitVision(encoder, max_patches)
    put(encoder, "vision_batches", split.remove)
    return split


def unsplit_vision(model: Any) -> None:
    """Let the vision encoder run on all images together again."""
    encoder = model_parts(model).vision
    if encoder is not None:
        take_off(encoder, "vision_batches")


def _is_sharded(modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter]) -> bool:
    """Whether modules gather their weights from other ranks each time they run (FSDP2, DeepSpeed ZeRO-3).

    Asked of modules, because FSDP's parameters look like whole ones between gathering and freeing them.
    """
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in modules):
        return True
    return any(hasattr(parameter, "ds_id") for parameter in parameters)


def _concatenated(outputs: Sequence[Any], again: Sequence[Any]) -> Any:
    """What one run on everything would have given: tensors in the same place, concatenated.

    `again` are outputs that must be part of the backward pass just as these are, and change nothing.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        whole = torch.cat(list(outputs))
        if again and whole.is_floating_point():
            nothing = torch.stack([output.float().sum() for output in again]).sum()
            whole = whole + (0.0 * nothing).to(whole.dtype)
        return whole
    if isinstance(first, Mapping):
        return type(first)(
            **{key: _concatenated([one[key] for one in outputs], [one[key] for one in again]) for key in first}
        )
    if isinstance(first, list | tuple):
        parts = [_concatenated([one[at] for one in outputs], [one[at] for one in again]) for at in range(len(first))]
        return type(first)(parts)
    return first


# ---- checkpointing


def checkpoint_parts(model: Any, *, language: bool, vision: bool, only_possible: bool = False) -> None:
    """Recompute the layers of language model and vision encoder in the backward pass, or keep them, each on its own.

    Inputs need no gradients for it, so a frozen encoder is not drawn into the backward pass, and is not recomputed.
    `only_possible`: an encoder whose layers cannot be recomputed keeps them.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    parts = model_parts(model)
    recompute = partial(checkpoint, use_reentrant=False)
    vision = vision and parts.vision is not None and any(weight.requires_grad for weight in parts.vision.parameters())
    for part, enabled in ((parts.language, language), (parts.vision, vision)):
        layers = 0
        for module in part.modules() if part is not None else ():
            if hasattr(module, "gradient_checkpointing"):
                _set_checkpointing(module, enabled, recompute)
                layers += isinstance(module, GradientCheckpointingLayer)
        if enabled and part is not None and not layers and not (only_possible and part is parts.vision):
            raise ConfigError(
                "training.gradient_checkpointing",
                got=f"{type(part).__name__}: no layers that transformers can recompute",
                expected="a model with gradient checkpointing",
                fix="turn it off for this part",
            )
    transformers_model(model).disable_input_require_grads()


def _set_checkpointing(module: Any, enabled: bool, recompute: Callable[..., Any]) -> None:
    names = ("gradient_checkpointing", "_gradient_checkpointing_func")
    if not is_on(module, "checkpointing"):
        before = [(name, module.__dict__.get(name)) for name in names]
        put(module, "checkpointing", partial(_set_all_back, module, before))
    module.gradient_checkpointing = enabled
    module._gradient_checkpointing_func = recompute


def _set_all_back(module: nn.Module, before: Iterable[tuple[str, Any]]) -> None:
    for name, value in before:
        set_back(module, name, value)


# ---- patch embeddings


def use_patch_matmul(model: Any) -> int:
    """Compute a model's patch embeddings as matrix products; returns how many modules that changed, and is idempotent.

    Where the kernel of a convolution is as large as its input, it is one product of matrices. Convolutions are slow at
    that, in half precision above all. Weights, names and results stay, and inputs of another size are convolved.
    """
    vision = model_parts(model).vision
    convolutions = [module for module in vision.modules() if _is_patchwise(module)] if vision is not None else []
    for module in convolutions:
        before = module.__dict__.get("forward")
        module.forward = _PatchMatmul(module)
        put(module, "patch_matmul", partial(set_back, module, "forward", before))
    return len(convolutions)


def _is_patchwise(module: nn.Module) -> bool:
    """A convolution that takes pieces side by side and whole, not changed before."""
    return (
        isinstance(module, _CONVOLUTIONS)
        and tuple(module.kernel_size) == tuple(module.stride)
        and module.groups == 1
        and not any(module.padding)
        and set(module.dilation) == {1}
        and not is_on(module, "patch_matmul")
    )


class _PatchMatmul:
    """The forward of one convolution."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        self._convolve = module.forward

    def __call__(self, pixels: Tensor) -> Tensor:
        module = self._module
        if tuple(pixels.shape[2:]) != tuple(module.kernel_size):
            return self._convolve(pixels)
        features = linear(pixels.flatten(1), module.weight.flatten(1), module.bias)
        return features.view(*features.shape, *(1 for _ in module.kernel_size))


# ---- batches without media


class EmptyMediaHook:
    """The hooks on one model; `remove` takes them away again.

    Models that take images and videos apart run their encoder once for each. Where it is sharded, every rank has to
    run it as often as the others: a pack with images only gets a small image in place of the videos, and vice versa.
    """

    def __init__(self, parts: ModelParts, contract: BatchContract) -> None:
        assert parts.vision is not None
        self._parts, self._contract = parts, contract
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

    def _look(self, module: nn.Module, args: Any, kwargs: Arguments) -> None:
        """Remember, for the call of the language model that follows, which pixels this batch does not have."""
        self._missing = sum(kwargs.get(name) is None for name in self._pixels)

    def _add(self, module: nn.Module, args: Any, kwargs: Arguments) -> tuple[Any, Arguments] | None:
        embeds = kwargs.get("inputs_embeds")
        runs = self._runs() if self._missing and embeds is not None else 0
        if embeds is None or not runs:
            return None
        if self._contract.unlisted and not self._contract.small_media:
            return None if not dist.is_initialized() or dist.get_world_size() == 1 else _refuse_ranks(self._contract)
        small = partial(
            small_image_features,
            self._parts.inner,
            device=embeds.device,
            dtype=embeds.dtype,
            made=self._contract.small_media,
        )
        nothing = sum(feature.float().sum() for _ in range(runs) for feature in small())
        return args, {**kwargs, "inputs_embeds": embeds + (0.0 * nothing).to(embeds.dtype)}

    def _runs(self) -> int:
        """How often the encoder has still to run.

        Shards are gathered by all ranks equally often. What is whole on every rank matters for its gradients only.
        """
        vision = self._parts.vision
        assert vision is not None
        parameters = [*vision.parameters(), *self._parts.projector()]
        # What the inner model holds itself has been gathered with it.
        others = (child for child in self._parts.inner.children() if child is not self._parts.language)
        if _is_sharded((module for child in others for module in child.modules()), parameters):
            return self._missing
        trains = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in parameters)
        return int(trains and self._missing == len(self._pixels))


def small_image_features(
    inner: Any, *, device: torch.device, dtype: torch.dtype, made: Mapping[str, np.ndarray] | None = None
) -> Iterator[Tensor]:
    """Everything a model makes of a small image: what replaces tokens, and what is added in deeper layers.

    `made` is such an image where the model's family has none.
    """
    if not made:
        family = find_family(inner.config.model_type)
        make = family.small_image if family is not None else None
        assert make is not None, "contracts with media have a small image"
        made = make(inner.config)
    dummy = {name: torch.from_numpy(value).to(device) for name, value in made.items()}
    dummy["pixel_values"] = dummy["pixel_values"].to(dtype)
    outputs = inner.get_image_features(**dummy, return_dict=True)
    yield from _tensors(getattr(outputs, "pooler_output", outputs))
    yield from _tensors(getattr(outputs, "deepstack_features", None))


def _refuse_ranks(contract: BatchContract) -> NoReturn:
    raise DataError(
        "a batch without media",
        got=f"model type {contract.model_type!r}, which has no get_image_features to run on every rank",
        expected="media in every batch, or one process",
        fix="train in one process, or on records that all have media",
    )


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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif value is not None:
        for part in value:
            yield from _tensors(part)
