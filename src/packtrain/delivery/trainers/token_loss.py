"""The loss of an optimizer step: the sum of its token losses over the number of its supervised tokens.

A mean of the means of batches would weigh the tokens of short batches more, and would change with packing, accumulation
and the number of ranks. Many models compute just that themselves, whatever arguments they get.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from packtrain.delivery.collate.batch_values import Batch
from packtrain.delivery.encode.encoded_sample import IGNORED
from packtrain.packing.schedule import Schedule


def token_loss(
    outputs: Any,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
    *,
    label_smoothing: float = 0.0,
) -> Tensor:
    """What one batch adds to the loss of its step, which has `num_items_in_batch` supervised tokens on all ranks.

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
