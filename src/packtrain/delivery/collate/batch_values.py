"""What one forward pass gets: a batch of arguments for the model, what is known about it, and the weights of its loss.

The loss of a step is the sum of its weighted token losses, divided by the sum of its weights over all ranks.

    n supervised tokens in a sample      weight of each    of all of them
    token                                1                 n
    sample                               1 / n             1
    sqrt                                 1 / sqrt(n)       sqrt(n)

A piece of a sample that was split or truncated is a sample of its own here: n counts what of it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from packtrain.core.errors import ConfigError, nearest
from packtrain.core.values import LedgerEntry
from packtrain.delivery.encode.encoded_sample import IGNORED, TEXT, EncodedSample, PackedRow, PackKey, VisionCounts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchInfo:
    """The contents of a batch; counts are of real samples, padding is counted separately."""

    keys: tuple[PackKey, ...] = ()
    ids: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()  # of the cost table, one for each sample
    lengths: tuple[int, ...] = ()  # tokens of each sample, in the order of the batch
    tokens: int = 0
    padding: int = 0  # tokens that only fill up
    squared_tokens: int = 0  # sum over samples of length squared: what attends to itself
    vision_tokens: int = 0  # of them, those that media became
    supervised_tokens: int = 0
    loss_total: float = math.nan  # sum of the weights of supervised tokens; left out: their number
    images: int = 0
    videos: int = 0
    frames: int = 0
    tiles: int = 0  # pictures that the vision encoder sees: images, the tiles of an image, frames or steps of a video
    patches: int | None = 0  # rows of the vision encoder; None where pixels come as tiles of unknown patch size
    squared_patches: int = 0  # sum over pictures of patches squared; 0 where samples come without such counts
    failures: tuple[LedgerEntry, ...] = ()
    later_pieces: int = 0  # of its samples, those that go on with one that is split
    stream: Mapping[str, Any] | None = field(
        default=None, repr=False
    )  # of packs that were not measured: where they end

    @property
    def samples(self) -> int:
        """Number of samples, counting each piece of a split one."""
        return len(self.ids)

    @property
    def whole_samples(self) -> int:
        """Number of samples, counting a split one once, with its first piece."""
        return self.samples - self.later_pieces

    def __post_init__(self) -> None:
        if math.isnan(self.loss_total):
            object.__setattr__(self, "loss_total", float(self.supervised_tokens))


class Batch(dict[str, Any]):
    """The keyword arguments of one forward pass. `info` survives moving, pinning, copying and pickling."""

    info: BatchInfo

    def __init__(self, arguments: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), info: BatchInfo | None = None):
        super().__init__(arguments)
        # Code that moves batches rebuilds them from their items alone.
        self.info = info if info is not None else getattr(arguments, "info", BatchInfo())

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """The same batch with every tensor on another device."""
        moved = {
            name: value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value
            for name, value in self.items()
        }
        return Batch(moved, self.info)


def batch_info(
    rows: Sequence[PackedRow],
    samples: Sequence[EncodedSample],
    *,
    padding: int,
    patches: int | None,
    weighting: LossWeighting = "token",
) -> BatchInfo:
    """The BatchInfo of these packs; `patches` is used where samples do not say theirs."""
    lengths = tuple(len(sample) for sample in samples)
    counts = [sample.vision for sample in samples if sample.vision is not None]
    vision = VisionCounts.total(counts)
    return BatchInfo(
        keys=tuple(row.key for row in rows),
        ids=tuple(sample.id for sample in samples),
        rows=tuple(sample.row for sample in samples),
        lengths=lengths,
        tokens=sum(lengths),
        padding=padding,
        squared_tokens=sum(length * length for length in lengths),
        vision_tokens=sum(int((sample.token_kinds != TEXT).sum()) for sample in samples),
        supervised_tokens=sum(int((sample.labels != IGNORED).sum()) for sample in samples),
        loss_total=loss_total(samples, weighting),
        images=sum(sample.num_images for sample in samples),
        videos=sum(sample.num_videos for sample in samples),
        frames=vision.frames,
        tiles=vision.tiles,
        patches=vision.patches if len(counts) == len(samples) else patches,
        squared_patches=vision.squared_patches,
        failures=tuple(failure for row in rows for failure in row.failures),
        later_pieces=sum(not sample.first for sample in samples),
        stream=next((row.stream for row in reversed(rows) if row.stream is not None), None),
    )


LossWeighting = Literal["token", "sample", "sqrt"]
LOSS_WEIGHTS = "loss_weights"  # their key in a batch; same shape as labels
_POWERS: dict[str, float] = {"token": 0.0, "sample": -1.0, "sqrt": -0.5}


def check_weighting(weighting: str) -> LossWeighting:
    """The name, if it is one."""
    names = get_args(LossWeighting)
    if weighting not in names:
        raise ConfigError(
            "loss_weighting", got=weighting, expected=", ".join(names), fix=nearest(str(weighting), names)
        )
    return weighting  # type: ignore[return-value]


def token_weights(sample: EncodedSample, weighting: LossWeighting) -> Tensor:
    """The weight of every token of a sample, 0 where there is no loss: (tokens,) float32."""
    supervised = sample.labels != IGNORED
    return supervised.float() * max(1, int(supervised.sum())) ** _POWERS[weighting]


def loss_total(samples: Sequence[EncodedSample], weighting: LossWeighting) -> float:
    """The sum of the weights of all tokens: what a batch adds to the number that the loss of its step is divided by."""
    counts = [int((sample.labels != IGNORED).sum()) for sample in samples]
    return float(sum(count * count ** _POWERS[weighting] for count in counts if count))


def no_weights(tokens: int) -> Tensor:
    """Zero weights for padding tokens."""
    import torch

    return torch.zeros(tokens)
