"""The packing check before the first training step: every modality and the longest sample, in rows of training.

Every rank runs the same number of forward and backward passes for any samples, because a sharded model would hang
otherwise. No part needs more memory than a training step: gradients come from short samples, the longest one runs
without, and logits of a whole row are never computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from packtrain.core.errors import DataError
from packtrain.core.numbers import counted
from packtrain.delivery.encode.encoded_sample import IGNORED, TEXT, EncodedSample
from packtrain.families.family import BatchContract
from packtrain.verifying.check_result import CheckReport, CheckResult
from packtrain.verifying.compare import (
    Collate,
    alone_inputs,
    as_trained,
    compare_labels,
    is_pixels,
    pack_row,
    sample_starts,
    split,
)
from packtrain.verifying.isolate import ChangedSample, make_changes, moved_neighbours, with_change
from packtrain.verifying.model_states import (
    AS_TRAINED,
    EVALUATION,
    exact_products,
    hidden_states,
    in_mode,
    is_random_in_training,
    parity,
    stock_attention,
)
from packtrain.verifying.trained_loss import TrainingLoss, compare_training_loss, loss_tolerance

MOST_SAMPLES = 4  # one of each kind
MOST_TOKENS = 2_000  # of text; media are what they are
KINDS = ("text", "image", "images", "video")
_LEAST_ROOM = 8  # tokens that make a sample


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRoom:
    """The room in one row of a training step."""

    tokens: int = MOST_TOKENS
    patches: int | None = None  # of the vision encoder; None: unknown
    alignment: int = 1  # samples are padded to multiples of it

    def row_tokens(self, samples: Sequence[EncodedSample]) -> int:
        """Tokens of the row that they take."""
        return sum(-(-len(sample) // self.alignment) * self.alignment for sample in samples)

    @property
    def least(self) -> int:
        """Tokens of the shortest sample to check with."""
        return max(_LEAST_ROOM, self.alignment)

    def holds(self, samples: Sequence[EncodedSample]) -> bool:
        """Do these samples fit into one row?"""
        patches = sum(sample.vision.patches for sample in samples if sample.vision is not None)
        return self.row_tokens(samples) <= self.tokens and (self.patches is None or patches <= self.patches)


def sample_kind(images: int, videos: int) -> str:
    """The kind of a sample, one of KINDS."""
    return "video" if videos else "images" if images > 1 else "image" if images else "text"


def sample_described(sample: EncodedSample) -> str:
    """Id, kind and length of a sample."""
    kind = sample_kind(sample.num_images, sample.num_videos)
    return f"{sample.id} ({kind if kind != 'images' else counted(sample.num_images, 'image')}, {len(sample):,} tokens)"


def short_samples(
    samples: Sequence[EncodedSample], room: RowRoom | None = None
) -> tuple[list[EncodedSample], tuple[str, ...]]:
    """The shortest sample of every kind and some short ones, at least two; and notes on what did not fit.

    Of samples that are too long, the beginning of the text is used.
    """
    room = room or RowRoom()
    piece = max(2, min(room.tokens, MOST_TOKENS) // 4 // room.alignment * room.alignment)
    usable = sorted((sample for sample in samples if (sample.labels[1:] != IGNORED).any()), key=len)
    usable = usable or [_text_sample(sample, piece, number=0) for sample in samples]
    if not usable:
        raise DataError("the packing check", got="no samples", expected="at least one on every rank")
    chosen: list[EncodedSample] = []
    left_out = []
    for kind in KINDS:
        shortest = next((one for one in usable if sample_kind(one.num_images, one.num_videos) == kind), None)
        if shortest is None or kind == "text":
            continue
        beside = room.least if not chosen else 0  # a row needs a neighbour
        if replace(room, tokens=room.tokens - beside).holds([*chosen, shortest]):
            chosen.append(shortest)
        else:
            left_out.append(f"{kind}: the shortest sample of the first packs is too long ({len(shortest):,} tokens)")
    rest = replace(room, tokens=min(room.tokens, room.row_tokens(chosen) + MOST_TOKENS))
    for sample in sorted(usable, key=lambda one: (any(map(is_pixels, one.media)), len(one))):
        fresh = len(chosen) < MOST_SAMPLES and all(sample is not one for one in chosen)
        if fresh and rest.holds([*chosen, sample]):
            chosen.append(sample)
    if len(chosen) == 1 and room.row_tokens(chosen) + room.least > room.tokens:
        chosen = []  # there is no room for a second one
    while len(chosen) < 2:
        size = min(piece, (room.tokens - room.row_tokens(chosen)) // room.alignment * room.alignment)
        chosen.append(_text_sample(usable[len(chosen) % len(usable)], size, number=len(chosen) + 1))
    return sorted(chosen, key=len), tuple(left_out)


def longest_index(row: Sequence[EncodedSample]) -> int:
    """The index of the longest sample, among those with labels if there are any."""
    carry = [at for at, sample in enumerate(row) if (sample.labels[1:] != IGNORED).any()]
    return max(carry or range(len(row)), key=lambda at: len(row[at]))


def _text_sample(sample: EncodedSample, tokens: int, *, number: int) -> EncodedSample:
    """The first tokens of a sample's text, all of them with labels."""
    ids = sample.input_ids[sample.token_kinds == TEXT][:tokens]
    labels = ids.clone()
    labels[0] = IGNORED
    return replace(
        sample,
        id=f"{sample.id} (text, {number})",
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(len(ids)).expand(len(sample.position_ids), -1),
        token_kinds=torch.full_like(ids, TEXT),
        media={},
        num_images=0,
        num_videos=0,
        vision=None,
    )


