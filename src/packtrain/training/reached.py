"""What the batches of a step reach: the optimizer passes over the rest, as it does where a plain loop has no gradients.

On several ranks every parameter gets a gradient in every step, of zero where no batch reaches it, so that collectives
match. Decay and momentum would move such parameters all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from packtrain.modeling.model_parts import part_of_weight
from packtrain.training.agreement import summed
from packtrain.training.loss import weight_of_all

_SMALLEST = 1e-12  # a step without any loss is divided by it, not by 0


class StepReach:
    """Sums over the batches of a step on all ranks. The host gets them without waiting for what is computed later."""

    def __init__(self, batches: Sequence[Any], device: torch.device) -> None:
        media = float(sum(batch.info.images + batch.info.videos for batch in batches))
        self._sums = summed([weight_of_all(batches), media], device)
        self._host, self._sent = self._sums, None
        if device.type == "cuda":
            self._host = torch.empty(self._sums.shape, dtype=self._sums.dtype, pin_memory=True)
            self._host.copy_(self._sums, non_blocking=True)
            self._sent = torch.cuda.Event()
            self._sent.record()

    @property
    def weight(self) -> Tensor:
        """Of all supervised tokens of the step: what its sum of losses is divided by; on the device."""
        return self._sums[0].clamp(min=_SMALLEST).float()

    @property
    def has_loss(self) -> bool:
        """Does any token carry loss?"""
        return self._counted()[0] > 0

    @property
    def has_media(self) -> bool:
        """Did any rank see an image or a video?"""
        return self._counted()[1] > 0

    def _counted(self) -> list[float]:
        if self._sent is not None:
            self._sent.synchronize()
        found: list[float] = self._host.tolist()
        return found


def leave_alone(model: Any, *, everything: bool) -> None:
    """Take away the gradients of all parameters, or of those that only media reach: an optimizer passes them over."""
    for name, parameter in model.named_parameters():
        if everything or part_of_weight(name) != "language":
            parameter.grad = None
