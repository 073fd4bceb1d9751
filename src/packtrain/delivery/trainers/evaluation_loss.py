"""The loss of an evaluation: a mean over the tokens of all batches and ranks, whatever shares a batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from packtrain.core.errors import DataError
from packtrain.delivery.collate.batch_values import BatchInfo
from packtrain.delivery.encode.encoded_sample import IGNORED


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
        """From sums over all ranks: losses, their weights, samples, tokens, batches and failures."""
        losses, weight, *counts = sums
        samples, tokens, batches, failures = map(int, counts)
        if not weight:
            raise DataError(
                "evaluation",
                got=f"{samples:,} samples without a supervised token; {failures:,} could not be decoded",
                expected="at least one supervised token",
                fix="check the ledger of the evaluation data",
            )
        return cls(loss=losses / weight, samples=samples, tokens=tokens, batches=batches, failures=failures)

    def counts(self, prefix: str) -> dict[str, float]:
        """Under the names that Trainer gives them."""
        found = {"loss": self.loss, "samples": self.samples, "tokens": self.tokens, "failures": self.failures}
        return {f"{prefix}_{name}": float(value) for name, value in found.items()}

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
        """Over all ranks."""
        sums = torch.stack(self._sums).cpu().double().sum(0).tolist() if self._sums else [0.0, 0.0]
        said = [[*sums, *self._counts]]
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            said *= dist.get_world_size()
            dist.all_gather_object(said, said[0])
        return Evaluated.of([sum(column) for column in zip(*said, strict=True)])
