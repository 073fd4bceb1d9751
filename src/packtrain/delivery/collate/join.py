"""How samples are put together: media joined as a family's contract says, and checks that both collators make."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from packtrain.core.errors import DataError, require
from packtrain.core.modality import PIXELS
from packtrain.core.numbers import counted
from packtrain.delivery.collate.shared_memory import empty_batch_tensor
from packtrain.delivery.encode.encoded_sample import IGNORED, IMAGE, EncodedSample, PackedRow
from packtrain.families.family import BatchContract
from packtrain.packing.schedule import EMPTY_PACK

EMPTY_TOKENS = 8  # of a row that carries nothing: a few, so that no kernel meets a special case


def checked_sample(samples: Sequence[EncodedSample], contract: BatchContract) -> None:
    """Our own encoder's promises; what breaks them would train on wrong targets without a sign."""
    positions = 4 if contract.positions == "mrope" else 1
    for sample in samples:
        tokens = len(sample)
        require(tokens > 0, f"{sample.id}: sample without tokens")
        require(sample.labels.shape == sample.token_kinds.shape == (tokens,), f"{sample.id}: lengths differ")
        require(sample.position_ids.shape == (positions, tokens), f"{sample.id}: positions of another family")
        require(int(sample.position_ids[0, 0]) == 0, f"{sample.id}: positions do not start at 0")
        first = f"{sample.id}: its first token carries loss, so it would be predicted from its neighbour"
        require(int(sample.labels[0]) == IGNORED, first)
        unknown = set(sample.media) - set(contract.media)
        require(not unknown, f"{sample.id}: {sorted(unknown)} are not media of {contract.model_type}")
    limit = contract.longest_together
    if limit is None or len(samples) < 2:
        return
    for sample in samples:
        reached = int(sample.position_ids.max()) + 1  # those of a video may run ahead of its tokens
        if reached > limit:
            raise too_long_together(f"sample {sample.id} of {reached} tokens beside others", limit)


def too_long_together(got: str, limit: int) -> DataError:
    """The error for a model whose rotary frequencies, for the whole row, follow the longest sample in it."""
    return DataError(
        "rotary positions",
        got=got,
        expected=f"at most {limit} tokens: beyond, this model's rotary frequencies change for the whole row",
        fix=f"pack with packing_length {limit} or less, or train with packing: false and batch size 1",
    )


def too_long(rows: Sequence[PackedRow], samples: Sequence[EncodedSample], tokens: int, capacity: int) -> DataError:
    """The error for more tokens than were planned."""
    longest = ", ".join(f"{sample.id} ({len(sample)})" for sample in sorted(samples, key=len, reverse=True)[:5])
    packs = ", ".join(pack_name(row) for row in rows)
    more = ", ..." if len(samples) > 5 else ""
    return DataError(
        packs,
        got=f"{tokens:,} tokens in {counted(len(samples), 'sample')}: {longest}{more}",
        expected=f"at most {capacity} tokens",
        fix="pack again with the processor settings that training uses",
    )


def pack_name(row: PackedRow) -> str:
    return "an empty pack" if row.key.pack == EMPTY_PACK else f"pack {row.key.pack} of epoch {row.key.epoch}"


def join_media(
    samples: Sequence[EncodedSample], contract: BatchContract, *, dtype: torch.dtype | None, per_row: bool = False
) -> dict[str, Tensor]:
    """Every media tensor of the samples in token order; `per_row` keeps images of different samples in rows."""
    media: dict[str, Tensor] = {}
    for name, how in contract.media.items():
        parts = [sample.media.get(name) for sample in samples]
        present = [part for part in parts if part is not None]
        if not present:
            continue
        dim = 0
        if how == "text":
            continue  # the collators, which know where samples begin
        if how == "rows":
            present = list(_require_same_size(name, samples, present))
        elif how == "samples":
            parts = _as_wide_as_text(parts, samples)
            present = _rows_of_images(parts, [part for part in parts if part is not None])
        elif how == "columns":
            dim = present[0].ndim - 1
        elif how == "padded":
            present = [pad_ends(part, _largest(present, range(1, part.ndim))) for part in present]
        elif how == "tiles":
            present = [pad_ends(part, _largest(present, (1,))) for part in present]
        elif per_row:
            present = _rows_of_images(parts, present)
        else:
            dim, sides = 1, range(2, present[0].ndim)
            present = [pad_ends(part, _largest(present, sides)) for part in present]
        media[name] = _concatenate(present, dim, dtype if name in PIXELS else None)
    if contract.per_sample_images is not None and "pixel_values" in media:
        media[contract.per_sample_images] = torch.tensor([sample.num_images for sample in samples])
    return media


