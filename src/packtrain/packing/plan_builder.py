"""Builds pack plans: a cost table and a config in, packs for every epoch out, kept in memory or written to a folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from packtrain.core.artifacts import whole_folder, write_json
from packtrain.core.checksums import file_sums
from packtrain.core.errors import ArtifactError, DataError, PathError
from packtrain.core.seeds import stream
from packtrain.measuring.table import CostTable
from packtrain.packing.arrays import packer_source
from packtrain.packing.cutting import Dropped
from packtrain.packing.pack_plan import (
    CUT_SCHEMA,
    ENTRY_SCHEMA,
    KIND,
    LEDGER,
    PACK_SCHEMA,
    PACKER_VERSION,
    PLAN,
    VERSION,
    BlockedCount,
    BlockedSummary,
    EpochCounts,
    EpochPacks,
    LedgerCounts,
    PackPlan,
    PlanSummary,
    plan_inputs,
)
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import EXTRAS, RESOURCES, Samples
from packtrain.packing.source_repeats import Draw, draw_of_table, is_mixed
from packtrain.packing.windows import (
    TableRows,
    Tail,
    WindowPacks,
    first_packs,
    pack_windows,
    rows_that_fit,
    without_tail,
)
from packtrain.predicting.flops import WorkModel

STAGE = "pack"
PROBES = 64  # samples offered to each pack
_PACKS_AT_ONCE = 1 << 16
_LINES = 50_000  # of the ledger, whose ids and origins are read together
TAIL = "not enough packs for a full step"
BEYOND = "in a pack after the first max_packs"


@dataclass(frozen=True, slots=True)
class PackProgress:
    """How far packing is."""

    epoch: int
    epochs: int
    rows: int  # read in this epoch
    total: int
    padded: bool = False  # a sample each, for padded batches


def build_plan(
    table: CostTable,
    config: PackingConfig,
    work: WorkModel,
    out: Path | None = None,
    progress: Callable[[PackProgress], None] = lambda _: None,
) -> PackPlan:
    """Pack a table. With `out` the plan appears there whole or not at all, and is memory-mapped."""
    builder = _Builder(table, config, work, progress)
    if out is not None:
        _write_plan(builder, out.resolve())  # a link leads to its folder, and "." gets a name
        return PackPlan.load(out, checked=False)
    files = []
    for number in range(builder.files):
        entries, packs = zip(*builder.epoch(number, None), strict=True)
        tables = pa.Table.from_batches(entries, builder.entry_schema), pa.Table.from_batches(packs, PACK_SCHEMA)
        files.append(EpochPacks(*tables))
    return PackPlan(builder.summary(), files)


def _write_plan(builder: _Builder, out: Path) -> None:
    """Write beside the folder and move it there at the end. An existing one is never touched."""
    _refuse_existing(out)
    try:
        with whole_folder(out) as folder:
            with _closing((folder / LEDGER).open("w", encoding="utf-8", errors="backslashreplace")) as ledger:
                for number in range(builder.files):
                    with (
                        _arrow_file(folder / f"entries-{number:04d}.arrow", builder.entry_schema) as entries_file,
                        _arrow_file(folder / f"packs-{number:04d}.arrow", PACK_SCHEMA) as packs_file,
                    ):
                        for entries, packs in builder.epoch(number, ledger):
                            entries_file.write_batch(entries)
                            packs_file.write_batch(packs)
                summary = builder.summary()
            sums = file_sums(folder, (path.name for path in folder.iterdir()))
            write_json(folder / PLAN, KIND, VERSION, asdict(replace(summary, sums=sums)), checked=True)
    except OSError:  # perhaps not empty any more: another process was faster
        _refuse_existing(out)
        raise


def _refuse_existing(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PathError(
            str(out),
            got="the folder is not empty",
            expected="a new or empty folder: plans are never overwritten",
            fix="use another folder, or delete this one",
        )


@contextmanager
def _arrow_file(path: Path, schema: pa.Schema) -> Iterator[Any]:
    with _closing(pa.OSFile(str(path), "wb")) as file, _closing(pa.ipc.new_file(file, schema)) as writer:
        yield writer


@contextmanager
def _closing(file: Any) -> Iterator[Any]:
    """Close a file; after an error without another one: closing writes, and fails again where the disk is full."""
    try:
        yield file
    except BaseException:
        with suppress(OSError, pa.ArrowException):
            file.close()
        raise
    file.close()


@dataclass(slots=True)
class _Builder:
    table: CostTable
    config: PackingConfig
    work: WorkModel
    progress: Callable[[PackProgress], None]
    draw: Draw | None = field(init=False)  # None: every row once
    rows: TableRows = field(init=False)
    blocked: Blocked = field(init=False)
    reasons: Counter[str] = field(default_factory=Counter)
    epochs: list[EpochCounts] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows = TableRows(self.table)
        mixed = is_mixed(self.table)
        self.draw = draw_of_table(self.table, rows_that_fit(self.rows, self.config)) if mixed else None
        self.blocked = Blocked(self.config.capacities())

    @property
    def files(self) -> int:
        """Epochs that are packed; the others repeat the first."""
        return self.config.epochs if self.config.repack_each_epoch else 1

    @property
    def entry_schema(self) -> pa.Schema:
        """Columns of an entry."""
        return CUT_SCHEMA if self.config.cuts else ENTRY_SCHEMA

    def epoch(self, number: int, ledger: IO[str] | None) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Entries and packs of one epoch, window by window; samples that are in no pack go to the ledger."""
        config = self.config
        counts = self.draw.counts(config.seed, number) if self.draw is not None else None
        totals, tail = _Totals(config), Tail(config)
        unfit: list[Dropped] = []
        read = 0
        windows = pack_windows(self.rows, config, number, counts)
        for window in without_tail(first_packs(windows, tail, number), tail):
            yield _entries(window, config.cuts), _packs(window, totals.entries, totals.windows)
            totals.add(window)
            if number == 0:
                self.blocked.add(window.entries.samples, window.loads, config.seed + totals.windows)
                unfit += window.dropped
            self._ledger(ledger, window.left_out, number)
            if len(unfit) >= _LINES:
                self._ledger(ledger, unfit, None)
                unfit = []
            read += window.rows
            self.progress(PackProgress(number, config.epochs, read, len(self.rows), config.packing_strategy == "none"))
        self._ledger(ledger, unfit, None)
        self._ledger(ledger, [Dropped(row, TAIL, "") for row in tail.rows], number)
        self._ledger(ledger, [Dropped(row, BEYOND, "") for row in tail.beyond], number)
        self.epochs.append(totals.counts(tail, 0 if counts is None else int((counts == 0).sum())))

    def _ledger(self, ledger: IO[str] | None, dropped: Sequence[Dropped], epoch: int | None) -> None:
        """One line for each row or piece that no epoch can pack, or for each entry that one epoch leaves out."""
        self.reasons.update(f"{STAGE}: {one.reason}" for one in dropped)
        if not dropped or ledger is None:
            return
        dropped = sorted(dropped, key=lambda one: one.row)
        named = self.table.rows(("id", "origin"), np.array([one.row for one in dropped], np.int64))
        for one, name, origin in zip(dropped, named["id"], named["origin"], strict=True):
            line = {"id": name, "origin": origin, "stage": STAGE, **asdict(one), "epoch": epoch}
            ledger.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _refuse_nothing(self) -> None:
        """A plan without packs trains nothing."""
        first = self.epochs[0]
        if first.packs:
            return
        limits = ", ".join(f"{name} {limit:,}" for name, limit in self.config.capacities().items())
        tokens = self.table.column("tokens")
        if tokens.min() > (length := self.config.packing_length):
            raise DataError(
                "packing_length",
                got=f"no packs: {first.dropped:,} of {first.drawn:,} entries do not fit into {length:,} tokens",
                expected=f"at least {tokens.min()}, the tokens of the shortest sample",
                fix=f"use --packing-length {tokens.max()} or more, which every sample fits",
            )
        raise DataError(
            f"{self.table.folder}",
            got=f"no packs: {first.dropped:,} of {first.drawn:,} entries do not fit ({limits}); "
            f"they have {tokens.min():,} to {tokens.max():,} tokens",
            expected="at least one sample within the limits"
            + (f", and packs for a full step of {self.config.packs_per_step}" if self.config.packing_drop_last else ""),
            fix="raise the limits" + (", or turn packing_drop_last off" if self.config.packing_drop_last else ""),
        )

    def summary(self) -> PlanSummary:
        """plan.json, once all epochs are packed."""
        self._refuse_nothing()
        epochs = self.epochs if self.config.repack_each_epoch else self.epochs * self.config.epochs
        for number, counts in enumerate(epochs):
            if counts.drawn != counts.entries + counts.ledger:
                raise ArtifactError(
                    f"ledger of epoch {number}",
                    got=f"{counts.entries} packed + {counts.ledger} in the ledger",
                    expected=f"{counts.drawn} entries",
                )
        return PlanSummary(
            config=self.config,
            inputs=plan_inputs(self.table),
            packer_version=PACKER_VERSION,
            packer_source=packer_source(self.config.packing_strategy),
            cost_table=str(self.table.folder.resolve()),
            work=self.work,
            files=self.files,
            epochs=tuple(epochs),
            blocked=self.blocked.summary(),
            ledger=LedgerCounts(
                measured=self.table.summary.counts.ledger,
                reasons={reason: number for reason, number in sorted(self.reasons.items()) if number},
            ),
        )


