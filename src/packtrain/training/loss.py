"""The loss as a plain sum over supervised tokens: of a batch, of a step over all ranks, and of an evaluation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from packtrain.delivery.collate.batch_values import LOSS_WEIGHTS, Batch, BatchInfo
from packtrain.delivery.encode.encoded_sample import IGNORED
from packtrain.delivery.trainers.token_loss import Evaluated
from packtrain.modeling.chunked_loss import ChunkedLoss, Targets
from packtrain.modeling.model_parts import part_of_weight
from packtrain.training.agreement import sum_over_ranks
from packtrain.training.step_settings import StepSettings

_SMALLEST = 1e-12  # a step without any loss is divided by it, not by 0


# ---- of a batch


class TokenLossSum(Protocol):
    """Runs a model on a batch. Labels and weights are of the batch too; `targets` are made of them on the host."""

    def targets(self, inputs: Batch) -> Targets | None:
        """The targets of a batch that is not on the GPU yet; takes the weights out of it."""
        ...

    def total(self, model: Any, inputs: Batch, targets: Targets | None) -> tuple[Tensor, Any]:
        """The sum of the token losses in fp32, and the model's outputs."""
        ...


class ChunkedTokenLoss:
    """Inside the wrapped forward, without logits of the whole row."""

    def __init__(self, model: Any, chunk: int, smoothing: float = 0.0) -> None:
        self._loss = ChunkedLoss.install(model, chunk=chunk, smoothing=smoothing)

    def targets(self, inputs: Batch) -> Targets:
        return Targets.of(inputs["labels"], inputs.pop(LOSS_WEIGHTS, None))

    def total(self, model: Any, inputs: Batch, targets: Targets | None) -> tuple[Tensor, Any]:
        targets = targets if targets is not None else self.targets(inputs)
        with self._loss.using(targets):
            outputs = model(**inputs)
        return outputs["loss"], outputs


class LogitsTokenLoss:
    """From the logits of the whole row, for models whose head cannot be taken apart."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing = smoothing

    def targets(self, inputs: Batch) -> None:
        return None

    def total(self, model: Any, inputs: Batch, targets: Targets | None) -> tuple[Tensor, Any]:
        labels, weights = inputs["labels"], inputs.get(LOSS_WEIGHTS)
        outputs = model(**{name: value for name, value in inputs.items() if name not in ("labels", LOSS_WEIGHTS)})
        ids = labels[..., 1:]
        supervised = ids != IGNORED
        logits = outputs["logits"][..., :-1, :][supervised].float()
        losses = cross_entropy(logits, ids[supervised], reduction="none", label_smoothing=self._smoothing)
        if weights is None:
            return losses.sum(), outputs
        return (losses * weights[..., 1:][supervised].float()).sum(), outputs


def make_losses(model: Any, settings: StepSettings, smoothing: float = 0.0) -> TokenLossSum:
    """How a run takes the losses of this model; `smoothing` is Trainer's `label_smoothing_factor`."""
    return (
        ChunkedTokenLoss(model, settings.loss_chunk, smoothing) if settings.chunked_loss else LogitsTokenLoss(smoothing)
    )


def loss_on(losses: TokenLossSum, device: torch.device) -> Callable[[Any, Any], Tensor]:
    """The sum of the token losses of one batch that is still on the host, as a step takes it."""

    def total(model: Any, batch: Any) -> Tensor:
        batch = Batch(batch)
        targets = losses.targets(batch)
        return losses.total(model, batch.to(device), targets)[0]

    return total


# ---- of a step


def batch_weight(info: BatchInfo) -> float:
    """The part of a batch in the divisor of its step's sums."""
    return info.loss_total


class StepTotals:
    """Totals of a step's batches on all ranks. The host reads them without waiting for what is computed later."""

    def __init__(self, batches: Sequence[Any], device: torch.device) -> None:
        media = float(sum(batch.info.images + batch.info.videos for batch in batches))
        self._sums = sum_over_ranks([sum(batch_weight(batch.info) for batch in batches), media], device)
        self._host, self._sent = self._sums, None
        if device.type == "cuda":
            self._host = torch.empty(self._sums.shape, dtype=self._sums.dtype, pin_memory=True)
            self._host.copy_(self._sums, non_blocking=True)
            self._sent = torch.cuda.Event()
            self._sent.record()

    @property
    def weight(self) -> Tensor:
        """The weight of the step's supervised tokens, by which its sum of losses is divided; on the device."""
        return self._sums[0].clamp(min=_SMALLEST).float()

    @property
    def has_loss(self) -> bool:
        """Does any token carry loss?"""
        return self._on_host(0) > 0

    @property
    def has_media(self) -> bool:
        """Does any rank have an image or a video?"""
        return self._on_host(1) > 0

    def _on_host(self, place: int) -> float:
        if self._sent is not None:
            self._sent.synchronize()
        return float(self._host[place])


def clear_unused_grads(model: Any, *, everything: bool) -> None:
    """Take away the gradients of all parameters, or of those that only media reach: an optimizer passes them over.

    On several ranks every parameter gets a gradient in every step, of zero where no batch reaches it, so that
    collectives match. Weight decay and momentum would move such parameters all the same.
    """
    for name, parameter in model.named_parameters():
        if everything or part_of_weight(name) != "language":
            parameter.grad = None


# ---- of an evaluation


class EvaluationStopped(Exception):
    """The run is to end; what was evaluated so far is no evaluation."""


def evaluate(
    model: Any,
    batches: Iterable[Batch],
    total: Callable[[Any, Batch], Tensor],
    device: torch.device,
    stops: Callable[[], bool] = lambda: False,
) -> Evaluated:
    """Sum of token losses over their number. `total` gives the sum of one batch; every rank has as many batches.

    `stops` is asked before each batch and answers all ranks alike; EvaluationStopped is raised where it says yes.
    """
    sum_of_losses = torch.zeros((), dtype=torch.float64, device=device)
    weight, samples, tokens, number, failures = 0.0, 0, 0, 0, 0
    with preserve_random_state(), _evaluating(model), torch.no_grad():
        for batch in batches:
            if stops():
                raise EvaluationStopped
            sum_of_losses += total(model, batch).double()
            info, number = batch.info, number + 1
            weight, samples, tokens = weight + batch_weight(info), samples + info.whole_samples, tokens + info.tokens
            failures += sum(not entry.filtered for entry in info.failures)
        sums = sum_over_ranks([sum_of_losses, weight, samples, tokens, number, failures], device).tolist()
    return Evaluated.of(sums)


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Random numbers continue afterwards as if nothing had been drawn, so that looking changes no run."""
    before, numbers, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without dropout, and every module back in the mode that it was in."""
    was = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in was:
            module.training = training
