"""PackedRow -> a padded batch: every sample is a row of its own, filled up to the longest. The baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from packtrain.delivery.collate.batch_values import Batch, batch_info
from packtrain.delivery.collate.join import EMPTY_TOKENS, checked_sample, count_patches, join_media, too_long
from packtrain.delivery.collate.loss_weights import (
    LOSS_WEIGHTS,
    LossWeighting,
    checked_weighting,
    no_weights,
    token_weights,
)
from packtrain.delivery.encode.encoded_sample import IGNORED, IMAGE, EncodedSample, PackedRow
from packtrain.families.family import BatchContract


class PaddedCollator:
    """Samples padded on the right, with an attention_mask; the same samples and media as in packs."""

    def __init__(
        self,
        contract: BatchContract,
        *,
        pad_id: int,
        capacity: int | None = None,
        dtype: torch.dtype | None = None,
        patch_size: int = 0,
        loss_weighting: LossWeighting = "token",
    ) -> None:
        self._contract, self._pad_id, self._capacity, self.dtype = contract, pad_id, capacity, dtype
        self._patch_size = patch_size
        self._weighting = checked_weighting(loss_weighting)

    def __call__(self, rows: Sequence[PackedRow]) -> Batch:
        samples = [sample for row in rows for sample in row.samples]
        checked_sample(samples, self._contract)
        width = max((len(sample) for sample in samples), default=EMPTY_TOKENS)
        if self._capacity is not None and samples and width > self._capacity:
            raise too_long(rows, samples, width, self._capacity)
        batch = self._tokens(samples, width) if samples else self._nothing()
        batch |= join_media(samples, self._contract, dtype=self.dtype, per_row=True)
        if self._weighting != "token":
            weights = [token_weights(sample, self._weighting) for sample in samples] or [no_weights(width)]
            batch[LOSS_WEIGHTS] = _stacked(weights, width, 0)
        batch["use_cache"] = False
        padding = batch["input_ids"].numel() - sum(len(sample) for sample in samples)
        patches = count_patches(samples, self._patch_size)
        info = batch_info(rows, samples, padding=padding, patches=patches, weighting=self._weighting)
        return Batch(batch, info)

    def _tokens(self, samples: Sequence[EncodedSample], width: int) -> dict[str, Any]:
        batch: dict[str, Any] = {
            "input_ids": _stacked([sample.input_ids for sample in samples], width, self._pad_id),
            "labels": _stacked([sample.labels for sample in samples], width, IGNORED),
            "attention_mask": _stacked([torch.ones_like(sample.input_ids) for sample in samples], width, 0),
        }
        positions = [_stacked(list(row), width, 0) for row in zip(*(s.position_ids for s in samples), strict=True)]
        # Without a row of running positions, as the model computes them itself for padded batches.
        mrope = self._contract.positions == "mrope"
        batch["position_ids"] = torch.stack(positions[1:]) if mrope else positions[0]
        if self._contract.token_types is not None:
            kinds = [(sample.token_kinds == IMAGE).long() for sample in samples]
            batch[self._contract.token_types] = _stacked(kinds, width, 0)
        return batch

    def _nothing(self) -> dict[str, Any]:
        """A row without loss; it sees itself, because attention to nothing is not a number."""
        ids = torch.full((1, EMPTY_TOKENS), self._pad_id, dtype=torch.int64)
        positions = torch.arange(EMPTY_TOKENS)[None]
        mrope = self._contract.positions == "mrope"
        batch: dict[str, Any] = {
            "input_ids": ids,
            "labels": torch.full_like(ids, IGNORED),
            "attention_mask": torch.ones_like(ids),
            "position_ids": positions.expand(3, 1, -1) if mrope else positions,
        }
        if self._contract.token_types is not None:
            batch[self._contract.token_types] = torch.zeros_like(ids)
        return batch


def _stacked(parts: Sequence[Tensor], width: int, value: int) -> Tensor:
    return torch.stack([pad(part, (0, width - len(part)), value=value) for part in parts])
