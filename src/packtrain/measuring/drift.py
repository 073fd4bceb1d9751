"""Does a table still say what is true? Compared with the real processor, and with data that have moved."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from packtrain.core.errors import DriftError, PacktrainError, RecordError
from packtrain.core.seeds import stream
from packtrain.core.values import Measured, Record
from packtrain.measuring.columns import COST_FIELDS
from packtrain.measuring.measure_summary import JsonObject
from packtrain.measuring.measurer import Measurer
from packtrain.measuring.table import COSTS, CostTable
from packtrain.measuring.work import Task, measurer_for
from packtrain.records.media import MediaStore
from packtrain.records.open import iter_units, read_unit

_READ = ("tokens", "image_tokens", "video_tokens", "patches", "max_patches_per_image", "tail_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorCounts:
    """What the real processor made of a record."""

    ids: Sequence[int]
    media_tokens: int | None  # None where the model's config does not name them
    video_tokens: int  # those that cannot be image tokens
    patches: int
    max_patches_per_image: int
    frames: int = 0  # sampled from videos
    tail_tokens: int | None = None  # after the last media token; None where that is not found among the ids

    @property
    def tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """Records that are as the real processor makes them."""

    records: int
    by_counts: int  # of these, records whose token ids could not be compared


class Reference(Protocol):
    """The real processor."""

    def encode(self, record: Record, store: MediaStore) -> ProcessorCounts:
        """Encode one record for real, pixels and all."""
        ...


def check_drift(
    task: Task, table: CostTable, unit_entries: Sequence[int], reference: Reference, size: int
) -> Agreement:
    """Compare counts and token ids of `size` random rows with the real processor; the first difference is an error.

    Fewer are compared where a medium is damaged and no header shows it.
    """
    rows = stream(task.request.seed, "drift").permutation(len(table))[:size]
    rows.sort()
    columns = {name: table.column(name)[rows] for name in _READ}
    index = table.column("index")[rows]
    compared, by_counts, measurer = 0, 0, measurer_for(task)
    for at, (record, source) in enumerate(_records(task, unit_entries, index, measurer)):
        row = {name: int(values[at]) for name, values in columns.items()}
        row["media_tokens"] = row["image_tokens"] + row["video_tokens"]
        try:
            real = reference.encode(record, measurer.store(source))
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
        ids = measurer.token_ids(record, source)
        if ids is not None:
            _compare_ids(record, ids, real)
        compared += 1
        by_counts += ids is None
    return Agreement(records=compared, by_counts=by_counts)


_REPORT = (
    "the family's rule and the installed transformers disagree: please report it with both versions; "
    "--check 0 turns the check off, but "
)


def _compare(record: Record, row: dict[str, int], real: ProcessorCounts) -> None:
    for name in ("tokens", "media_tokens", "patches", "max_patches_per_image", "tail_tokens"):
        ours, theirs = row[name], getattr(real, name)
        if theirs is not None and ours != theirs:
            raise DriftError(
                f"drift check: record {record.id} ({record.origin})",
                got=f"{name} = {theirs} from the real processor",
                expected=f"{name} = {ours} as computed from headers",
                fix=f"{_REPORT}lengths may be wrong",
            )


def _compare_ids(record: Record, ours: Sequence[int], real: ProcessorCounts) -> None:
    at = next((at for at, (one, other) in enumerate(zip(ours, real.ids, strict=False)) if one != other), None)
    if at is not None:
        raise DriftError(
            f"drift check: record {record.id} ({record.origin})",
            got=f"token {at} is {real.ids[at]} from the real processor",
            expected=f"token {at} is {ours[at]} as rendered for training",
            fix=f"{_REPORT}other tokens would be trained",
        )


def _records(
    task: Task, unit_entries: Sequence[int], index: np.ndarray, measurer: Measurer
) -> Iterator[tuple[Record, int]]:
    """The records at these positions, in order, and their sources; only the units that hold them are read."""
    wanted = iter(index.tolist())
    position = next(wanted, None)
    first = 0
    for unit, entries in zip(iter_units(task.request.specs), unit_entries, strict=False):
        if position is not None and position < first + entries:
            for at, entry in enumerate(read_unit(task.request.specs, unit), start=first):
                if at == position:
                    yield measurer.record(entry, unit.source), unit.source
                    position = next(wanted, None)
        first += entries


LOOKED_AT = 64  # records of a source
_MEDIA = ("images", "videos", "audio_seconds")


def others_there(task: Task, table: CostTable) -> list[str]:
    """Which sources lie elsewhere than when the table was measured, and have other records or media there.

    The states of data files say nothing of media, whose names are relative: a few records are measured again.
    """
    places = zip(table.places.sources, task.request.places().sources, strict=False)
    moved = [number for number, (before, now) in enumerate(places) if before != now]
    return [change for number in moved for change in _differing(task, table, number)]


def _differing(task: Task, table: CostTable, number: int) -> list[str]:
    """The first record at the beginning of a source that is not what the table says; those with media first."""
    spec = task.request.specs[number]
    unit = next(iter_units([spec]), None)
    entries = {entry.origin: entry for entry in read_unit([spec], unit)} if unit is not None else {}
    rows = sorted(_rows(table, spec.name, entries), key=lambda row: not any(row[name] for name in _MEDIA))[:LOOKED_AT]
    measured = measurer_for(task).measure([entries[row["origin"]] for row in rows], number)
    for row, now in zip(rows, measured, strict=True):
        if not isinstance(now, Measured):
            return [f"{row['origin']} in {spec.path}: {now.reason}"]
        same = (now.record_id, entries[row["origin"]].check) == (row["id"], row["check"])
        if not same or any(getattr(now.cost, name) != row[name] for name in COST_FIELDS):
            return [f"{row['origin']} in {spec.path}: {row['tokens']} -> {now.cost.tokens} tokens, or another text"]
    return []


def _rows(table: CostTable, source: str, origins: Collection[str]) -> list[JsonObject]:
    wanted = (pc.field("source") == source) & pc.field("origin").isin(list(origins))
    rows = pq.read_table(table.folder / COSTS, columns=["id", "origin", "check", *COST_FIELDS], filters=wanted)
    return rows.to_pylist()  # type: ignore[no-any-return]
