"""Neighbours in a pack: one sample is changed at a fixed layout, and nothing may move in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from packtrain.packs.values import IGNORED, TEXT, EncodedSample
from packtrain.proofs.compare import FP32_TOLERANCE, gradient_differences, largest, largest_entry
from packtrain.proofs.modes import EVALUATION, TRAINING, in_mode
from packtrain.proofs.passes import Collate, Gradients, forward, is_pixels, packed, run_packed, split
from packtrain.proofs.values import Finding

_MIXED_EXPERTS = 0.05  # in half precision, where a neighbour changes in which groups a token is summed up
_REPEATS = 4.0  # how much more than between two equal runs gradients may differ, where kernels are not deterministic


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Change:
    """One sample with other content of the same shape."""

    at: int  # which sample
    what: str  # text or pixels
    sample: EncodedSample


def changes_of(samples: Sequence[EncodedSample], seed: int = 0) -> list[Change]:
    """Every sample with other text, and every sample with media with other pixels."""
    draw = torch.Generator().manual_seed(seed)
    pool = torch.cat([sample.input_ids[sample.token_kinds == TEXT] for sample in samples]).unique()
    found = []
    for at, sample in enumerate(samples):
        found.append(Change(at=at, what="text", sample=_other_text(sample, pool, draw)))
        if sample.media:
            found.append(Change(at=at, what="pixels", sample=_other_pixels(sample, draw)))
    return found


def _other_text(sample: EncodedSample, pool: Tensor, draw: torch.Generator) -> EncodedSample:
    """Other ids at every token of text, drawn from texts that the model has seen to take; media tokens stay."""
    shift = torch.randint(1, max(2, len(pool)), sample.input_ids.shape, generator=draw)
    place = torch.searchsorted(pool, sample.input_ids).clamp(max=len(pool) - 1)
    other = pool[(place + shift) % len(pool)]
    return replace(sample, input_ids=torch.where(sample.token_kinds == TEXT, other, sample.input_ids))


def _other_pixels(sample: EncodedSample, draw: torch.Generator) -> EncodedSample:
    """Noise wherever there is a pixel; zeros stay, because some models take an image of zeros for padding."""
    media = {
        name: torch.where(tensor == 0, tensor, torch.randn(tensor.shape, generator=draw).to(tensor.dtype))
        if is_pixels(name)
        else tensor
        for name, tensor in sample.media.items()
    }
    return replace(sample, media=media)


def allowed_movement(model: Any) -> float:
    """How much a sample may move with its neighbour: in half precision not at all, where fp32 leaves room to rounding.

    Experts are the exception: which tokens share a product depends on all tokens of the row.
    """
    if next(model.parameters()).dtype == torch.float32:
        return FP32_TOLERANCE
    config = getattr(model, "config", None)
    parts = (config, getattr(config, "text_config", None))
    experts = any(getattr(part, key, None) for part in parts for key in ("num_experts", "num_local_experts"))
    return _MIXED_EXPERTS if experts else 0.0


def isolate(model: Any, samples: Sequence[EncodedSample], collate: Collate, *, backward: bool) -> list[Finding]:
    """Change each sample in turn and look at all others."""
    changes, allowed = changes_of(samples), allowed_movement(model)
    with in_mode(model, EVALUATION):
        found = _logits(model, samples, changes, collate, allowed)
    if backward:
        with in_mode(model, TRAINING):
            found += _gradients(model, samples, changes, collate, allowed)
    return found


def _logits(
    model: Any, samples: Sequence[EncodedSample], changes: Sequence[Change], collate: Collate, allowed: float
) -> list[Finding]:
    before = row_logits(model, samples, collate)
    moved: dict[str, list[tuple[str, float]]] = {}
    unseen = []
    for change in changes:
        after = row_logits(model, _with(samples, change), collate)
        moved.setdefault(change.what, []).extend(moved_neighbours(samples, change, before, after))
        if torch.equal(before[change.at], after[change.at]):
            unseen.append(f"other {change.what} in {samples[change.at].id} changed nothing, not even there")
    findings = [largest(f"neighbours, other {what}", each, allowed) for what, each in moved.items()]
    seen = Finding(
        check="changes are seen", difference=float(len(unseen)), allowed=0.0, where=unseen[0] if unseen else ""
    )
    return [*findings, seen]


def row_logits(model: Any, samples: Sequence[EncodedSample], collate: Collate) -> tuple[Tensor, ...]:
    """The logits of each sample of a packed row, without gradients."""
    with torch.no_grad():
        return split(forward(model, packed(samples, collate)[0]), samples)


def moved_neighbours(
    samples: Sequence[EncodedSample], change: Change, before: Sequence[Tensor], after: Sequence[Tensor]
) -> list[tuple[str, float]]:
    """How far every other sample moved, over the size of its values where they are large."""
    return [
        (f"{sample.id} moves with {samples[change.at].id}", _gap(before[at], after[at]))
        for at, sample in enumerate(samples)
        if at != change.at
    ]


def _gradients(
    model: Any, samples: Sequence[EncodedSample], changes: Sequence[Change], collate: Collate, allowed: float
) -> list[Finding]:
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
        before, reach = _watched_gradient(model, row, at, collate)
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


def _watched_gradient(
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
    here = [split(everywhere[0], samples)[at]]
    here += [tensor.grad for name, tensor in media.items() if is_pixels(name) and tensor.grad is not None]
    return gradients, max(map(largest_entry, here)) / max(largest_entry(everywhere), 1e-30)


def _all_changed(sample: EncodedSample, changes: Sequence[Change]) -> EncodedSample:
    for change in changes:
        if change.what == "text":
            sample = replace(sample, input_ids=change.sample.input_ids)
        else:
            sample = replace(sample, media=change.sample.media)
    return sample


def _gradient(model: Any, samples: Sequence[EncodedSample], collate: Collate) -> Gradients:
    return run_packed(model, samples, collate, backward=True).gradients


def _with(samples: Sequence[EncodedSample], change: Change) -> list[EncodedSample]:
    return [change.sample if at == change.at else sample for at, sample in enumerate(samples)]


def _without_loss(sample: EncodedSample) -> EncodedSample:
    return replace(sample, labels=torch.full_like(sample.labels, IGNORED))


def _gap(before: Tensor, after: Tensor) -> float:
    return largest_entry(after.float() - before.float()) / max(1.0, largest_entry(before))
