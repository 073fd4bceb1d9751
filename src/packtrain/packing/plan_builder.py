"""Builds pack plans: a cost table and a config in, packs for every epoch out, kept in memory or written to a folder."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from packtrain.core.errors import ArtifactError, DataError
from packtrain.measuring.table import CostTable
from packtrain.packing.blocked import Blocked
from packtrain.packing.draw import Draw, draw_of_table, is_mixed
from packtrain.packing.overlong import Dropped
from packtrain.packing.own import packer_source
from packtrain.packing.pack_plan import CUT_SCHEMA, ENTRY_SCHEMA, PACK_SCHEMA, PACKER_VERSION, PackPlan, plan_inputs
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.plan_summary import BlockedSummary, EpochCounts, LedgerCounts, PlanSummary
from packtrain.packing.resources import EXTRAS, RESOURCES
from packtrain.packing.sinks import FolderSink, MemorySink, Sink
from packtrain.packing.tail import Tail, kept_packs
from packtrain.packing.windows import TableRows, WindowPacks, pack_windows, rows_that_fit
from packtrain.predicting.flops import WorkModel

STAGE = "pack"
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


def build_plan(
    table: CostTable,
    config: PackingConfig,
    work: WorkModel,
    out: Path | None = None,
    progress: Callable[[PackProgress], None] = lambda _: None,
) -> PackPlan:
    """Pack a table. With `out` the plan appears there whole or not at all, and is memory-mapped."""
    builder = _Builder(table, config, work)
    sink: Sink = MemorySink() if out is None else FolderSink(out)
    with sink:
        files = config.epochs if config.repack_each_epoch else 1
        for number in range(files):
            builder.epoch(number, sink, progress)
        builder.check_anything()
        summary = builder.summary(files)
        sink.finish(summary)
    return PackPlan(summary, sink.epochs()) if out is None else PackPlan.load(out, checked=False)


@dataclass(slots=True)
class _Builder:
    table: CostTable
    config: PackingConfig
    work: WorkModel
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

    def epoch(self, number: int, sink: Sink, progress: Callable[[PackProgress], None]) -> None:
        """Pack one epoch and hand it to the sink."""
        config = self.config
        counts = self.draw.counts(config.seed, number) if self.draw is not None else None
        cut = config.cuts
        totals = _Totals(config)
        tail = Tail(config)
        sink.begin(number, CUT_SCHEMA if cut else ENTRY_SCHEMA, PACK_SCHEMA)
        unfit: list[Dropped] = []
        read = 0
        for window in kept_packs(pack_windows(self.rows, config, number, counts), tail, number):
            sink.write(_entries(window, cut), _packs(window, totals.entries, totals.windows))
            totals.add(window)
            if number == 0:
                self.blocked.add(window.entries.samples, window.loads, config.seed + totals.windows)
                unfit += window.dropped
            self._ledger(sink, list(window.left_out), number)
            if len(unfit) >= _LINES:
                self._ledger(sink, unfit, None)
                unfit = []
            read += window.rows
            progress(PackProgress(number, config.epochs, read, len(self.rows)))
        sink.end()
        self._ledger(sink, unfit, None)
        self._ledger(sink, [Dropped(row, TAIL, "") for row in tail.rows], number)
        self._ledger(sink, [Dropped(row, BEYOND, "") for row in tail.beyond], number)
        self.epochs.append(totals.counts(tail, 0 if counts is None else int((counts == 0).sum())))

    def _ledger(self, sink: Sink, dropped: list[Dropped], epoch: int | None) -> None:
        """One line for each row or piece that no epoch can pack, or for each entry that one epoch leaves out."""
        if not dropped:
            return
        dropped = sorted(dropped, key=lambda one: one.row)
        named = self.table.rows(("id", "origin"), np.array([one.row for one in dropped], np.int64))
        self.reasons.update(f"{STAGE}: {one.reason}" for one in dropped)
        for one, name, origin in zip(dropped, named["id"], named["origin"], strict=True):
            line = {"id": name, "origin": origin, "stage": STAGE, **asdict(one), "epoch": epoch}
            sink.ledger(json.dumps(line, ensure_ascii=False))

    def check_anything(self) -> None:
        """A plan without packs trains nothing."""
        first = self.epochs[0]
        if first.packs:
            return
        limits = ", ".join(f"{name} {limit:,}" for name, limit in self.config.capacities().items())
        tokens = self.table.column("tokens")
        raise DataError(
            f"{self.table.folder}",
            got=f"no packs: {first.dropped:,} of {first.drawn:,} entries do not fit ({limits}); "
            f"they have {tokens.min():,} to {tokens.max():,} tokens",
            expected="at least one sample within the limits"
            + (f", and packs for a full step of {self.config.packs_per_step}" if self.config.packing_drop_last else ""),
            fix="raise the limits" + (", or turn packing_drop_last off" if self.config.packing_drop_last else ""),
        )

    def summary(self, files: int) -> PlanSummary:
        """plan.json."""
        epochs = self.epochs if self.config.repack_each_epoch else self.epochs * self.config.epochs
        for number, counts in enumerate(epochs):
            if counts.drawn != counts.entries + counts.ledger:
                raise ArtifactError(
                    f"ledger of epoch {number}",
                    got=f"{counts.entries} packed + {counts.ledger} in the ledger",
                    expected=f"{counts.drawn} entries",
                )
        blocked = self.blocked
        return PlanSummary(
            config=self.config,
            inputs=plan_inputs(self.table),
            packer_version=PACKER_VERSION,
            packer_source=packer_source(self.config.packing_strategy),
            cost_table=str(self.table.folder.resolve()),
            work=self.work,
            files=files,
            epochs=tuple(epochs),
            blocked=BlockedSummary(offers=blocked.offers, refused=blocked.refused, limits=blocked.counts()),
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
    drawn: int = 0
    dropped: int = 0
    unlabelled: int = 0  # of them
    cut_rows: int = 0
    tokens_lost: int = 0
    supervised_lost: int = 0
    tokens_drawn: int = 0
    windows: int = 0
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*RESOURCES, "supervised_tokens"), 0))
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*RESOURCES, *EXTRAS), 0))

    def add(self, window: WindowPacks) -> None:
        """Count one window."""
        self.windows += 1
        self.packs += len(window.offsets) - 1
        self.entries += len(window.entries)
        self.drawn += window.drawn
        self.dropped += window.dropped_entries
        self.unlabelled += window.unlabelled
        self.cut_rows += window.cut_rows
        self.tokens_lost += window.tokens_lost
        self.supervised_lost += window.supervised_lost
        self.tokens_drawn += window.tokens_drawn
        for name in self.sums:
            self.sums[name] += int(window.loads[name].sum())
        for name in self.most:
            self.most[name] = max(self.most[name], int(window.loads[name].max(initial=0)))

    def counts(self, tail: Tail, waiting: int) -> EpochCounts:
        """For plan.json; `waiting` rows are not used in this epoch, because their source is used in part."""
        capacities = self.config.capacities()
        bound = max(-(-self.sums[name] // limit) for name, limit in capacities.items())
        return EpochCounts(
            packs=self.packs,
            entries=self.entries,
            drawn=self.drawn,
            dropped=self.dropped,
            unlabelled=self.unlabelled,
            tail=len(tail),
            waiting=waiting,
            cut_rows=self.cut_rows,
            tokens_lost=self.tokens_lost,
            supervised_lost=self.supervised_lost,
            tokens_drawn=self.tokens_drawn,
            windows=self.windows,
            fill=self.sums["tokens"] / (self.packs * self.config.packing_length) if self.packs else 0.0,
            bound=bound,
            of_bound=bound / self.packs if self.packs else 0.0,
            totals=self.sums,
            most=self.most,
        )


def _entries(window: WindowPacks, cut: bool) -> pa.RecordBatch:
    entries = window.entries
    if not cut:
        return pa.record_batch([pa.array(entries.rows)], schema=ENTRY_SCHEMA)
    columns = [entries.rows, entries.starts, entries.samples["tokens"], entries.firsts]
    return pa.record_batch([pa.array(column) for column in columns], schema=CUT_SCHEMA)


def _packs(window: WindowPacks, base: int, number: int) -> pa.RecordBatch:
    packs = len(window.offsets) - 1
    columns = [window.offsets[1:] + base, np.full(packs, number, np.int32)]
    columns += [window.loads[name] for name in (*RESOURCES, *EXTRAS)]
    return pa.record_batch([pa.array(column) for column in columns], schema=PACK_SCHEMA)
