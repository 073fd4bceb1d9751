"""How the media of an unlisted model are joined, read off its processor: it is the one that knows.

The processor is run on three images apart and on all in one sample. Where joining what it makes of each gives what it
makes of all, tensor by tensor, that is how images of different samples are joined in a packed row:

    image 1   pixel_values (1, 5, 3, 32, 32)   image_sizes (1, 2)
    image 2   pixel_values (1, 3, 3, 32, 32)   image_sizes (1, 2)
    ...
    all       pixel_values (3, 5, 3, 32, 32)   image_sizes (3, 2)    -> "tiles" and "rows"

That the model then keeps the samples apart is for the packing check to show.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from packtrain.core.errors import ConfigError, RecordError, in_one_line, install_hint
from packtrain.core.modality import MODALITIES
from packtrain.core.numbers import counted
from packtrain.core.seeds import stream
from packtrain.core.values import Record
from packtrain.delivery.encode.from_transformers import outer_shell
from packtrain.delivery.encode.processor import ProcessorOutputs, RealProcessor
from packtrain.families.family import BatchContract, Join, ProcessorSettings
from packtrain.records.media import MediaStore
from packtrain.records.synthetic import chat_record, noise_image

if TYPE_CHECKING:
    from torch import Tensor

# Of the images. Processors that keep sizes, or cut tiles, make tensors of other shapes of them.
_SIZES = ((96, 64), (64, 160), (640, 200))
_OURS = ("input_ids", "attention_mask", "labels", "position_ids")  # of the collators
_POSITIONS = "get_rope_index"
TOKEN_KINDS = "mm_token_type_ids"  # not every processor returns them; they follow from the ids
_ROPE_SECTIONS = "mrope_section"
_OWN_FAMILY = "this model needs a family of its own: docs/guides/extending.md"


def complete_contract(
    contract: BatchContract, real: RealProcessor, settings: ProcessorSettings, *, packing: bool
) -> BatchContract:
    """The contract of an unlisted model with its media and positions; ConfigError for what cannot be joined."""
    if not (settings.image or settings.video or settings.processor):
        raise ConfigError(
            settings.folder,
            got=f"model type {settings.model_type!r}, which takes images, without a processor",
            expected="processor_config.json or preprocessor_config.json",
            fix="copy the processor's files from the model's repository",
        )
    model = outer_shell(settings.folder)
    taken = _parameters(model, _base(model), names=("forward",))
    image = MODALITIES["image"]
    apart = [_outputs(real, image_record(first=number)) for number in range(len(_SIZES))]
    together = _outputs(real, image_record(len(_SIZES)))
    names = [name for name in together if name in taken and name not in _OURS]
    joins = {name: _join(name, apart, together) for name in names}
    if image.features not in joins and not any(name.startswith(image.features) for name in joins):
        raise ConfigError(
            settings.folder,
            got=f"a processor that makes {', '.join(map(str, together))} of images, and no {image.features}",
            expected="pixels that the model takes",
            fix=_OWN_FAMILY,
        )
    if TOKEN_KINDS in taken and hasattr(_base(model), _POSITIONS):
        joins[TOKEN_KINDS] = "text"
    return replace(
        contract,
        media=joins,
        positions=_positions(model, settings) if packing else "own",
        small_media=_small_media(model, apart[0]),
    )


def refuse_packing(contract: BatchContract, where: str) -> None:
    """Refuse to pack what has no place in a row of several samples."""
    stacked = [name for name, join in contract.media.items() if join == "samples"]
    if stacked:
        raise ConfigError(
            where,
            got=f"model type {contract.model_type!r}, with tensors that belong to a whole sample: {', '.join(stacked)}",
            expected="tensors with one row for each image or patch, or as long as the text",
            fix="train on padded rows: data.packing=false",
        )


# ---- what the processor makes of images


def image_record(count: int = 1, *, first: int = 0) -> Record:
    """A short chat about images of different sizes."""
    numbers = range(first, first + count)
    images = [noise_image(stream(number, "joins"), f"image {number}", *_SIZES[number]) for number in numbers]
    return chat_record("joins", "What is this?", "A picture.", images)


def _outputs(real: RealProcessor, record: Record) -> ProcessorOutputs:
    """A short chat about images, as the processor returns it."""
    try:
        return real.outputs(record, MediaStore("."))
    except ConfigError:
        raise
    except Exception as error:  # a processor may fail in any way
        reason = error.reason if isinstance(error, RecordError) else in_one_line(error)
        images = sum(1 for _ in record.media())
        no_template = isinstance(error, RecordError) and error.stage == "template"
        raise ConfigError(
            real.folder,
            got=f"a processor that fails on a chat about {counted(images, 'image')}: {reason}",
            expected="a processor whose chat template takes images",
            fix="put the model's chat_template.jinja into its folder"
            if no_template
            else install_hint(error) or "try it with processor.apply_chat_template",
        ) from error


# ---- from tensors to joins


def _join(name: str, apart: Sequence[ProcessorOutputs], together: ProcessorOutputs) -> Join:
    """How the tensors of several samples became one of all; an image may have none of them."""
    import torch

    have = [one for one in (*apart, together) if name in one]
    tensors = [one[name] for one in have]
    if not all(isinstance(tensor, torch.Tensor) and tensor.ndim for tensor in tensors):
        kinds = ", ".join(sorted({type(tensor).__name__ for tensor in tensors}))
        raise ConfigError(
            f"{name} of the processor",
            got=f"{kinds} instead of one tensor",
            expected="tensors with one row for each image or patch, or as long as the text",
            fix=_OWN_FAMILY,
        )
    if all(tensor.shape[:2] == (1, len(one["input_ids"])) for one, tensor in zip(have, tensors, strict=True)):
        return "text" if len({tensor.shape[2:] for tensor in tensors}) == 1 else "samples"
    *parts, whole = tensors
    for same in (torch.equal, _same_shape):  # some processors cut images differently where there are several
        for join, joined in _JOINS.items():
            result = joined(parts) if parts else None
            if result is not None and same(result, whole):
                return join
    return "samples"


def _same_shape(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


def _concatenated(tensors: Sequence[Tensor], dim: int, padded: Callable[[int], bool]) -> Tensor | None:
    """Along one dimension, after padding others with zeros; None where they do not fit."""
    import torch
    from torch.nn.functional import pad

    if any(tensor.ndim != tensors[0].ndim or tensor.ndim <= dim for tensor in tensors):
        return None
    sizes = [max(sides) for sides in zip(*(tensor.shape for tensor in tensors), strict=True)]
    parts = []
    for tensor in tensors:
        missing = [size - have for size, have in zip(sizes, tensor.shape, strict=True)]
        missing[dim] = 0
        if any(gap and not padded(at) for at, gap in enumerate(missing)):
            return None
        parts.append(pad(tensor, [side for gap in reversed(missing) for side in (0, gap)]))
    return torch.cat(parts, dim)


_JOINS: Mapping[Join, Callable[[Sequence[Any]], Any]] = {
    "rows": lambda tensors: _concatenated(tensors, 0, lambda at: False),
    "tiles": lambda tensors: _concatenated(tensors, 0, lambda at: at == 1),
    "padded": lambda tensors: _concatenated(tensors, 0, lambda at: True),
    "images": lambda tensors: _concatenated(tensors, 1, lambda at: at > 1),
    "columns": lambda tensors: _concatenated(tensors, tensors[0].ndim - 1, lambda at: False),
}
assert set(_JOINS) < set(get_args(Join))


# ---- what the model takes


def _base(model: Any) -> Any:
    return getattr(model, getattr(model, "base_model_prefix", "") or "model", model)


def _parameters(*models: Any, names: Sequence[str]) -> set[str]:
    """The parameters of some methods."""
    methods = [method for model in models for name in names if (method := getattr(model, name, None)) is not None]
    return {parameter for method in methods for parameter in inspect.signature(method).parameters}


def _positions(model: Any, settings: ProcessorSettings) -> Any:
    """Which positions the model takes."""
    text = model.config.get_text_config().to_dict()
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if hasattr(_base(model), _POSITIONS):
        return "mrope"
    if _ROPE_SECTIONS in rope:
        raise ConfigError(
            settings.folder,
            got=f"model type {settings.model_type!r} with positions of three dimensions and without {_POSITIONS}",
            expected=f"a model with {_POSITIONS}, which computes them",
            fix=_OWN_FAMILY,
        )
    return "restart"


def _small_media(model: Any, outputs: ProcessorOutputs) -> dict[str, np.ndarray]:
    """What `get_image_features` takes of one small image; empty where the model has no such method."""
    taken = _parameters(_base(model), names=("get_image_features",))
    chosen = {name: value for name, value in outputs.items() if name in taken and name not in _OURS}
    return {name: (value.float() if value.is_floating_point() else value).numpy() for name, value in chosen.items()}
