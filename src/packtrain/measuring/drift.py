"""The drift check: a few records encoded by the real processor must cost what was computed for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from packtrain.core.errors import DriftError, PacktrainError, RecordError
from packtrain.core.seeds import stream
from packtrain.core.values import Record
from packtrain.measuring.measurer import Measurer
from packtrain.measuring.table import CostTable
from packtrain.measuring.worker import Task, measurer_for
from packtrain.records.media import MediaStore
from packtrain.records.open import iter_units, read_unit

_READ = ("tokens", "image_tokens", "video_tokens", "patches", "max_patches_per_image", "tail_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reality:
    """What the real processor made of a record."""

    tokens: int
    media_tokens: int | None  # None where the model's config does not name them
    video_tokens: int  # those that cannot be image tokens
    patches: int
    max_patches_per_image: int
    frames: int = 0  # sampled from videos
    tail_tokens: int | None = None  # after the last media token; None where that is not found among the ids


class Reference(Protocol):
    """The real processor."""

    def encode(self, record: Record, store: MediaStore) -> Reality:
        """Encode one record for real, pixels and all."""
        ...


def check_drift(task: Task, table: CostTable, unit_entries: Sequence[int], reference: Reference, size: int) -> int:
    """Compare `size` random rows with the real processor; the first difference is an error.

    Returns how many could be compared: a medium may be damaged where no header shows it.
    """
    rows = stream(task.request.seed, "drift").permutation(len(table))[:size]
    rows.sort()
    columns = {name: table.column(name)[rows] for name in _READ}
    index = table.column("index")[rows]
    compared = 0
    for at, (record, store) in enumerate(_records(task, unit_entries, index, measurer_for(task))):
        row = {name: int(values[at]) for name, values in columns.items()}
        row["media_tokens"] = row["image_tokens"] + row["video_tokens"]
        try:
            real = reference.encode(record, store)
        except RecordError:
            continue  # damage that no header shows; delivering the record will say so
        except PacktrainError:
            raise
        except Exception as error:  # a processor may fail in any way
            raise DriftError(
                f"drift check: record {record.id} ({record.origin})",
                got=f"the real processor failed: {type(error).__name__}: {error}",
                expected=f"{row['tokens']} tokens as computed from headers",
                fix="please report it with the versions in use; --check 0 turns the check off",
            ) from error
        _compare(record, row, real)
        compared += 1
    return compared


def _compare(record: Record, row: dict[str, int], real: Reality) -> None:
    for name in ("tokens", "media_tokens", "patches", "max_patches_per_image", "tail_tokens"):
        ours, theirs = row[name], getattr(real, name)
        if theirs is not None and ours != theirs:
            raise DriftError(
                f"drift check: record {record.id} ({record.origin})",
                got=f"{name} = {theirs} from the real processor",
                expected=f"{name} = {ours} as computed from headers",
                fix="the family's rule and the installed transformers disagree: please report it with both versions; "
                "--check 0 turns the check off, but lengths may be wrong",
            )


def _records(
    task: Task, unit_entries: Sequence[int], index: np.ndarray, measurer: Measurer
) -> Iterator[tuple[Record, MediaStore]]:
    """The records at these positions, in order; only the units that hold them are read."""
    wanted = iter(index.tolist())
    position = next(wanted, None)
    first = 0
    for unit, entries in zip(iter_units(task.request.specs), unit_entries, strict=False):
        if position is not None and position < first + entries:
            for at, entry in enumerate(read_unit(task.request.specs, unit), start=first):
                if at == position:
                    yield measurer.record(entry, unit.source), measurer.store(unit.source)
                    position = next(wanted, None)
        first += entries
