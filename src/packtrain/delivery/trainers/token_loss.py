"""The loss of an optimizer step: the sum of its token losses over the number of its supervised tokens.

A mean of the means of batches would weigh the tokens of short batches more, and would change with packing, accumulation
and the number of ranks. Many models compute just that themselves, whatever arguments they get.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from packtrain.core.errors import DataError
from packtrain.core.numbers import counted
from packtrain.delivery.collate.batch_values import Batch, BatchInfo
from packtrain.delivery.encode.encoded_sample import IGNORED
from packtrain.packing.schedule import Schedule


def token_loss(
    outputs: Any,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The loss one batch adds to its step, which has `num_items_in_batch` supervised tokens on all ranks.

    A `compute_loss_func` for Trainer. Elsewhere the number is `step_tokens(schedule, batch)`, and under DDP, which
    takes the mean over ranks, the loss is to be multiplied by their number. Without a number, the mean of the batch. A
    batch without loss adds 0, where a mean of its own would be no number.
    """
    targets = labels[..., 1:]
    supervised = targets != IGNORED
    # Only these become 32-bit numbers: where they are few, that is most of the memory of a loss.
    logits = outputs["logits"][..., :-1, :][supervised].float()
    total = cross_entropy(logits, targets[supervised], reduction="sum", label_smoothing=label_smoothing)
    items = supervised.sum() if num_items_in_batch is None else num_items_in_batch
    return total / torch.as_tensor(items, device=total.device).clamp(min=1)


def step_tokens(schedule: Schedule, batch: Batch) -> int:
    """Supervised tokens of the whole optimizer step that a batch belongs to, over all ranks and micro-batches.

    It is the plan's number, known without a word between ranks. It is a little off, and with it the weight of the whole
    step, where a sample cannot be decoded.
    """
    key = batch.info.keys[0]
    supervised = schedule.plan.epoch(key.epoch).load("supervised_tokens")
    return int(supervised[schedule.step(key.epoch, key.step)].sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """One pass over the data of evaluation, by all ranks."""

    loss: float
    samples: int
    tokens: int
    batches: int
    failures: int = 0  # samples that could not be decoded, and are in none of the others

    @classmethod
    def of(cls, sums: Sequence[float]) -> Evaluated:
        """Make it from sums over all ranks: losses, their weights, samples, tokens, batches and failures."""
        losses, weight, *counts = sums
        samples, tokens, batches, failures = map(int, counts)
        if not weight:
            raise DataError(
                "evaluation",
                got=f"{counted(samples, 'sample')} without a supervised token; {failures:,} could not be decoded",
                expected="at least one supervised token",
                fix="check the ledger of the evaluation data",
            )
        return cls(loss=losses / weight, samples=samples, tokens=tokens, batches=batches, failures=failures)

    def counts(self, prefix: str) -> dict[str, float]:
        """Values under Trainer's metric names."""
        values = {"loss": self.loss, "samples": self.samples, "tokens": self.tokens, "failures": self.failures}
        return {f"{prefix}_{name}": float(value) for name, value in values.items()}

    def metrics(self, prefix: str, seconds: float) -> dict[str, float]:
        """The same, with the time that it took."""
        return {
            **self.counts(prefix),
            f"{prefix}_runtime": round(seconds, 4),
            f"{prefix}_samples_per_second": round(self.samples / max(seconds, 1e-9), 3),
        }

    def warn(self, prefix: str, *, first: bool) -> None:
        """A loss over fewer samples is another number, and must not pass for the same. The first rank says it."""
        if first and self.failures:
            warnings.warn(
                f"{prefix}: {self.failures:,} of {self.samples + self.failures:,} samples could not be decoded, so "
                f"the loss covers only the others; evaluations with other {prefix}_failures cannot be compared with it",
                stacklevel=2,
            )


class EvaluationLoss:
    """A `compute_loss_func` for the batches of one evaluation: another one, whose losses it adds up on the way."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        self.loss = loss
        self._sums: list[Tensor] = []  # of each batch: its losses, and its supervised tokens
        self._counts = [0, 0, 0, 0]

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        tokens = (labels[..., 1:] != IGNORED).sum()
        mean = self.loss(outputs, labels, num_items_in_batch=tokens).detach().float()
        total = torch.where(tokens > 0, mean * tokens, torch.zeros_like(mean))  # without tokens a mean may be no number
        self._sums.append(torch.stack([total, tokens.to(total.dtype)]))
        items = tokens if num_items_in_batch is None else num_items_in_batch
        return total / torch.as_tensor(items, device=total.device).clamp(min=1)

    def take(self, info: BatchInfo) -> None:
        """One more batch, on its way to the model."""
        failures = sum(not entry.filtered for entry in info.failures)
        more = (info.whole_samples, info.tokens, 1, failures)
        self._counts = [count + one for count, one in zip(self._counts, more, strict=True)]

    def outcome(self) -> Evaluated:
        """The result over all ranks."""
        sums = torch.stack(self._sums).cpu().double().sum(0).tolist() if self._sums else [0.0, 0.0]
        totals = [[*sums, *self._counts]]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            totals *= dist.get_world_size()
            dist.all_gather_object(totals, totals[0])
        return Evaluated.of([sum(column) for column in zip(*totals, strict=True)])
