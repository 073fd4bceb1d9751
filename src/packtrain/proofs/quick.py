"""The small proof before a training run's first step: a few short samples, hidden states instead of logits.

Every rank runs the same number of forward passes whatever its samples are, because a sharded model hangs otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from packtrain.core.errors import DataError
from packtrain.families.contracts import BatchContract
from packtrain.packs.values import IGNORED, TEXT, EncodedSample
from packtrain.proofs.compare import FP32_TOLERANCE, compare_labels, largest, largest_entry
from packtrain.proofs.isolate import Change, allowed_movement, changes_of
from packtrain.proofs.modes import EVALUATION, exact_products, in_mode
from packtrain.proofs.passes import Collate, alone, forward, packed, split
from packtrain.proofs.values import Finding, Verdict

MOST_SAMPLES = 4
MOST_TOKENS = 2_000
_LEAST_ROOM = 8  # tokens that make a sample
FORWARDS = 3 + 2 + MOST_SAMPLES  # packed, packed with a changed sample, alone
# Root mean square over that of the sample alone. Contamination is of the order of 1; rounding grows with depth.
_ALLOWED = {torch.float32: FP32_TOLERANCE, torch.float16: 0.02, torch.bfloat16: 0.1}


def quick_check(
    model: Any,
    samples: Sequence[EncodedSample],
    collate: Collate,
    contract: BatchContract,
    *,
    name: str = "",
    backend: str = "as the model came",
    most_tokens: int = MOST_TOKENS,
) -> Verdict:
    """Packed against alone, and two changed neighbours, on the shortest of these samples; packs hold `most_tokens`.

    `model` is called as training calls it (it may be wrapped), in evaluation mode, without gradients.
    """
    chosen = short_samples(samples, min(most_tokens, MOST_TOKENS))
    weight = next(model.parameters())
    with exact_products(), in_mode(model, EVALUATION), torch.no_grad(), _hidden_states(model) as hidden:

        def row(some: Sequence[EncodedSample]) -> tuple[Tensor, ...]:
            forward(model, packed(some, collate)[0])
            return tuple(_supervised(one, sample) for one, sample in zip(split(hidden[0], some), some, strict=True))

        rows = [row(chosen) for _ in range(3)]
        by_text = [change for change in changes_of(chosen) if change.what == "text"]
        ends = (by_text[0], by_text[-1])
        moved = [row([end.sample if at == end.at else one for at, one in enumerate(chosen)]) for end in ends]
        reference = []
        for number in range(MOST_SAMPLES):  # a rank with fewer samples repeats its last
            sample = chosen[min(number, len(chosen) - 1)]
            forward(model, alone(sample, contract))
            reference.append(_supervised(hidden[0], sample))
    allowed = _ALLOWED.get(weight.dtype, _ALLOWED[torch.bfloat16])
    findings = [
        compare_labels(chosen, packed(chosen, collate)[1].flatten()),
        _parity("hidden states (forward 1)", chosen, reference, rows[0], allowed),
        _parity("hidden states (forward 3)", chosen, reference, rows[2], allowed),
        *_isolation(chosen, ends, rows[2], moved, allowed_movement(model)),
    ]
    return Verdict(
        model=name or type(model).__name__,
        backend=backend,
        device=str(weight.device),
        dtype=str(weight.dtype).removeprefix("torch."),
        samples=tuple(f"{sample.id} ({len(sample):,} tokens)" for sample in chosen),
        tokens=sum(len(sample) for sample in chosen),
        findings=tuple(findings),
        judged=(
            f"hidden states at supervised positions: norm of packed - alone over that of alone; at most {allowed:g}",
            "neighbours: first and last sample changed at a fixed layout",
            "evaluation mode, without dropout",
        ),
    )


def short_samples(samples: Sequence[EncodedSample], most_tokens: int = MOST_TOKENS) -> list[EncodedSample]:
    """The shortest samples within the bounds, at least two; where they are too long, the beginning of their text."""
    piece = max(2, most_tokens // 4)
    usable = sorted((sample for sample in samples if (sample.labels[1:] != IGNORED).any()), key=len)
    usable = usable or [_text_of(sample, piece, number=0) for sample in samples]
    if not usable:
        raise DataError("the check before the first step", got="no samples", expected="at least one on every rank")
    chosen: list[EncodedSample] = []
    for sample in usable[:MOST_SAMPLES]:
        if sum(map(len, chosen)) + len(sample) <= most_tokens:
            chosen.append(sample)
    if len(chosen) == 1 and len(chosen[0]) + _LEAST_ROOM > most_tokens:
        chosen = []  # it leaves no room for another
    while len(chosen) < 2:
        size = min(piece, most_tokens - sum(map(len, chosen)))
        chosen.append(_text_of(usable[len(chosen) % len(usable)], size, number=len(chosen) + 1))
    return chosen


def _text_of(sample: EncodedSample, tokens: int, *, number: int) -> EncodedSample:
    """The first tokens of a sample's text, all of which are looked at."""
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


@contextmanager
def _hidden_states(model: Any) -> Iterator[list[Tensor]]:
    """What goes into the output head, as the one element of a list: (tokens, width) of the latest forward."""
    inner = getattr(model, "module", model)  # what data-parallel wrappers hold
    head = inner.get_output_embeddings()
    latest: list[Tensor] = []

    def keep(_: Any, inputs: tuple[Tensor, ...]) -> None:
        latest[:] = [inputs[0].detach()[0]]

    handle = head.register_forward_pre_hook(keep)
    try:
        yield latest
    finally:
        handle.remove()


def _supervised(hidden: Tensor, sample: EncodedSample) -> Tensor:
    """The hidden states from which supervised tokens are predicted."""
    return hidden[:-1][(sample.labels[1:] != IGNORED).to(hidden.device)].float()


def _parity(
    check: str, samples: Sequence[EncodedSample], reference: Sequence[Tensor], found: Sequence[Tensor], allowed: float
) -> Finding:
    gaps = []
    for sample, one, ours in zip(samples, reference, found, strict=False):
        gaps.append((sample.id, float((ours - one).norm()) / max(float(one.norm()), 1e-30)))
    return largest(check, gaps, allowed)


def _isolation(
    samples: Sequence[EncodedSample],
    changes: Sequence[Change],
    before: Sequence[Tensor],
    moved: Sequence[Sequence[Tensor]],
    allowed: float,
) -> list[Finding]:
    gaps, unseen = [], []
    for change, after in zip(changes, moved, strict=True):
        for at, sample in enumerate(samples):
            gap = largest_entry(after[at] - before[at]) / max(1.0, largest_entry(before[at]))
            if at != change.at:
                gaps.append((f"{sample.id} moves with {samples[change.at].id}", gap))
            elif not gap:
                unseen.append(f"other text in {sample.id} changed nothing, not even there")
    seen = Finding(
        check="changes are seen", difference=float(len(unseen)), allowed=0.0, where=unseen[0] if unseen else ""
    )
    return [largest("neighbours' hidden states", gaps, allowed), seen]
