"""What one forward pass gets: a batch of arguments for the model, and what is known about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.core.values import LedgerEntry
from packtrain.packs.values import IGNORED, EncodedSample, PackedRow, PackKey


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchInfo:
    """What a batch holds; counts are of real samples, padding stands beside them."""

    keys: tuple[PackKey, ...] = ()
    ids: tuple[str, ...] = ()
    rows: tuple[int, ...] = ()  # of the cost table, one for each sample
    lengths: tuple[int, ...] = ()  # tokens of each sample, in the order of the batch
    tokens: int = 0
    padding: int = 0  # tokens that only fill up
    supervised_tokens: int = 0
    images: int = 0
    videos: int = 0
    patches: int | None = 0  # rows of the vision tower; None where pixels come as tiles of unknown patch size
    failures: tuple[LedgerEntry, ...] = ()

    @property
    def samples(self) -> int:
        return len(self.ids)


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


def describe(
    rows: Sequence[PackedRow], samples: Sequence[EncodedSample], *, padding: int, patches: int | None
) -> BatchInfo:
    """What is known about a batch made of these packs."""
    lengths = tuple(len(sample) for sample in samples)
    return BatchInfo(
        keys=tuple(row.key for row in rows),
        ids=tuple(sample.id for sample in samples),
        rows=tuple(sample.row for sample in samples),
        lengths=lengths,
        tokens=sum(lengths),
        padding=padding,
        supervised_tokens=sum(int((sample.labels != IGNORED).sum()) for sample in samples),
        images=sum(sample.num_images for sample in samples),
        videos=sum(sample.num_videos for sample in samples),
        patches=patches,
        failures=tuple(failure for row in rows for failure in row.failures),
    )
