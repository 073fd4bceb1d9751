"""Samples through the model: alone as its processor would hand them over, and together as the collator packs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from packtrain.delivery.collate.batch_values import LOSS_WEIGHTS
from packtrain.delivery.collate.collators import offsets_of
from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample, PackedRow, PackKey
from packtrain.families.family import BatchContract

Collate = Callable[[Sequence[PackedRow]], Mapping[str, Any]]
Gradients = dict[str, Tensor]  # by parameter; those that got none are not in it


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PassOutcome:
    """What one way of running the samples gave."""

    logits: tuple[Tensor, ...]  # of each sample: (tokens, vocabulary)
    losses: tuple[Tensor, ...]  # of each sample: (supervised tokens,), in fp32
    loss: float  # sum over all supervised tokens / their number
    gradients: Gradients  # of that loss


def with_media_as(sample: EncodedSample, dtype: torch.dtype) -> EncodedSample:
    """The sample with its pixels in one precision, so that every way of running it sees the same ones."""
    return replace(sample, media={name: _cast(name, tensor, dtype) for name, tensor in sample.media.items()})


def alone_inputs(sample: EncodedSample, contract: BatchContract) -> dict[str, Any]:
    """The inputs of one sample as its processor gives them: no positions, so that the model finds them itself."""
    inputs: dict[str, Any] = {"input_ids": sample.input_ids[None], "use_cache": False, **sample.media}
    if contract.positions == "mrope" and sample.media:
        inputs["mm_token_type_ids"] = sample.token_kinds[None].int()
    if contract.token_types is not None:
        inputs[contract.token_types] = sample.token_kinds[None]
    if contract.per_sample_images is not None and sample.num_images:
        inputs[contract.per_sample_images] = torch.tensor([sample.num_images])
    return inputs


def packed(samples: Sequence[EncodedSample], collate: Collate) -> tuple[dict[str, Any], Tensor]:
    """The inputs of one packed row, without its labels, and the labels."""
    batch = dict(as_trained(samples, collate))
    batch.pop(LOSS_WEIGHTS, None)
    return batch, batch.pop("labels")


def as_trained(samples: Sequence[EncodedSample], collate: Collate) -> Mapping[str, Any]:
    """The batch of one packed row as the trainer gets it."""
    return collate([PackedRow(key=PackKey(0, 0), samples=tuple(samples))])


def forward(model: Any, inputs: Mapping[str, Any]) -> Tensor:
    """The logits of the one row, (tokens, vocabulary); pixels in the precision of the model."""
    weight = next(model.parameters())
    given = {
        name: _cast(name, value.to(weight.device), weight.dtype) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    logits: Tensor = model(**given).logits
    return logits[0]


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if is_pixels(name) else tensor


def is_pixels(name: str) -> bool:
    """Is this argument pixels, and not a mask or the seconds between frames, from which positions are computed?"""
    return name.startswith("pixel_values")


def starts_of(samples: Sequence[EncodedSample], collate: Collate) -> list[int]:
    """Where each sample begins in the row that is made of them."""
    return offsets_of(samples, getattr(collate, "alignment", 1))


def split(row: Tensor, samples: Sequence[EncodedSample], collate: Collate) -> tuple[Tensor, ...]:
    """A packed row cut into its samples; what stands behind them is padding."""
    starts = starts_of(samples, collate)
    return tuple(row[start : start + len(sample)] for start, sample in zip(starts, samples, strict=True))


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss of every token that a label names, each predicted by the token before it."""
    targets = labels[1:].to(logits.device)
    carries = targets != IGNORED
    return cross_entropy(logits[:-1][carries].float(), targets[carries], reduction="none")


def gradients_of(model: Any) -> Gradients:
    """The parameters' gradients, taken out of the model; in fp32, because half precision cannot hold differences."""
    found = {name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def run_alone(model: Any, samples: Sequence[EncodedSample], contract: BatchContract, *, backward: bool) -> PassOutcome:
    """Every sample on its own; gradients add up to those of the common loss."""
    supervised = sum(int((sample.labels[1:] != IGNORED).sum()) for sample in samples)
    logits, losses = [], []
    model.zero_grad(set_to_none=True)
    for sample in samples:
        with torch.set_grad_enabled(backward):
            row = forward(model, alone_inputs(sample, contract))
            found = token_losses(row, sample.labels)
        if backward:
            (found.sum() / supervised).backward()  # type: ignore[no-untyped-call]
        logits.append(row.detach())
        losses.append(found.detach())
    loss = float(torch.cat(losses).double().sum()) / supervised
    return PassOutcome(logits=tuple(logits), losses=tuple(losses), loss=loss, gradients=gradients_of(model))


def run_packed(model: Any, samples: Sequence[EncodedSample], collate: Collate, *, backward: bool) -> PassOutcome:
    """All samples in one row."""
    inputs, labels = packed(samples, collate)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(backward):
        row = forward(model, inputs)
        found = token_losses(row, labels.flatten())
        loss = found.sum() / len(found)
    if backward:
        loss.backward()  # type: ignore[no-untyped-call]
    logits = split(row.detach(), samples, collate)
    return PassOutcome(
        logits=logits,
        losses=tuple(token_losses(one, sample.labels) for one, sample in zip(logits, samples, strict=True)),
        loss=float(found.detach().double().mean()),
        gradients=gradients_of(model),
    )
