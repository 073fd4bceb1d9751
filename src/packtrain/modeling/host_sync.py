"""A step in which the host and the GPU do not wait for each other.

A number that the host asks of the GPU lets it wait until everything before is done, and the GPU then wait for the host.
Encoders that look at the sizes of images while they run do: Qwen3-VL some twenty times in a step. What it computes from
them is computed here on the host, from sizes that were not moved to the GPU, and handed over by the names that
transformers has for it. Where image tokens are is found without asking how many there are, because that is known.
Results are the same. Sizes that did move to the GPU are left alone: then the model works as it did, and waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from packtrain.core.modality import GRIDS, VISION
from packtrain.core.user_code import lazy
from packtrain.families.registry import find_family
from packtrain.modeling.model_parts import Arguments, ModelParts, model_parts
from packtrain.modeling.patches import is_on, put, set_back


@contextmanager
def in_one_thread() -> Iterator[None]:
    """As a context or a decorator: torch's work on the host is not shared among threads.

    Work of some ten thousand numbers is shared among as many threads as there are processors, and waits for the last
    of them. While workers make batches, that one has to wait for a processor: milliseconds instead of microseconds,
    several times in a step, in which nothing is sent to the GPU.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device; only from pinned memory does the host not wait for all that the GPU has to do."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def avoid_host_sync(model: Any) -> tuple[str, ...]:
    """Change a model this way; the names of what should stay on the host when a batch is moved. Idempotent."""
    parts = model_parts(model)
    family = find_family(str(getattr(parts.inner.config, "model_type", "")))
    if family is None or family.image_sizes is None or parts.vision is None:
        return ()
    if not is_on(parts.inner, "host_sync"):
        sizes = _Sizes(parts.vision, lazy(family.image_sizes))
        hooks = (
            parts.inner.register_forward_pre_hook(sizes.add, with_kwargs=True),
            parts.language.register_forward_pre_hook(sizes.drop, with_kwargs=True),
        )
        inner: Any = parts.inner
        inner.get_placeholder_mask = _Placeholders(inner.get_placeholder_mask)
        parts.language._deepstack_process = add_to_tokens  # type: ignore[assignment]
        put(parts.inner, "host_sync", partial(_undo, parts, hooks))
    return GRIDS


def _undo(parts: ModelParts, hooks: Sequence[Any]) -> None:
    for hook in hooks:
        hook.remove()
    set_back(parts.inner, "get_placeholder_mask", None)
    set_back(parts.language, "_deepstack_process", None)


class _Sizes:
    """What follows from the sizes of images, added to the arguments of a forward pass that has them on the host."""

    def __init__(self, encoder: nn.Module, image_sizes: Callable[[Any, Tensor], dict[str, Tensor | int]]) -> None:
        self._encoder, self._image_sizes = encoder, image_sizes

    def add(self, module: nn.Module, args: Any, kwargs: Arguments) -> tuple[Any, Arguments] | None:
        sizes: dict[str, Tensor | int] = {}
        for kind in VISION:
            grid, rows = kwargs.get(str(kind.sizes)), kwargs.get(kind.features)
            if grid is not None and rows is not None and _are_apart(grid, rows):
                sizes |= {f"{kind.name}_{name}": value for name, value in self.of(grid, rows.device).items()}
        return (args, {**kwargs, **sizes}) if sizes else None

    def drop(self, module: nn.Module, args: Any, kwargs: Arguments) -> tuple[Any, Arguments]:
        """The language model, which is handed everything, has no use for them."""
        return args, {name: value for name, value in kwargs.items() if not name.startswith(("image_", "video_"))}

    @in_one_thread()
    def of(self, grid: Tensor, device: torch.device) -> dict[str, Tensor | int]:
        """By the names that the encoder takes them by."""
        sizes = self._image_sizes(self._encoder, grid)
        return {name: send(value, device) if isinstance(value, Tensor) else value for name, value in sizes.items()}


def _are_apart(grid: Tensor, rows: Tensor) -> bool:
    return grid.device != rows.device


class _Placeholders:
    """Where image tokens are, without comparing their number with that of features: packs are checked before."""

    def __init__(self, ordinary: Any) -> None:
        self._ordinary = ordinary

    def __call__(self, input_ids: Any, inputs_embeds: Tensor, **features: Any) -> Any:
        masks = self._ordinary(input_ids, inputs_embeds=inputs_embeds)
        return tuple(mask.as_subclass(_TokenMask) for mask in masks)


class _TokenMask(Tensor):
    """A mask of image tokens: putting features there counts nothing; for everything else it is a plain tensor.

    The gradient of `masked_scatter` selects by the mask, and so asks the GPU how many there are.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.as_subclass(Tensor) if isinstance(one, cls) else one for one in args]
        if func is Tensor.masked_scatter:
            return put_into_tokens(*plain)
        return func(*plain, **(kwargs or {}))


def put_into_tokens(embedded: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    """Features in the place of the embeddings that a mask marks, as many as there are features."""
    places = torch.nonzero_static(mask[..., 0].flatten(), size=len(features))[:, 0]
    return embedded.flatten(0, 1).index_copy(0, places, features.to(embedded.dtype)).view_as(embedded)


def add_to_tokens(hidden: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    """Features added to the hidden states of the tokens that a mask marks, as many as there are features."""
    places = torch.nonzero_static(mask.flatten(), size=len(features))[:, 0]
    return hidden.flatten(0, 1).index_add(0, places, features.to(hidden.dtype)).view_as(hidden)
