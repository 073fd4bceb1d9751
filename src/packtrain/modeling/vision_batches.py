"""Vision encoders that fit: run on some images at a time, and recomputed independently of the language model.

A encoder that is trained keeps what its backward pass needs of all its images, however they are batched. So sub-batches
bound what is needed for a moment, and checkpointing bounds what is kept. A frozen encoder keeps nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packtrain.core.errors import ConfigError
from packtrain.modeling.model_parts import model_parts, transformers_model
from packtrain.modeling.patches import put, set_back, take_off

_ROWS, _GRIDS, _ENDS = "hidden_states", "grid_thw", "cu_seqlens"
_PER_PATCH = (_ROWS, "position_ids", "interp_indices", "interp_weights")
_TILES, _MASKS = "pixel_values", "patch_attention_mask"


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
        if is_sharded(self._encoder):
            runs = _most_of_all_ranks(runs, given[_ROWS if self._takes_rows else _TILES].device)
        if runs == 1:
            return self._whole(*args, **kwargs)
        outputs = [self._whole(**{**given, **piece}) for piece in pieces]
        again = [self._whole(**{**given, **pieces[0]}) for _ in range(runs - len(pieces))]
        return _joined(outputs, again)

    def _pieces(self, given: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
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


def is_sharded(encoder: nn.Module) -> bool:
    """Whether modules inside an encoder gather their weights from other ranks each time they run."""
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(module, FSDPModule) for module in encoder.modules() if module is not encoder):
        return True
    return any(hasattr(parameter, "ds_id") for parameter in encoder.parameters())


def _most_of_all_ranks(runs: int, device: torch.device) -> int:
    most = torch.tensor(runs, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most)


# ---- outputs


def _joined(outputs: Sequence[Any], again: Sequence[Any]) -> Any:
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
            **{key: _joined([one[key] for one in outputs], [one[key] for one in again]) for key in first}
        )
    if isinstance(first, list | tuple):
        parts = [_joined([one[at] for one in outputs], [one[at] for one in again]) for at in range(len(first))]
        return type(first)(parts)
    return first


# ---- checkpointing


def checkpoint_parts(model: Any, *, language: bool, vision: bool) -> None:
    """Recompute the layers of language model and vision encoder in the backward pass, or keep them, each on its own.

    Inputs need no gradients for it, so a frozen encoder is not drawn into the backward pass, and is not recomputed.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    parts = model_parts(model)
    recompute = partial(checkpoint, use_reentrant=False)
    vision = vision and parts.vision is not None and any(weight.requires_grad for weight in parts.vision.parameters())
    for part, enabled in ((parts.language, language), (parts.vision, vision)):
        layers = 0
        for module in part.modules() if part is not None else ():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = enabled  # type: ignore[assignment]
                module._gradient_checkpointing_func = recompute  # type: ignore[assignment]
                layers += isinstance(module, GradientCheckpointingLayer)
        if enabled and part is not None and not layers:
            raise ConfigError(
                "training.gradient_checkpointing",
                got=f"{type(part).__name__}: no layers that transformers can recompute",
                expected="a model with gradient checkpointing",
                fix="turn it off for this part",
            )
    transformers_model(model).disable_input_require_grads()
