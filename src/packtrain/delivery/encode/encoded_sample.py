"""The values between encoding and collating: one sample as the model will see it, and the samples of one pack."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from packtrain.core.modality import MODALITIES, TEXT_KIND
from packtrain.core.values import LedgerEntry, MediaHeader

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # a label that carries no loss
TEXT, IMAGE, VIDEO = TEXT_KIND, MODALITIES["image"].token_kind, MODALITIES["video"].token_kind


class PackKey(NamedTuple):
    """Names one pack of a plan; `pack` EMPTY_PACK is a row that carries no loss."""

    epoch: int
    pack: int
    step: int = -1  # optimizer step of the epoch; -1 outside a schedule
    micro_batch: int = 0  # within the optimizer step
    last: bool = False  # the last micro-batch of its step


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCounts:
    """What a whole sample was measured with, and its pack planned with."""

    tokens: int
    patches: int
    supervised_tokens: int
    images: int = 0
    videos: int = 0
    headers: tuple[MediaHeader, ...] | None = None  # of its media, where they are at hand


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionCounts:
    """What the vision encoder gets for a sample's media, as the family's rule counts it."""

    frames: int = 0
    tiles: int = 0  # pictures that attend to themselves alone: images, tiles, frames or steps of a video
    patches: int = 0
    squared_patches: int = 0  # sum over tiles

    @classmethod
    def total(cls, counts: Iterable[VisionCounts]) -> VisionCounts:
        """Add up the counts of several samples."""
        sums = (sum(column) for column in zip(*map(astuple, counts), strict=True))
        return cls(**dict(zip(cls.__slots__, sums, strict=False)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedSample:
    """One sample, or a piece of one, encoded. Everything is cut to the piece; media belong to the first piece."""

    id: str
    row: int = -1  # of the cost table; -1 where there is none
    input_ids: Tensor  # (tokens,) int64
    labels: Tensor  # (tokens,) int64, IGNORED at the first token, on media and on what `loss_on` leaves out
    position_ids: Tensor  # (1, tokens): 0, 1, 2, ...; or (4, tokens): that row, then the three of M-RoPE
    token_kinds: Tensor  # (tokens,) int64: TEXT, IMAGE or VIDEO
    media: Mapping[str, Tensor] = field(default_factory=dict)  # the processor's names and tensors, in token order
    num_images: int = 0
    num_videos: int = 0
    vision: VisionCounts | None = None  # None where nobody counted
    first: bool = True  # False: a later piece of a sample that is split and counted with another

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRow:
    """The samples of one pack, in order, and those that had to be left out."""

    key: PackKey
    samples: tuple[EncodedSample, ...] = ()
    failures: tuple[LedgerEntry, ...] = ()
    stream: Mapping[str, object] | None = None  # of packs that were not measured: the state after this one