@dataclass(slots=True)
class _Totals:
    """Counts of one epoch."""

    config: PackingConfig
    packs: int = 0
    entries: int = 0
    windows: int = 0
    counted: Counter[str] = field(default_factory=Counter)  # of WindowCounts
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*RESOURCES, "supervised_tokens"), 0))
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*RESOURCES, *EXTRAS), 0))

    def add(self, window: WindowPacks) -> None:
        """Count one window."""
        self.windows += 1
        self.packs += window.num_packs
        self.entries += len(window.entries)
        self.counted.update(asdict(window.counts))
        for name in self.sums:
            self.sums[name] += int(window.loads[name].sum())
        for name in self.most:
            self.most[name] = max(self.most[name], int(window.loads[name].max(initial=0)))

    def counts(self, tail: Tail, waiting: int) -> EpochCounts:
        """For plan.json; `waiting` rows are not used in this epoch, because their source is used in part."""
        bound = max(-(-self.sums[name] // limit) for name, limit in self.config.capacities().items())
        return EpochCounts(
            packs=self.packs,
            entries=self.entries,
            tail=len(tail),
            beyond=len(tail.beyond),
            waiting=waiting,
            windows=self.windows,
            fill=self.sums["tokens"] / (self.packs * self.config.packing_length) if self.packs else 0.0,
            bound=bound,
            of_bound=bound / self.packs if self.packs else 0.0,
            totals=self.sums,
            most=self.most,
            **self.counted,
        )


class Blocked:
    """Which limit stopped how many placements: typical samples, drawn by the seed, offered to every finished pack."""

    def __init__(self, capacities: Mapping[str, int]) -> None:
        self._capacities = capacities
        self._offers = self._refused = 0
        self._counts = np.zeros((len(capacities), 3), np.int64)  # by limit: the numbers of a BlockedCount

    def add(self, samples: Samples, loads: Mapping[str, np.ndarray], seed: int) -> None:
        """Offer samples of a window to its packs."""
        names, limits = tuple(self._capacities), np.array([*self._capacities.values()])[:, None]
        packs = len(loads["tokens"])
        if not packs:
            return
        chosen = stream(seed, "offers").integers(len(samples), size=min(PROBES, len(samples)))
        offered = np.stack([samples[name][chosen] for name in names])
        for start in range(0, packs, _PACKS_AT_ONCE):
            left = limits - np.stack([loads[name][start : start + _PACKS_AT_ONCE] for name in names])
            stops = offered[:, None, :] > left[:, :, None]
            reasons = stops.sum(axis=0)
            self._offers += reasons.size
            self._refused += int((reasons > 0).sum())
            fullest = np.bincount((1 - left / limits).argmax(axis=0), minlength=len(names))
            alone = stops & (reasons == 1)
            self._counts += np.stack([stops.sum(axis=(1, 2)), alone.sum(axis=(1, 2)), fullest], axis=1)

    def summary(self) -> BlockedSummary:
        """Counts over all packs."""
        counts = zip(self._capacities, self._counts.tolist(), strict=True)
        limits = {
            name: BlockedCount(stopped=stopped, alone=alone, fullest=most) for name, (stopped, alone, most) in counts
        }
        return BlockedSummary(offers=self._offers, refused=self._refused, limits=limits)


def _entries(window: WindowPacks, cut: bool) -> pa.RecordBatch:
    entries = window.entries
    if not cut:
        return pa.record_batch([pa.array(entries.rows)], schema=ENTRY_SCHEMA)
    columns = [entries.rows, entries.starts, entries.samples["tokens"], entries.firsts]
    return pa.record_batch([pa.array(column) for column in columns], schema=CUT_SCHEMA)


def _packs(window: WindowPacks, base: int, number: int) -> pa.RecordBatch:
    columns = [window.offsets[1:] + base, np.full(window.num_packs, number, np.int32)]
    columns += [window.loads[name] for name in (*RESOURCES, *EXTRAS)]
    return pa.record_batch([pa.array(column) for column in columns], schema=PACK_SCHEMA)
