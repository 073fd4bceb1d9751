"""The loss of one batch as a plain sum over its supervised tokens, and the number that a step's sums are divided by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from packtrain.delivery.collate.batch_values import Batch, BatchInfo
from packtrain.delivery.encode.encoded_sample import IGNORED
from packtrain.modeling.chunked_loss import ChunkedLoss, Targets
from packtrain.training.step_settings import StepSettings

WEIGHTS = "loss_weights"  # of a batch whose tokens do not weigh the same


class SumOfLosses(Protocol):
    """Runs a model on a batch. Labels and weights are of the batch too; `targets` are made of them on the host."""

    def targets(self, inputs: dict[str, Any]) -> Targets | None:
        """What is known of a batch before it is on the GPU; takes the weights out of it."""
        ...

    def total(self, model: Any, inputs: dict[str, Any], targets: Targets | None) -> tuple[Tensor, Any]:
        """The sum of the token losses in fp32, and the model's outputs."""
        ...


class InChunks:
    """Inside the wrapped forward, without logits of the whole row."""

    def __init__(self, model: Any, chunk: int, smoothing: float = 0.0) -> None:
        self._loss = ChunkedLoss.install(model, chunk=chunk, smoothing=smoothing)

    def targets(self, inputs: dict[str, Any]) -> Targets:
        return Targets.of(inputs["labels"], inputs.pop(WEIGHTS, None))

    def total(self, model: Any, inputs: dict[str, Any], targets: Targets | None) -> tuple[Tensor, Any]:
        targets = targets if targets is not None else self.targets(inputs)
        with self._loss.taking(targets):
            outputs = model(**inputs)
        return outputs["loss"], outputs


class FromLogits:
    """From the logits of the whole row, for models whose head cannot be taken apart."""

    def __init__(self, smoothing: float = 0.0) -> None:
        self._smoothing = smoothing

    def targets(self, inputs: dict[str, Any]) -> None:
        return None

    def total(self, model: Any, inputs: dict[str, Any], targets: Targets | None) -> tuple[Tensor, Any]:
        labels, weights = inputs["labels"], inputs.get(WEIGHTS)
        outputs = model(**{name: value for name, value in inputs.items() if name not in ("labels", WEIGHTS)})
        ids = labels[..., 1:]
        supervised = ids != IGNORED
        logits = outputs["logits"][..., :-1, :][supervised].float()
        losses = cross_entropy(logits, ids[supervised], reduction="none", label_smoothing=self._smoothing)
        if weights is None:
            return losses.sum(), outputs
        return (losses * weights[..., 1:][supervised].float()).sum(), outputs


def losses_of(model: Any, settings: StepSettings, smoothing: float = 0.0) -> SumOfLosses:
    """How a run takes the losses of this model; `smoothing` is Trainer's `label_smoothing_factor`."""
    return InChunks(model, settings.loss_chunk, smoothing) if settings.chunked_loss else FromLogits(smoothing)


def loss_on(losses: SumOfLosses, device: torch.device) -> Callable[[Any, Any], Tensor]:
    """The sum of the token losses of one batch that is still on the host, as a step takes it."""

    def total(model: Any, batch: Any) -> Tensor:
        batch = Batch(batch)
        targets = losses.targets(batch)
        return losses.total(model, batch.to(device), targets)[0]

    return total


def weight_of(info: BatchInfo) -> float:
    """What a batch adds to the number that the sums of its step are divided by."""
    return float(getattr(info, "loss_total", info.supervised_tokens))


def weight_of_all(batches: Iterable[Any]) -> Tensor:
    """The same of all batches of a step of one rank; on the host."""
    return torch.tensor(sum(weight_of(batch.info) for batch in batches), dtype=torch.float64)
