"""Neighbours in a pack: one sample is changed at a fixed layout, and nothing may change in the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from packtrain.delivery.encode.encoded_sample import IGNORED, TEXT, EncodedSample
from packtrain.modeling.model_parts import transformers_model
from packtrain.verifying.check_result import CheckResult
from packtrain.verifying.compare import (
    FP32_TOLERANCE,
    Collate,
    Gradients,
    forward,
    gradient_differences,
    is_pixels,
    largest,
    largest_entry,
    pack_row,
    run_packed,
    split,
)
from packtrain.verifying.model_states import EVALUATION, TRAINING, Mode, in_mode

_MIXED_EXPERTS = 0.05  # in half precision, where a neighbour changes in which groups a token is summed up
_MIXED_PRECISION = 0.01
_SAME_SHAPES = 1e-6  # in fp32: products of the same shapes hardly round differently
# How much further than its neighbours may move a sample must move itself; in half precision, in roundings.
_POWER, _ROUNDINGS = 100.0, 10.0
_REPEATS = 4.0  # how much more than between two equal runs gradients may differ, where kernels are not deterministic


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChangedSample:
    """One sample with other content of the same shape."""

    at: int  # which sample
    what: str  # text or pixels
    sample: EncodedSample


def make_changes(samples: Sequence[EncodedSample]) -> list[ChangedSample]:
    """Every sample with other text, and every sample with media with other pixels."""
    draw = torch.Generator().manual_seed(0)
    pool = torch.cat([sample.input_ids[sample.token_kinds == TEXT] for sample in samples]).unique()
    changes = []
    for at, sample in enumerate(samples):
        changes.append(ChangedSample(at=at, what="text", sample=_other_text(sample, pool, draw)))
        if any(map(is_pixels, sample.media)):
            changes.append(ChangedSample(at=at, what="pixels", sample=_other_pixels(sample, draw)))
    return changes


def _other_text(sample: EncodedSample, pool: Tensor, draw: torch.Generator) -> EncodedSample:
    """Other ids at every text token, drawn from the texts of the samples; media tokens stay."""
    shift = torch.randint(1, max(2, len(pool)), sample.input_ids.shape, generator=draw)
    place = torch.searchsorted(pool, sample.input_ids).clamp(max=len(pool) - 1)
    other = pool[(place + shift) % len(pool)]
    return replace(sample, input_ids=torch.where(sample.token_kinds == TEXT, other, sample.input_ids))


def _other_pixels(sample: EncodedSample, draw: torch.Generator) -> EncodedSample:
    """Noise in every pixel; zeros stay, because some models treat an image of zeros as padding."""
    media = {
        name: torch.where(tensor == 0, tensor, torch.randn(tensor.shape, generator=draw).to(tensor.dtype))
        if is_pixels(name)
        else tensor
        for name, tensor in sample.media.items()
    }
    return replace(sample, media=media)


def allowed_movement(model: Any, dtype: torch.dtype | None = None) -> float:
    """How much a sample may move with its neighbour: in half precision not at all, in fp32 by rounding.

    Experts are the exception: which tokens share a product depends on all tokens of the row. So are products in half
    precision (`dtype`) of weights in fp32, where roundings of both kinds meet.
    """
    kept = next(model.parameters()).dtype
    if kept in (torch.float32, torch.float64):
        exact = dtype in (None, torch.float32, torch.float64)
        return (FP32_TOLERANCE if _has_experts(model) else _SAME_SHAPES) if exact else _MIXED_PRECISION
    return _MIXED_EXPERTS if _has_experts(model) else 0.0


def _has_experts(model: Any) -> bool:
    config = getattr(transformers_model(model), "config", None)
    parts = (config, getattr(config, "text_config", None))
    keys = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(getattr(part, key, None) for part in parts for key in keys)


def needed_effect(model: Any, dtype: torch.dtype | None = None) -> float:
    """How far a change must move the changed sample itself, so that a part of that would be seen in the others."""
    kept = dtype if dtype is not None else next(model.parameters()).dtype
    if kept in (torch.float32, torch.float64):
        return _POWER * FP32_TOLERANCE
    return _ROUNDINGS * max(torch.finfo(kept).eps if kept.is_floating_point else 0.0, allowed_movement(model, dtype))


def isolate(
    model: Any, samples: Sequence[EncodedSample], collate: Collate, *, backward: bool, mode: Mode = TRAINING
) -> list[CheckResult]:
    """Change each sample in turn and compare all others; gradients in one mode."""
    changes = make_changes(samples)
    with in_mode(model, EVALUATION):
        before = row_logits(model, samples, collate)
        results = moved_neighbours(
            model, samples, changes, before, lambda one: row_logits(model, with_change(samples, one), collate)
        )
    if backward:
        with in_mode(model, mode):
            results += _gradients(model, samples, changes, collate, allowed_movement(model))
    return results


def row_logits(model: Any, samples: Sequence[EncodedSample], collate: Collate) -> tuple[Tensor, ...]:
    """The logits of each sample of a packed row, without gradients."""
    with torch.no_grad():
        return split(forward(model, pack_row(samples, collate)[0]), samples, collate)


def moved_neighbours(
    model: Any,
    samples: Sequence[EncodedSample],
    changes: Sequence[ChangedSample],
    before: Sequence[Tensor],
    after: Callable[[ChangedSample], Sequence[Tensor]],
    dtype: torch.dtype | None = None,
) -> list[CheckResult]:
    """For each kind of change how far other samples moved, and how far the changed one did; over values where large.

    Results with a change are asked for one by one: all of them may be too large to be kept.
    """
    allowed, needed = allowed_movement(model, dtype), needed_effect(model, dtype)
    results = []
    for what in dict.fromkeys(change.what for change in changes):
        gaps, effects = [], []
        for change in (one for one in changes if one.what == what):
            name, now = samples[change.at].id, after(change)
            for at, sample in enumerate(samples):
                if at != change.at:
                    gaps.append((f"{sample.id} changes with {name}", _gap(before[at], now[at])))
            effects.append((name, _gap(before[change.at], now[change.at])))
        results.append(_others_and_itself(largest(f"neighbours, other {what}", gaps, allowed), effects, needed))
    return results


def _others_and_itself(worst: CheckResult, effects: Sequence[tuple[str, float]], needed: float) -> CheckResult:
    name, effect = min(effects, key=lambda one: one[1])
    own = f"{name} changes itself by {effect:.2g}"
    if effect < needed:
        own += f", and at least {needed:.2g} is needed to detect it elsewhere"
    return replace(worst, effect=effect, needed=needed, where=", ".join(filter(None, (worst.where, own))))


def _gradients(
    model: Any, samples: Sequence[EncodedSample], changes: Sequence[ChangedSample], collate: Collate, allowed: float
) -> list[CheckResult]:
    """The gradient of the loss of all neighbours: nothing of it at one sample's inputs, and the same with another one.

    On GPUs equal runs differ, also with the kernels that torch calls deterministic: one rounding that falls the other
    way changes a tensor by up to a unit in the last place. The check at inputs needs no allowance for that, because a
    sum of zeros is zero in any order.
    """
    moved: list[tuple[str, float]] = []
    reached: list[tuple[str, float]] = []
    weight = next(model.parameters())
    noise, flips = 0.0, torch.finfo(weight.dtype).eps if weight.is_cuda else 0.0
    for at, sample in enumerate(samples):
        row = [*samples[:at], _without_loss(sample), *samples[at + 1 :]]
        before, reach = _gradient_and_reach(model, row, at, collate)
        reached.append((f"{sample.id} is reached by its neighbours' loss", reach))
        if at == 0 or weight.is_cuda:
            again = gradient_differences(before, _gradient(model, row, collate))
            noise = max([noise, *(gap for _, gap in again)])
        row[at] = _without_loss(_all_changed(sample, [change for change in changes if change.at == at]))
        gaps = gradient_differences(before, _gradient(model, row, collate))
        moved += [(f"{name}, with another {sample.id}", gap) for name, gap in gaps]
    return [
        largest("neighbours' loss, at inputs", reached, 0.0),
        largest("neighbours' gradients", moved, max(allowed, flips, _REPEATS * noise)),
    ]


def _gradient_and_reach(
    model: Any, samples: Sequence[EncodedSample], at: int, collate: Collate
) -> tuple[Gradients, float]:
    """The gradients of the row's loss, and how much of it reaches one sample's embeddings and pixels.

    The second is the largest entry there over the largest of the whole row.
    """
    watched = samples[at]
    media = {
        name: tensor.detach().clone().requires_grad_() if is_pixels(name) else tensor
        for name, tensor in watched.media.items()
    }
    embedded: list[Tensor] = []

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        embedded.append(output)

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        row = [*samples[:at], replace(watched, media=media), *samples[at + 1 :]]
        gradients = run_packed(model, row, collate, backward=True).gradients
    finally:
        handle.remove()
    everywhere = embedded[0].grad
    assert everywhere is not None, "the loss depends on the embeddings of the row"
    here = [split(everywhere[0], row, collate)[at]]
    here += [tensor.grad for name, tensor in media.items() if is_pixels(name) and tensor.grad is not None]
    return gradients, max(map(largest_entry, here)) / max(largest_entry(everywhere), 1e-30)


def _all_changed(sample: EncodedSample, changes: Sequence[ChangedSample]) -> EncodedSample:
    for change in changes:
        if change.what == "text":
            sample = replace(sample, input_ids=change.sample.input_ids)
        else:
            sample = replace(sample, media=change.sample.media)
    return sample


def _gradient(model: Any, samples: Sequence[EncodedSample], collate: Collate) -> Gradients:
    return run_packed(model, samples, collate, backward=True).gradients


def with_change(samples: Sequence[EncodedSample], change: ChangedSample) -> list[EncodedSample]:
    """The samples of a row, one of them changed."""
    return [change.sample if at == change.at else sample for at, sample in enumerate(samples)]


def _without_loss(sample: EncodedSample) -> EncodedSample:
    return replace(sample, labels=torch.full_like(sample.labels, IGNORED))


def _gap(before: Tensor, after: Tensor) -> float:
    return largest_entry(after.float() - before.float()) / max(1.0, largest_entry(before))
