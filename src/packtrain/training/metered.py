"""What the trainer says to whoever measures its steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from packtrain.delivery.collate.batch_values import BatchInfo


class Meter(Protocol):
    """Measures steps; `training.meter.StepMeter` is one.

    One that has `attend(model, device)` is told when training begins, and by `leave()` when it is over; one that has
    `state_dict` and `load_state_dict` goes on with what it counted before a checkpoint.
    """

    def begin(self) -> None:
        """A step begins: its batches are about to be asked for."""
        ...

    def took(self, info: BatchInfo, waited: float) -> None:
        """This rank got a batch, after so many seconds."""
        ...

    def end(
        self,
        *,
        step: int,
        epoch: float,
        loss: Tensor | float,
        grad_norm: Tensor | float | None,
        learning_rates: Mapping[str, float],
    ) -> Any:
        """The step is over. The mean over ranks of the losses is the loss of the step."""
        ...


class NoMeter:
    """Measures nothing."""

    def begin(self) -> None:
        pass

    def took(self, info: BatchInfo, waited: float) -> None:
        pass

    def end(self, **facts: Any) -> None:
        pass
