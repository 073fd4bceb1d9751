"""The trainer's own loss on a packed row, and its gradients, against the token losses of every sample alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from packtrain.delivery.collate.batch_values import LOSS_WEIGHTS
from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample
from packtrain.families.family import BatchContract
from packtrain.modeling.model_parts import part_of_weight, transformers_model
from packtrain.verifying.check_result import CheckResult
from packtrain.verifying.compare import (
    FP32_TOLERANCE,
    GRADIENT_FLOOR,
    Collate,
    alone_inputs,
    as_trained,
    forward,
    largest,
    sample_starts,
    split,
)
from packtrain.verifying.model_states import stock_attention

TrainingLoss = Callable[[Any, Any], Tensor]  # model, batch -> the sum of its weighted token losses
_CHUNK = 512  # tokens whose logits are in 32 bits at once
_SURE = 1e-3  # loss of a token below which its gradient may round to nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """How far packed and alone may differ in the same precision."""

    hidden: float  # norm of the difference over that of the sample alone; contamination is of the order of 1
    loss: float  # per token, over the loss where that is above 1
    gradients: float  # norm of the difference over the norm


# Rounding errors grow with depth, and more so in gradients.
_TOLERANCES = {
    torch.float32: Tolerance(hidden=FP32_TOLERANCE, loss=FP32_TOLERANCE, gradients=10 * FP32_TOLERANCE),
    torch.float16: Tolerance(hidden=0.02, loss=0.005, gradients=0.2),
    torch.bfloat16: Tolerance(hidden=0.1, loss=0.03, gradients=0.5),
}


def loss_tolerance(dtype: torch.dtype) -> Tolerance:
    """For weights, or products, of one precision."""
    return _TOLERANCES[torch.float32] if dtype == torch.float64 else _TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16])


def compare_training_loss(
    model: Any,
    samples: Sequence[EncodedSample],
    collate: Collate,
    contract: BatchContract,
    loss: TrainingLoss,
    *,
    dtype: torch.dtype,
    backward: bool = True,
    smoothing: float = 0.0,
    runs: int = 0,
) -> list[CheckResult]:
    """The trainer's loss of a packed row, its tokens with loss, and its gradients.

    Gradients of the samples alone are subtracted in place from those of the row, which needs no second copy: what
    remains is the difference. `smoothing` is label smoothing. `runs` is the least number of passes over samples alone:
    ranks of a sharded model run the same number.
    """
    batch = as_trained(samples, collate)
    weights = _weights(batch, samples, collate)
    whole = float(sum(float(one.sum()) for one in weights)) or 1.0
    model.zero_grad()
    try:
        with _local_gradients(model), torch.set_grad_enabled(backward):
            with _head_input(model) as into_head:
                total = loss(model, batch)
                if backward:
                    (total / whole).backward()  # type: ignore[no-untyped-call]
            packed_loss = float(total.detach()) / whole
            before, taken_at = _norms(model), _positions(into_head)
            into_head.clear()
            each = []
            with stock_attention(model):
                for number in range(max(runs, len(samples))):
                    at = min(number, len(samples) - 1)
                    losses = _losses_alone(model, samples[at], contract, smoothing)
                    part = (losses * weights[at].to(losses.device)).sum() * float(number < len(samples))
                    if backward:
                        (-part / whole).backward()  # type: ignore[no-untyped-call]
                    each.append((losses.detach(), float(part.detach())))
            after = _norms(model)
    finally:
        model.zero_grad()
    allowed, expected = loss_tolerance(dtype), sum(part for _, part in each) / whole
    checks = [
        CheckResult(
            check="training loss",
            difference=abs(packed_loss - expected) / max(1.0, abs(expected)),
            allowed=allowed.loss,
            where=f"{packed_loss:.6f} packed, {expected:.6f} alone",
        )
    ]
    if taken_at is not None:
        checks.append(
            _compare_positions(samples, sample_starts(samples, collate), taken_at, [losses for losses, _ in each])
        )
    if backward and (before or after):  # a missing gradient would show in the samples alone
        checks.append(_compare_norms(before, after, dtype, allowed.gradients))
    return checks


def _losses_alone(model: Any, sample: EncodedSample, contract: BatchContract, smoothing: float) -> Tensor:
    """The loss of each supervised token of one sample by itself.

    Training has logits at supervised tokens only, a chunk of them in 32 bits, so there are no more here. What a model
    does to its logits after the head is left to it.
    """
    carries = sample.labels[1:] != IGNORED

    def chosen(_: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *others = inputs
        return (hidden[:, :-1][:, carries.to(hidden.device)], *others)

    handle = transformers_model(model).get_output_embeddings().register_forward_pre_hook(chosen)
    try:
        logits = forward(model, alone_inputs(sample, contract))
    finally:
        handle.remove()
    targets = sample.labels[1:][carries].to(logits.device)
    parts = zip(logits.split(_CHUNK), targets.split(_CHUNK), strict=True)
    return torch.cat([checkpoint(_cross_entropies, *part, smoothing, use_reentrant=False) for part in parts])


def _cross_entropies(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    return cross_entropy(logits.float(), targets, reduction="none", label_smoothing=smoothing)


def _weights(batch: Any, samples: Sequence[EncodedSample], collate: Collate) -> list[Tensor]:
    """The loss weights of the supervised tokens of each sample: those of the batch, or 1."""
    packed = batch.get(LOSS_WEIGHTS)
    rows = split(packed[0], samples, collate) if packed is not None else [torch.ones(len(sample)) for sample in samples]
    return [row[1:][sample.labels[1:] != IGNORED].float() for row, sample in zip(rows, samples, strict=True)]


def _local_gradients(model: Any) -> AbstractContextManager[Any]:
    """Without the exchange of data-parallel ranks, and without its bookkeeping for the first backward pass."""
    from torch.nn.parallel import DistributedDataParallel

    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


@contextmanager
def _head_input(model: Any) -> Iterator[list[Tensor]]:
    """The hidden states that the output head is given, with their gradient afterwards."""
    captured: list[Tensor] = []

    def keep(_: Any, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor) and inputs[0].requires_grad:
            inputs[0].retain_grad()
            captured.append(inputs[0])

    handle = transformers_model(model).get_output_embeddings().register_forward_pre_hook(keep)
    try:
        yield captured
    finally:
        handle.remove()


def _positions(into_head: Sequence[Tensor]) -> Tensor | None:
    """Tokens of the row whose hidden states the loss depends on; None if unknown."""
    if len(into_head) != 1 or into_head[0].grad is None:
        return None
    return (into_head[0].grad.flatten(0, -2) != 0).any(-1).cpu()


def _compare_positions(
    samples: Sequence[EncodedSample], starts: Sequence[int], carries: Tensor, losses: Sequence[Tensor]
) -> CheckResult:
    """Exactly the supervised tokens have loss, in any precision."""
    expected, sure = torch.zeros_like(carries), torch.zeros_like(carries)
    for sample, start, lost in zip(samples, starts, losses, strict=False):
        places = start + (sample.labels[1:] != IGNORED).nonzero().flatten()
        expected[places] = True
        sure[places] = lost.cpu() < _SURE  # its gradient may round to 0
    wrong = ((carries != expected) & ~sure).nonzero().flatten().tolist()
    where = ""
    if wrong:
        where = f"token {wrong[0]} of the row {'carries' if carries[wrong[0]] else 'carries no'} loss"
    return CheckResult(check="training loss, tokens", difference=float(len(wrong)), allowed=0.0, where=where)


def _norms(model: Any) -> dict[str, float]:
    """The norm of every gradient; of this rank's shard where it is sharded."""
    norms = {}
    for name, weight in model.named_parameters():
        if weight.grad is not None:
            local = weight.grad.to_local() if hasattr(weight.grad, "to_local") else weight.grad
            norms[name] = torch.linalg.vector_norm(local.detach(), dtype=torch.float32)
    return {name: float(norm) for name, norm in norms.items()}


def _compare_norms(
    before: dict[str, float], after: dict[str, float], dtype: torch.dtype, allowed: float
) -> CheckResult:
    """The difference after subtraction: by tensor, or in half precision by part of the model."""
    if dtype not in (torch.float32, torch.float64):
        before, after = _by_part(before), _by_part(after)
    floor = GRADIENT_FLOOR * (max(before.values(), default=0.0) or max(after.values(), default=0.0))
    gaps = [
        (name, gap / max(before.get(name, 0.0), floor, 1e-30)) for name, gap in after.items() if gap or before.get(name)
    ]
    return largest("training gradients", gaps, allowed)


def _by_part(norms: dict[str, float]) -> dict[str, float]:
    squares: dict[str, float] = {}
    for name, norm in norms.items():
        part = part_of_weight(name)
        squares[part] = squares.get(part, 0.0) + norm * norm
    return {part: square**0.5 for part, square in squares.items()}