CHANGES = 4  # two of text, and up to two of pixels
# Packed, twice; with each change; the whole pack; each sample alone; the longest alone.
FORWARDS = 2 + CHANGES + 1 + MOST_SAMPLES + 1
# The trainer's loss, once without gradients to see whether training is random; each sample alone.
WITH_LOSS = 2 + MOST_SAMPLES
_MOST_EAGER = 4_096  # tokens of a sample; eager attention keeps all scores at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """The loss and precision of the run."""

    loss: TrainingLoss
    backward: bool = True  # False: gradients do not come from `loss.backward()` alone
    dtype: torch.dtype | None = None  # compute dtype; None: that of the weights
    smoothing: float = 0.0  # label smoothing


def check_packing(
    model: Any,
    samples: Sequence[EncodedSample],
    collate: Collate,
    contract: BatchContract,
    *,
    pack: Sequence[EncodedSample] = (),
    room: RowRoom | None = None,
    training: Training | None = None,
) -> CheckReport:
    """Packed against alone, changed neighbours, the longest sample in its pack, and the trainer's own loss.

    `samples` are the candidates, `pack` is the pack of training with the longest sample, `room` is the size of a row in
    training. `model` is called as in training (it may be wrapped).
    """
    started = time.perf_counter()
    chosen, left = short_samples(samples, room)
    left_out = list(left)
    weight = next(model.parameters())
    dtype = training.dtype if training is not None and training.dtype is not None else weight.dtype
    with exact_products():
        checks = [compare_labels(chosen, pack_row(chosen, collate)[1].flatten(), sample_starts(chosen, collate))]
        with in_mode(model, EVALUATION), torch.no_grad():
            checks += _without_gradients(model, chosen, pack or chosen, collate, contract, dtype, left_out)
        if training is None:
            left_out.append("the loss and its gradients: the loss is not the trainer's own")
        else:
            checks += _with_loss(model, chosen, collate, contract, training, dtype, left_out)
    shown = [*chosen, *([pack[longest_index(pack)]] if pack else [])]
    return CheckReport(
        model=type(model).__name__,
        attn_implementation="as given",
        device=str(weight.device),
        dtype=str(dtype).removeprefix("torch."),
        samples=tuple(dict.fromkeys(sample_described(sample) for sample in shown)),
        tokens=sum(len(sample) for sample in chosen),
        checks=tuple(checks),
        tolerances=_tolerances(dtype),
        left_out=tuple(left_out),
        kinds=tuple(dict.fromkeys(sample_kind(sample.num_images, sample.num_videos) for sample in shown)),
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
) -> list[CheckResult]:
    with hidden_states(model) as hidden:

        def row(some: Sequence[EncodedSample]) -> tuple[Tensor, ...]:
            return split(hidden(pack_row(some, collate)[0]), some, collate)

        def by_itself(sample: EncodedSample) -> Tensor:
            return hidden(alone_inputs(sample, contract))

        first = row(chosen)
        changes = _changes(chosen)
        moved = [row(with_change(chosen, change)) for change in changes]
        again = row(chosen)  # a cache that a forward leaves shows in a later one
        with stock_attention(model) as used:
            at = longest_index(pack)
            if used == "eager" and len(pack[at]) > _MOST_EAGER:
                left_out.append(f"{sample_described(pack[at])}: alone it needs more memory than packed")
                pack, at = chosen, longest_index(chosen)
            # A rank with fewer samples repeats its last.
            reference = [by_itself(chosen[min(number, len(chosen) - 1)]) for number in range(MOST_SAMPLES)]
            longest = by_itself(pack[at])
        whole = row(pack)
    allowed = loss_tolerance(dtype).hidden
    pairs = list(zip(chosen, reference, strict=False))
    in_pack = [(pack[at], longest, whole[at])]
    in_pack += [(one, ref, whole[place]) for one, ref in pairs for place, its in enumerate(pack) if its is one]
    return [
        parity("hidden states (forward 1)", [(s, r, f) for (s, r), f in zip(pairs, first, strict=True)], allowed),
        parity("hidden states (later)", [(s, r, f) for (s, r), f in zip(pairs, again, strict=True)], allowed),
        parity("hidden states (whole pack)", in_pack, allowed),
        # at every token, also of media, which have no labels
        *moved_neighbours(model, chosen, changes, again, lambda change: moved[changes.index(change)], dtype),
    ]


def _changes(chosen: Sequence[EncodedSample]) -> list[ChangedSample]:
    """Text of the first and the last sample, pixels of the last two with media; always the same number."""
    changes = make_changes(chosen)
    texts = [change for change in changes if change.what == "text"]
    selected = [texts[0], texts[-1], *[change for change in changes if change.what == "pixels"][-2:]]
    return [*selected, *[texts[0]] * (CHANGES - len(selected))]


def _with_loss(
    model: Any,
    chosen: Sequence[EncodedSample],
    collate: Collate,
    contract: BatchContract,
    training: Training,
    dtype: torch.dtype,
    left_out: list[str],
) -> list[CheckResult]:
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


def _tolerances(dtype: torch.dtype) -> tuple[str, ...]:
    allowed = loss_tolerance(dtype)
    return (
        "reference: each sample alone, on the model's own attention",
        f"hidden states at supervised positions: norm of packed - alone over that of alone; at most {allowed.hidden:g}",
        "neighbours: samples changed at a fixed layout, compared at every token of the others",
        f"training loss per token: at most {allowed.loss:g}; its gradients: at most {allowed.gradients:g}",
        "without dropout",
    )