def tensors_along_text(samples: Sequence[EncodedSample], contract: BatchContract) -> Iterator[tuple[str, list[Tensor]]]:
    """Tensors that are as long as the text, (1, tokens, ...) of each sample; zeros where a sample has none."""
    for name in (name for name, how in contract.media.items() if how == "text"):
        parts = [sample.media.get(name) for sample in samples]
        like = next((part for part in parts if part is not None), None)
        if like is not None:
            yield (
                name,
                [
                    like.new_zeros((1, len(sample), *like.shape[2:])) if part is None else part
                    for sample, part in zip(samples, parts, strict=True)
                ],
            )


def _concatenate(parts: Sequence[Tensor], dim: int, dtype: torch.dtype | None) -> Tensor:
    """All parts in one tensor, each copied once, into the wanted precision and to where the batch will be read."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    output, at = empty_batch_tensor(shape, dtype or parts[0].dtype), 0
    for part in parts:
        output.narrow(dim, at, part.shape[dim]).copy_(part)
        at += part.shape[dim]
    return output


def _require_same_size(name: str, samples: Sequence[EncodedSample], parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Refuse what the model takes only in one size, with the samples' names: LLaVA-OneVision's videos."""
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        sizes = ", ".join(
            f"{sample.id} {tuple(sample.media[name].shape)}" for sample in samples if name in sample.media
        )
        raise DataError(
            f"{name} of one pack",
            got=sizes,
            expected="the same number of frames in all videos, since this model batches them",
            fix="set num_frames in processor_config, then measure and pack again",
        )
    return parts


def _rows_of_images(parts: Sequence[Tensor | None], present: Sequence[Tensor]) -> list[Tensor]:
    """One row for each sample; the models drop images that are all zero, so these fill up."""
    sizes = _largest(present, range(1, present[0].ndim))
    empty = present[0].new_zeros((1, *(sizes[dim] for dim in sorted(sizes))))
    return [empty if part is None else pad_ends(part, sizes) for part in parts]


def _as_wide_as_text(parts: Sequence[Tensor | None], samples: Sequence[EncodedSample]) -> list[Tensor | None]:
    """(1, tokens, ...) of each sample as wide as the longest text; others stay."""
    width = max(map(len, samples))
    along = all(part is None or part.shape[1:2] == (len(one),) for part, one in zip(parts, samples, strict=True))
    return [pad_ends(part, {1: width}) if along and part is not None else part for part in parts]


def _largest(parts: Sequence[Tensor], dims: Iterable[int]) -> dict[int, int]:
    return {dim: max(part.shape[dim] for part in parts) for dim in dims}


def pad_ends(part: Tensor, sizes: Mapping[int, int]) -> Tensor:
    """Zeros after the ends of some dimensions."""
    padding = [sizes.get(dim, size) - size for dim, size in enumerate(part.shape)]
    if not any(padding):
        return part
    return pad(part, [side for more in reversed(padding) for side in (0, more)])


def count_patches(samples: Sequence[EncodedSample], patch_size: int) -> int | None:
    """Rows of the vision encoder: counted where pixels come as patches, else from the size of tiles."""
    total = 0
    for sample in samples:
        for name in PIXELS:
            pixels = sample.media.get(name)
            if pixels is None:
                continue
            if pixels.ndim == 2:
                total += len(pixels)
            elif not patch_size or pixels.ndim < 4:
                return None
            else:
                tiles = pixels.flatten(0, -4)
                real = int(tiles.flatten(1).any(1).sum())  # all-zero tiles only fill up
                total += real * (tiles.shape[-2] // patch_size) * (tiles.shape[-1] // patch_size)
    return total


def image_blocks_touch(before: EncodedSample, after: EncodedSample) -> bool:
    """Whether a model that groups neighbouring image tokens would take two samples' images for one."""
    return int(before.token_kinds[-1]) == IMAGE and int(after.token_kinds[0]) == IMAGE
