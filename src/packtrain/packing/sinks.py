"""Where a plan goes while it is made: into memory, or into a folder that appears when it is whole."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa

from packtrain.core.artifacts import write_json
from packtrain.core.checksums import sums_of
from packtrain.core.errors import PathError
from packtrain.core.folders import whole_folder
from packtrain.packing.pack_plan import KIND, LEDGER, PLAN, VERSION, EpochPacks
from packtrain.packing.plan_summary import PlanSummary


class Sink(Protocol):
    """Takes the epochs of a plan, window by window."""

    def __enter__(self) -> Sink: ...

    def __exit__(self, *failure: object) -> None: ...

    def begin(self, number: int, entries: pa.Schema, packs: pa.Schema) -> None:
        """The next epoch starts."""
        ...

    def write(self, entries: pa.RecordBatch, packs: pa.RecordBatch) -> None:
        """One window."""
        ...

    def end(self) -> None:
        """The epoch is complete."""
        ...

    def ledger(self, line: str) -> None:
        """One sample that is in no pack."""
        ...

    def finish(self, summary: PlanSummary) -> None:
        """Everything is there."""
        ...

    def epochs(self) -> list[EpochPacks]:
        """What was taken, where it is kept in memory."""
        ...


class MemorySink:
    """Keeps a plan in memory."""

    def __init__(self) -> None:
        self._epochs: list[EpochPacks] = []
        self._schemas: tuple[pa.Schema, pa.Schema] | None = None
        self._batches: tuple[list[pa.RecordBatch], list[pa.RecordBatch]] = ([], [])
        self.lines: list[str] = []

    def __enter__(self) -> MemorySink:
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def begin(self, number: int, entries: pa.Schema, packs: pa.Schema) -> None:
        self._schemas, self._batches = (entries, packs), ([], [])

    def write(self, entries: pa.RecordBatch, packs: pa.RecordBatch) -> None:
        self._batches[0].append(entries)
        self._batches[1].append(packs)

    def end(self) -> None:
        assert self._schemas is not None, "begin comes first"
        entries, packs = (
            pa.Table.from_batches(batches, schema) for batches, schema in zip(self._batches, self._schemas, strict=True)
        )
        self._epochs.append(EpochPacks(entries, packs))

    def ledger(self, line: str) -> None:
        self.lines.append(line)

    def finish(self, summary: PlanSummary) -> None:
        pass

    def epochs(self) -> list[EpochPacks]:
        return self._epochs


class FolderSink:
    """Writes a plan beside its place and moves it there at the end. An existing folder is never touched."""

    def __init__(self, out: Path) -> None:
        self._out = out.resolve()  # a link leads to its folder, and "." gets a name
        self._place = whole_folder(self._out)
        self._open: list[Any] = []
        self._ledger: IO[str]

    def __enter__(self) -> FolderSink:
        self._refuse_existing()
        self._work = self._place.__enter__()
        self._ledger = (self._work / LEDGER).open("w", encoding="utf-8", errors="backslashreplace")
        return self

    def __exit__(self, *failure: Any) -> None:
        for file in (*self._open, self._ledger):
            with suppress(OSError, pa.ArrowException):  # closing writes, and fails again where the disk is full
                file.close()
        try:
            self._place.__exit__(*failure)
        except OSError:  # perhaps not empty any more: another process was faster
            self._refuse_existing()
            raise

    def begin(self, number: int, entries: pa.Schema, packs: pa.Schema) -> None:
        for name, schema in (("entries", entries), ("packs", packs)):
            file = pa.OSFile(str(self._work / f"{name}-{number:04d}.arrow"), "wb")
            self._open += [pa.ipc.new_file(file, schema), file]

    def write(self, entries: pa.RecordBatch, packs: pa.RecordBatch) -> None:
        self._open[0].write_batch(entries)
        self._open[2].write_batch(packs)

    def end(self) -> None:
        for file in self._open:
            file.close()
        self._open = []

    def ledger(self, line: str) -> None:
        self._ledger.write(line + "\n")

    def finish(self, summary: PlanSummary) -> None:
        self._ledger.close()
        sums = sums_of(self._work, (path.name for path in self._work.iterdir()))
        write_json(self._work / PLAN, KIND, VERSION, replace(summary, sums=sums).to_json(), checked=True)

    def epochs(self) -> list[EpochPacks]:
        return []

    def _refuse_existing(self) -> None:
        if self._out.exists() and (not self._out.is_dir() or any(self._out.iterdir())):
            raise PathError(
                str(self._out),
                got="the folder is not empty",
                expected="a new or empty folder: plans are never overwritten",
                fix="use another folder, or delete this one",
            )
