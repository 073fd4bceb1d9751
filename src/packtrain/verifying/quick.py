"""The packing check before a training run's first step: every modality and the longest sample, in rows as training "
"has them.

Every rank runs the same number of forward and backward passes whatever its samples are, because a sharded model hangs
otherwise. No part needs more memory than a training step: gradients are those of short samples, the longest one is run
without, and nowhere are there logits of a whole row.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.families.family import BatchContract
from packtrain.verifying.checked_samples import (
    MOST_SAMPLES,
    RowRoom,
    kind_of,
    longest_of,
    sample_described,
    short_samples,
)
from packtrain.verifying.compare import compare_labels
from packtrain.verifying.comparison_passes import Collate, alone_inputs, as_trained, packed, split, starts_of
from packtrain.verifying.isolate import ChangedSample, changes_of, moved_neighbours, with_change
from packtrain.verifying.modes import AS_TRAINED, EVALUATION, exact_products, in_mode, is_random_in_training
from packtrain.verifying.reference import hidden_states, parity, stock_attention
from packtrain.verifying.trained_loss import TrainingLoss, compare_training_loss, tolerance_of
from packtrain.verifying.verdict import Finding, Verdict

CHANGES = 4  # two of text, and of pixels as far as there are some
# Packed and once more at the end, with a changed sample, the whole pack; alone, and the longest alone.
FORWARDS = 2 + CHANGES + 1 + MOST_SAMPLES + 1
# The trainer's loss, once without gradients to see whether training is random; alone.
WITH_LOSS = 2 + MOST_SAMPLES
_MOST_EAGER = 4_096  # tokens of a sample whose attention scores are all kept at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """How the run will train: what it has beside the model."""

    loss: TrainingLoss
    backward: bool = True  # False: gradients are not made by `loss.backward()` alone
    dtype: torch.dtype | None = None  # of products; None: that of the weights
    smoothing: float = 0.0  # of the labels


def quick_check(
    model: Any,
    samples: Sequence[EncodedSample],
    collate: Collate,
    contract: BatchContract,
    *,
    pack: Sequence[EncodedSample] = (),
    room: RowRoom | None = None,
    training: Training | None = None,
) -> Verdict:
    """Packed against alone, changed neighbours, the longest sample in its pack, and the trainer's own loss.

    `samples` are those to choose from, `pack` is the one with the longest sample, as it is trained; `room` is what a
    row of training holds. `model` is called as training calls it (it may be wrapped).
    """
    started = time.perf_counter()
    chosen, left = short_samples(samples, room)
    left_out = list(left)
    weight = next(model.parameters())
    dtype = training.dtype if training is not None and training.dtype is not None else weight.dtype
    with exact_products():
        findings = [compare_labels(chosen, packed(chosen, collate)[1].flatten(), starts_of(chosen, collate))]
        with in_mode(model, EVALUATION), torch.no_grad():
            findings += _without_gradients(model, chosen, pack or chosen, collate, contract, dtype, left_out)
        if training is None:
            left_out.append("the loss and its gradients: the loss is not the trainer's")
        else:
            findings += _with_loss(model, chosen, collate, contract, training, dtype, left_out)
    shown = [*chosen, *([pack[longest_of(pack)]] if pack else [])]
    return Verdict(
        model=type(model).__name__,
        attn_implementation="as given",
        device=str(weight.device),
        dtype=str(dtype).removeprefix("torch."),
        samples=tuple(dict.fromkeys(sample_described(sample) for sample in shown)),
        tokens=sum(len(sample) for sample in chosen),
        findings=tuple(findings),
        judged=_judged(dtype),
        left_out=tuple(left_out),
        kinds=tuple(dict.fromkeys(kind_of(sample.num_images, sample.num_videos) for sample in shown)),
        longest=max(map(len, shown)),
        seconds=time.perf_counter() - started,
    )


def _without_gradients(
    model: Any,
    chosen: Sequence[EncodedSample],
    pack: Sequence[EncodedSample],
    collate: Collate,
    contract: BatchContract,
    dtype: torch.dtype,
    left_out: list[str],
) -> list[Finding]:
    with hidden_states(model) as hidden:

        def row(some: Sequence[EncodedSample]) -> tuple[Tensor, ...]:
            return split(hidden(packed(some, collate)[0]), some, collate)

        def by_itself(sample: EncodedSample) -> Tensor:
            return hidden(alone_inputs(sample, contract))

        first = row(chosen)
        changes = _changes(chosen)
        moved = [row(with_change(chosen, change)) for change in changes]
        again = row(chosen)  # what a forward leaves behind shows in a later one
        with stock_attention(model) as used:
            at = longest_of(pack)
            if used == "eager" and len(pack[at]) > _MOST_EAGER:
                left_out.append(f"{sample_described(pack[at])}: alone it needs more memory than packed")
                pack, at = chosen, longest_of(chosen)
            # A rank with fewer samples repeats its last.
            reference = [by_itself(chosen[min(number, len(chosen) - 1)]) for number in range(MOST_SAMPLES)]
            longest = by_itself(pack[at])
        whole = row(pack)
    allowed = tolerance_of(dtype).hidden
    known = list(zip(chosen, reference, strict=False))
    in_pack = [(pack[at], longest, whole[at])]
    in_pack += [(one, ref, whole[place]) for one, ref in known for place, its in enumerate(pack) if its is one]
    return [
        parity("hidden states (forward 1)", [(s, r, f) for (s, r), f in zip(known, first, strict=True)], allowed),
        parity("hidden states (later)", [(s, r, f) for (s, r), f in zip(known, again, strict=True)], allowed),
        parity("hidden states (whole pack)", in_pack, allowed),
        # at every token: media stand where no loss is taken
        *moved_neighbours(model, chosen, changes, again, lambda change: moved[changes.index(change)], dtype),
    ]


def _changes(chosen: Sequence[EncodedSample]) -> list[ChangedSample]:
    """Text of the first and the last sample, pixels of the last two that have some; always equally many."""
    changes = changes_of(chosen)
    texts = [change for change in changes if change.what == "text"]
    found = [texts[0], texts[-1], *[change for change in changes if change.what == "pixels"][-2:]]
    return [*found, *[texts[0]] * (CHANGES - len(found))]


def _with_loss(
    model: Any,
    chosen: Sequence[EncodedSample],
    collate: Collate,
    contract: BatchContract,
    training: Training,
    dtype: torch.dtype,
    left_out: list[str],
) -> list[Finding]:
    """The trainer's loss and its gradients, in training mode without dropout, checkpointed as training is."""
    random = is_random_in_training(model, lambda: training.loss(model, as_trained(chosen, collate)))
    backward, why = training.backward, "gradients: they do not come from the loss alone"
    if any(getattr(weight, "_post_accumulate_grad_hooks", None) for weight in model.parameters()):
        backward, why = False, "gradients: the optimizer steps inside the backward pass"
    if random:
        backward, why = False, "gradients: in training mode the model is random beyond dropout"
    if not backward:
        left_out.append(why)
    with in_mode(model, EVALUATION if random else AS_TRAINED):
        return compare_training_loss(
            *(model, chosen, collate, contract, training.loss),
            dtype=dtype,
            backward=backward,
            smoothing=training.smoothing,
            runs=MOST_SAMPLES,
        )


def _judged(dtype: torch.dtype) -> tuple[str, ...]:
    allowed = tolerance_of(dtype)
    return (
        "reference: each sample alone, on the model's own attention",
        f"hidden states at supervised positions: norm of packed - alone over that of alone; at most {allowed.hidden:g}",
        "neighbours: samples changed at a fixed layout, compared at every token of the others",
        f"training loss per token: at most {allowed.loss:g}; its gradients: at most {allowed.gradients:g}",
        "without dropout",
    )
