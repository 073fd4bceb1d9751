"""Samples of packs -> a batch: one packed row, or for comparison a padded row for each sample.

Samples are side by side in a packed row, isolated by positions that restart:

    samples       a a a a | b b | c c c | padding
    position_ids  0 1 2 3 | 0 1 | 0 1 2 | 0 1 2 3 0 1    (those of padding are no larger than those of samples)
    labels        . a a a | . b | . c c | . . . . . .    (. carries no loss: nothing is predicted across a boundary)
    cu_seq_lens   0         4     6       9           15

With an alignment, padding follows each sample too, as a segment of its own.
There is no attention_mask and no cache: with either of them models stop looking for these restarts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from packtrain.core.errors import ConfigError, DataError
from packtrain.delivery.collate.batch_values import (
    LOSS_WEIGHTS,
    Batch,
    LossWeighting,
    batch_info,
    check_weighting,
    no_weights,
    token_weights,
)
from packtrain.delivery.collate.join import (
    EMPTY_TOKENS,
    checked_sample,
    count_patches,
    image_blocks_touch,
    join_media,
    pack_name,
    pad_ends,
    tensors_along_text,
    too_long,
)
from packtrain.delivery.encode.encoded_sample import IGNORED, IMAGE, TEXT, EncodedSample, PackedRow
from packtrain.families.family import BatchContract


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticShapes:
    """Every batch has the same shapes, so that compiled code is compiled once."""

    tokens: int
    # Samples of a pack, and one more for padding. None: as many as there are, which is faster where the attention takes
    # any number of them: kernels spend time on segments of no length, and on a longest length that is too large.
    segments: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1 or (self.segments is not None and self.segments < 1):
            got = f"{self.tokens} tokens, {self.segments} segments"
            raise ConfigError("static shapes", got=got, expected="at least one of each")


class PackCollator:
    """One pack becomes one row. A pack without samples becomes a row without loss (`info.supervised_tokens` is 0)."""

    def __init__(
        self,
        contract: BatchContract,
        *,
        pad_id: int,
        capacity: int | None = None,
        dtype: torch.dtype | None = None,
        static_shapes: StaticShapes | None = None,
        boundaries: bool = False,
        pad_to_multiple: int = 1,
        alignment: int = 1,
        patch_size: int = 0,
        loss_weighting: LossWeighting = "token",
    ) -> None:
        if capacity is not None and static_shapes is not None and static_shapes.tokens < capacity:
            raise ConfigError(
                "static shapes",
                got=f"{static_shapes.tokens} tokens for packs of up to {capacity}",
                expected="at least the capacity of a pack",
            )
        for name, multiple in (("pad_to_multiple", pad_to_multiple), ("alignment", alignment)):
            if multiple < 1:
                raise ConfigError(name, got=multiple, expected="1 or more")
        self._contract, self._pad_id, self._capacity, self.dtype = contract, pad_id, capacity, dtype
        self._static_shapes, self._boundaries = static_shapes, boundaries or static_shapes is not None
        self._multiple, self.alignment, self._patch_size = pad_to_multiple, alignment, patch_size
        self._weighting = check_weighting(loss_weighting)

    def __call__(self, rows: Sequence[PackedRow]) -> Batch:
        if len(rows) != 1:
            raise ConfigError(
                "batch size",
                got=f"{len(rows)} packs in one batch",
                expected="one: a pack is a whole row",
                fix="use a longer packing_length instead of several rows",
            )
        samples = rows[0].samples
        checked_sample(samples, self._contract)
        gaps = self._padding_lengths(rows[0])
        padding = sum(gaps)
        batch = self._tokens(samples, gaps)
        if self._contract.token_types is not None:
            batch[self._contract.token_types] = self._token_types(rows[0], gaps)
        for name, parts in tensors_along_text(samples, self._contract):
            _refuse_touching_images(rows[0])
            fillers = [parts[0].new_zeros((1, count, *parts[0].shape[2:])) for count in gaps]
            batch[name] = torch.cat(_interleave(parts, fillers), dim=1)
        batch |= join_media(samples, self._contract, dtype=self.dtype)
        if self._boundaries:
            batch |= self._segments(rows[0], gaps)
        if self._weighting != "token":
            weights = [token_weights(sample, self._weighting) for sample in samples]
            batch[LOSS_WEIGHTS] = torch.cat(_interleave(weights, [no_weights(count) for count in gaps]))[None]
        batch["use_cache"] = False  # a cache would hide the restarts, and models make one by default
        patches = count_patches(samples, self._patch_size)
        info = batch_info(rows, samples, padding=padding, patches=patches, weighting=self._weighting)
        return Batch(batch, info)

    def _padding_lengths(self, row: PackedRow) -> list[int]:
        """Padding tokens after each sample, and after the last; checks the length of the pack."""
        gaps = [-len(sample) % self.alignment for sample in row.samples]
        tokens = sum(len(sample) for sample in row.samples) + sum(gaps)
        limits = [self._capacity, self._static_shapes.tokens if self._static_shapes is not None else None]
        limit = min((limit for limit in limits if limit is not None), default=tokens)
        if tokens > limit:
            raise too_long([row], row.samples, tokens, limit)
        length = -(-(tokens or EMPTY_TOKENS) // self._multiple) * self._multiple
        if self._static_shapes is not None:
            length = self._static_shapes.tokens
        most = self._contract.longest_row
        if most is not None and length > most:
            raise DataError(
                pack_name(row),
                got=f"a row of {length} positions, padding included",
                expected=f"at most {most}: {self._contract.model_type} supports no longer rows",
                fix=f"pack with packing_length {most} or less",
            )
        return [*gaps, length - tokens]

    def _tokens(self, samples: Sequence[EncodedSample], gaps: Sequence[int]) -> dict[str, Any]:
        """Ids, labels and positions; nothing else can see padding."""
        ids = _interleave([sample.input_ids for sample in samples], [_repeat(count, self._pad_id) for count in gaps])
        labels = _interleave([sample.labels for sample in samples], [_repeat(count, IGNORED) for count in gaps])
        mrope = self._contract.positions == "mrope"
        sample_positions = [sample.position_ids for sample in samples]
        fillers = [_padding_positions(sample_positions, count).expand(4 if mrope else 1, -1) for count in gaps]
        positions = torch.cat(_interleave(sample_positions, fillers), dim=1)
        return {
            "input_ids": torch.cat(ids)[None],
            "labels": torch.cat(labels)[None],
            "position_ids": positions[:, None] if mrope else positions,
        }

    def _token_types(self, row: PackedRow, gaps: Sequence[int]) -> Tensor:
        """Which tokens are images, for models whose images see themselves in both directions."""
        _refuse_touching_images(row)
        kinds = [(sample.token_kinds == IMAGE).long() for sample in row.samples]
        return torch.cat(_interleave(kinds, [_repeat(count, TEXT) for count in gaps]))[None]

    def _segments(self, row: PackedRow, gaps: Sequence[int]) -> dict[str, Any]:
        """Where segments begin and end, for kernels that take them as numbers."""
        lengths = [length for length in _interleave([len(sample) for sample in row.samples], gaps) if length]
        longest = max(lengths)
        if self._static_shapes is not None and self._static_shapes.segments is not None:
            if len(lengths) > self._static_shapes.segments:
                raise DataError(
                    pack_name(row),
                    got=f"{len(row.samples)} samples" + (" and padding" if any(gaps) else ""),
                    expected=f"at most {self._static_shapes.segments} segments",
                    fix="raise the segments of the static shapes, or limit the samples per pack",
                )
            # Empty segments after the last.
            lengths += [0] * (self._static_shapes.segments - len(lengths))
            longest = self._static_shapes.tokens
        ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def _refuse_touching_images(row: PackedRow) -> None:
    """Models that are told which tokens are images take neighbouring ones for one image, also of two samples."""
    for before, after in zip(row.samples, row.samples[1:], strict=False):
        if image_blocks_touch(before, after):
            raise DataError(
                f"{pack_name(row)}, samples {before.id!r} and {after.id!r}",
                got="one ends and the next starts with an image, which the model would see as one image",
                expected="text between the images of two samples, as the model's own template writes it",
                fix="use the model's chat template, or put text in front of the image",
            )


def sample_offsets(samples: Sequence[EncodedSample], alignment: int = 1) -> list[int]:
    """Where each sample begins in its row."""
    lengths = [-(-len(sample) // alignment) * alignment for sample in samples]
    return [sum(lengths[:number]) for number in range(len(lengths))]


def _interleave(parts: Sequence[Any], fillers: Sequence[Any]) -> list[Any]:
    """Each part with what follows it; then what follows the last."""
    return [one for pair in zip(parts, fillers, strict=False) for one in pair] + [fillers[-1]]


def _padding_positions(positions: Sequence[Tensor], padding: int) -> Tensor:
    """0, 1, 2, ... up to the largest position of the samples, and again from 0.

    A larger one would change the samples where rotary frequencies follow the largest position of a row, and be none at
    all where positions are learned.
    """
    period = int(torch.cat([*positions], dim=1).amax(1).min()) + 1 if positions else EMPTY_TOKENS
    return torch.arange(padding) % period


def _repeat(tokens: int, value: int) -> Tensor:
    return torch.full((tokens,), value, dtype=torch.int64)


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
        self._weighting = check_weighting(loss_weighting)

    def __call__(self, rows: Sequence[PackedRow]) -> Batch:
        samples = [sample for row in rows for sample in row.samples]
        checked_sample(samples, self._contract)
        width = max((len(sample) for sample in samples), default=EMPTY_TOKENS)
        if self._capacity is not None and samples and width > self._capacity:
            raise too_long(rows, samples, width, self._capacity)
        batch = self._tokens(samples, width) if samples else self._empty_row()
        batch |= join_media(samples, self._contract, dtype=self.dtype, per_row=True)
        if self._weighting != "token":
            weights = [token_weights(sample, self._weighting) for sample in samples] or [no_weights(width)]
            batch[LOSS_WEIGHTS] = _stack_padded(weights, width, 0)
        batch["use_cache"] = False
        padding = batch["input_ids"].numel() - sum(len(sample) for sample in samples)
        patches = count_patches(samples, self._patch_size)
        info = batch_info(rows, samples, padding=padding, patches=patches, weighting=self._weighting)
        return Batch(batch, info)

    def _tokens(self, samples: Sequence[EncodedSample], width: int) -> dict[str, Any]:
        batch: dict[str, Any] = {
            "input_ids": _stack_padded([sample.input_ids for sample in samples], width, self._pad_id),
            "labels": _stack_padded([sample.labels for sample in samples], width, IGNORED),
            "attention_mask": _stack_padded([torch.ones_like(sample.input_ids) for sample in samples], width, 0),
        }
        positions = [_stack_padded(list(row), width, 0) for row in zip(*(s.position_ids for s in samples), strict=True)]
        # Without a row of running positions, as the model computes them itself for padded batches.
        mrope = self._contract.positions == "mrope"
        if self._contract.positions != "own":
            batch["position_ids"] = torch.stack(positions[1:]) if mrope else positions[0]
        if self._contract.token_types is not None:
            kinds = [(sample.token_kinds == IMAGE).long() for sample in samples]
            batch[self._contract.token_types] = _stack_padded(kinds, width, 0)
        for name, parts in tensors_along_text(samples, self._contract):
            batch[name] = torch.cat([pad_ends(part, {1: width}) for part in parts])
        return batch

    def _empty_row(self) -> dict[str, Any]:
        """A row without loss; it sees itself, because attention to nothing is not a number."""
        ids = torch.full((1, EMPTY_TOKENS), self._pad_id, dtype=torch.int64)
        positions = torch.arange(EMPTY_TOKENS)[None]
        mrope = self._contract.positions == "mrope"
        batch: dict[str, Any] = {
            "input_ids": ids,
            "labels": torch.full_like(ids, IGNORED),
            "attention_mask": torch.ones_like(ids),
        }
        if self._contract.positions != "own":
            batch["position_ids"] = positions.expand(3, 1, -1) if mrope else positions
        if self._contract.token_types is not None:
            batch[self._contract.token_types] = torch.zeros_like(ids)
        return batch


def _stack_padded(parts: Sequence[Tensor], width: int, value: int) -> Tensor:
    return torch.stack([pad(part, (0, width - len(part)), value=value) for part in parts])
