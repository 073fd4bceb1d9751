"""The check of padded rows before the first training step, for models that nobody has listed.

Rows of a padded batch see neither each other nor padding, unless something is computed over the whole batch: an encoder
whose output depends on how far its input is padded, say. So each sample in a batch is compared with itself alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from packtrain.core.errors import ConfigError
from packtrain.core.numbers import counted
from packtrain.delivery.collate.batch_values import LOSS_WEIGHTS
from packtrain.delivery.encode.encoded_sample import IGNORED, EncodedSample
from packtrain.families.family import BatchContract
from packtrain.verifying.check_result import CheckReport, CheckResult
from packtrain.verifying.compare import Collate, alone_inputs, as_trained, token_losses
from packtrain.verifying.model_states import (
    EVALUATION,
    exact_products,
    hidden_states,
    in_mode,
    parity,
    stock_attention,
)
from packtrain.verifying.packing_check import Training, sample_described, sample_kind
from packtrain.verifying.trained_loss import loss_tolerance


def refuse_batch_statistics(model: nn.Module, name: str) -> None:
    """Refuse norms over a batch: in training each sample would depend on all others, packed or padded."""
    norms = [place for place, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        raise ConfigError(
            f"model {name!r}",
            got=f"{counted(len(norms), 'BatchNorm layer')} ({norms[0]}, ...), which mix the samples of a batch",
            expected="norms over single tokens or images, as LayerNorm and RMSNorm",
            fix="use another model",
        )


def check_padding(
    model: Any,
    samples: Sequence[EncodedSample],
    collate: Collate,
    contract: BatchContract,
    training: Training | None = None,
) -> CheckReport:
    """Padded rows against each sample alone: hidden states, and the trainer's own loss."""
    started = time.perf_counter()
    weight = next(model.parameters())
    dtype = training.dtype if training is not None and training.dtype is not None else weight.dtype
    allowed = loss_tolerance(dtype)
    batch = as_trained(samples, collate)
    inputs = {name: value for name, value in batch.items() if name not in ("labels", LOSS_WEIGHTS)}
    with exact_products(), in_mode(model, EVALUATION), torch.no_grad():
        with hidden_states(model, rows=True) as hidden:
            rows = hidden(inputs)
            with stock_attention(model):
                alone = [hidden(alone_inputs(sample, contract))[0] for sample in samples]
        compared = [(s, one, rows[at, : len(s)]) for at, (s, one) in enumerate(zip(samples, alone, strict=True))]
        checks = [parity("hidden states (padded)", compared, allowed.hidden)]
        if training is not None and not training.smoothing:
            checks.append(_loss(model, samples, batch, contract, training, allowed.loss))
    return CheckReport(
        model=type(model).__name__,
        attn_implementation="as given",
        device=str(weight.device),
        dtype=str(dtype).removeprefix("torch."),
        samples=tuple(map(sample_described, samples)),
        tokens=sum(map(len, samples)),
        checks=tuple(checks),
        kinds=tuple(dict.fromkeys(sample_kind(one.num_images, one.num_videos) for one in samples)),
        longest=max(map(len, samples)),
        rows="padded",
        seconds=time.perf_counter() - started,
    )


def _loss(
    model: Any,
    samples: Sequence[EncodedSample],
    batch: Any,
    contract: BatchContract,
    training: Training,
    allowed: float,
) -> CheckResult:
    """The trainer's loss of the batch, per unit of its weights, against that of the samples alone."""
    place = next(model.parameters()).device
    total = float(training.loss(model, batch))
    alone = []
    with stock_attention(model):
        for sample in samples:
            inputs = {
                name: value.to(place) if isinstance(value, torch.Tensor) else value
                for name, value in alone_inputs(sample, contract).items()
            }
            alone.append(token_losses(model(**inputs).logits[0], sample.labels))
    weights = _weights(batch, samples)
    whole = sum(float(one.sum()) for one in weights) or 1.0
    expected = sum(float((losses.cpu() * one).sum()) for losses, one in zip(alone, weights, strict=True)) / whole
    return CheckResult(
        check="training loss",
        difference=abs(total / whole - expected) / max(1.0, abs(expected)),
        allowed=allowed,
        where=f"{total / whole:.6f} padded, {expected:.6f} alone",
    )


def _weights(batch: Any, samples: Sequence[EncodedSample]) -> list[torch.Tensor]:
    """The weights of each sample's supervised tokens."""
    given = batch.get(LOSS_WEIGHTS)
    masks = [sample.labels[1:] != IGNORED for sample in samples]
    if given is None:
        return [mask[mask].float() for mask in masks]
    return [
        given[at, 1 : len(sample)][mask].float() for at, (sample, mask) in enumerate(zip(samples, masks, strict=True))
    ]
