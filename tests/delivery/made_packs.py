"""Packs without files: a plan made from arrays, and stand-ins for what reads and encodes its rows."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from packtrain.core.errors import DataError, RecordError
from packtrain.core.values import Record
from packtrain.delivery.collate.collators import PackCollator, PaddedCollator
from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.delivery.encode.pack_source import PackSource
from packtrain.delivery.encode.row_table import SampleRow
from packtrain.delivery.encode.synthetic_samples import synthetic_sample
from packtrain.delivery.loader.pack_loader import PackLoader
from packtrain.families.family import BatchContract
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.schedule import Schedule
from packtrain.records.media import MediaStore

sys.path.append(str(Path(__file__).parents[1] / "packing"))  # plans made from arrays, as the tests of plans make them
from lengths import made_plan

BROKEN, GONE, KILLER, FLAKY, DEAD = "broken", "gone", "killer", "flaky", "dead"  # what can be wrong with a row


class Rows:
    """Rows of a few tokens each."""

    def row(self, number: int) -> SampleRow:
        tokens = 2 + number % 5
        zeros = dict.fromkeys(("source", "file", "at", "check", "patches", "images", "videos", "frames"), 0)
        origin = f"data.jsonl:{number + 1}"
        return SampleRow(id=f"sample-{number}", origin=origin, tokens=tokens, supervised_tokens=tokens - 1, **zeros)


class Reader:
    """Writes the number of every row that it reads into a file that all processes share."""

    def __init__(self, log: Path | None = None) -> None:
        self.log = log

    @contextmanager
    def open_record(self, row: int) -> Iterator[Record]:
        if self.log is not None:
            with self.log.open("ab", buffering=0) as stream:
                stream.write(f"{row}\n".encode())
        yield Record(id=f"sample-{row}", origin=f"data.jsonl:{row + 1}", source="data", messages=())

    def store(self, source: int) -> Any:
        return MediaStore("/")


class Encoder:
    """Ids that say which row they are of."""

    def __init__(self, wrong: dict[int, str] | None = None) -> None:
        self.wrong = dict(wrong or {})

    def encode(self, record: Record, store: Any, *, row: int, expected: Any, start: int, tokens: int) -> EncodedSample:
        wrong = self.wrong.get(row)
        if wrong == BROKEN:
            raise RecordError("decode", "image cannot be decoded", f"{row}.png")
        if wrong == GONE:
            raise DataError(f"sample {record.id}", got="another line", expected="what was measured")
        if wrong == KILLER:
            os.kill(os.getpid(), 9)
        if wrong in (FLAKY, DEAD):
            if wrong == FLAKY:
                del self.wrong[row]  # once
            raise OSError(5, "Input/output error")
        assert expected is not None
        length = Rows().row(row).tokens
        ids = torch.arange(length) + 7 * row
        piece = ids[start : start + tokens if tokens >= 0 else None] % 90
        return synthetic_sample(record.id, piece, supervised=len(piece) - 1, row=row)


def plan_of(*epochs: int, **config: Any) -> PackPlan:
    """A plan with this many packs in each epoch, of one row each."""
    return made_plan([{"tokens": [2 + pack % 5 for pack in range(packs)]} for packs in epochs], **config)


def source_of(plan: PackPlan, log: Path | None = None, wrong: dict[int, str] | None = None) -> PackSource:
    return PackSource(plan, Rows(), Reader(log), Encoder(wrong))


COLLATOR = PackCollator(BatchContract(model_type="llama"), pad_id=0)
PADDED = PaddedCollator(BatchContract(model_type="llama"), pad_id=0)


def loader_of(
    plan: PackPlan,
    packs_per_step: int = 4,
    *,
    log: Path | None = None,
    wrong: dict[int, str] | None = None,
    seed: int = 3,
    **options: Any,
) -> PackLoader:
    schedule = Schedule(plan, packs_per_step=packs_per_step, seed=seed)
    collator = COLLATOR if options.get("rows_per_batch", 1) == 1 else PADDED
    return PackLoader(source_of(plan, log, wrong), schedule, collator, **options)


def reads(log: Path) -> list[int]:
    """The rows that were read, in no particular order where workers read."""
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def content(batch: Any) -> tuple[Any, ...]:
    """What a batch holds, as values that can be compared."""
    return batch.info.keys, tuple((name, value.tolist()) for name, value in batch.items() if hasattr(value, "tolist"))
