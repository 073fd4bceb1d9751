"""The pack plan: which samples share a pack, in each epoch. A folder that is written once and memory-mapped after.

plan.json            config, fingerprints of the inputs, counts, fill, what each limit stopped, work coefficients,
                     checksums of the other files and of itself
entries-0000.arrow   one row for each entry, pack by pack: row of the cost table (and the piece of it, where cut)
packs-0000.arrow     one row for each pack: where it ends, its window, what it holds of every resource
ledger.jsonl         samples that are in no pack, with the reason
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from packtrain.core.artifacts import read_json, whole_content, write_json
from packtrain.core.checksums import checks_here, require_sums
from packtrain.core.dataclass_json import from_json
from packtrain.core.errors import ArtifactError, PathError, in_one_line
from packtrain.core.fingerprint import differences, digest
from packtrain.core.numbers import counted
from packtrain.measuring.columns import identity_of
from packtrain.measuring.table import SUMMARY as TABLE
from packtrain.measuring.table import CostTable
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import EXTRAS, RESOURCES
from packtrain.predicting.flops import WorkModel

KIND, VERSION = "pack-plan", 6
PACKER_VERSION = 3  # raised when the same config and seed give other packs than before
PLAN, LEDGER = "plan.json", "ledger.jsonl"
_AGAIN = "pack again: packtrain pack COSTS --out NEW; for a cached plan: packtrain cache clear --kind plans"
ENTRY_SCHEMA = pa.schema([("row", pa.int64())])
CUT_SCHEMA = pa.schema([("row", pa.int64()), ("start", pa.int64()), ("tokens", pa.int64()), ("first", pa.bool_())])
PACK_SCHEMA = pa.schema(
    [("end", pa.int64()), ("window", pa.int32())] + [(name, pa.int64()) for name in (*RESOURCES, *EXTRAS)]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochCounts:
    """What one epoch holds; drawn = entries + dropped + tail."""

    packs: int
    entries: int  # samples, or pieces of samples, in packs
    drawn: int = 0
    dropped: int = 0  # no pack can hold them
    unlabelled: int = 0  # of these, pieces without loss
    tail: int = 0  # in packs that are left out
    beyond: int = 0  # of these, in packs after the first `max_packs`
    waiting: int = 0  # rows that this epoch does not use, because their source is used in part
    cut_rows: int = 0
    tokens_lost: int = 0
    supervised_lost: int = 0
    tokens_drawn: int = 0
    windows: int = 0
    fill: float = 0.0
    bound: int = 0  # no packing has fewer packs
    of_bound: float = 0.0
    totals: Mapping[str, int] = field(default_factory=dict)  # of all packs, by resource
    most: Mapping[str, int] = field(default_factory=dict)  # of any pack, by resource

    @property
    def ledger(self) -> int:
        """Entries in the ledger."""
        return self.dropped + self.tail


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedCount:
    """How often one limit kept a further sample out of a finished pack."""

    stopped: int  # offers that this limit refused
    alone: int  # of these, offers that no other limit refused
    fullest: int  # packs of which this limit is used up most


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedSummary:
    """Which limits kept typical samples out of the finished packs of the first epoch."""

    offers: int = 0
    refused: int = 0
    limits: Mapping[str, BlockedCount] = field(default_factory=dict)  # by resource


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCounts:
    """Samples in no pack."""

    measured: int = 0  # that measuring left out
    reasons: Mapping[str, int] = field(default_factory=dict)  # "pack: reason" -> ledger lines of the plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """The content of plan.json."""

    config: PackingConfig
    inputs: Mapping[str, Any]  # JSON: what the cost table is known by, to be compared and hashed
    packer_version: int
    packer_source: str | None = None  # a hash of the user's own packer
    cost_table: str  # folder
    work: WorkModel
    files: int
    epochs: tuple[EpochCounts, ...]
    blocked: BlockedSummary = field(default_factory=BlockedSummary)
    ledger: LedgerCounts = field(default_factory=LedgerCounts)
    sums: Mapping[str, Mapping[str, int | str]] = field(default_factory=dict)  # size and checksum of each file


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pack:
    """One pack: rows of the cost table, and the span of tokens of each where they are cut (-1: to the end)."""

    rows: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray
    firsts: np.ndarray  # is it the first piece of its row that is packed: with it the sample is counted


class EpochPacks:
    """The packs of one epoch."""

    def __init__(self, entries: pa.Table, packs: pa.Table) -> None:
        self._entries = entries
        self._packs = packs

    @property
    def num_packs(self) -> int:
        """How many packs the epoch has."""
        return int(self._packs.num_rows)

    @property
    def num_entries(self) -> int:
        """How many samples, or pieces of samples, are in its packs."""
        return int(self._entries.num_rows)

    @cached_property
    def num_samples(self) -> int:
        """How many samples are in its packs: one that is split counts once, with its first piece."""
        return int(self._entries["first"].to_numpy().sum()) if self.cut else self.num_entries

    @cached_property
    def ends(self) -> np.ndarray:
        """The entry after the last of each pack."""
        return self.load("end")

    @cached_property
    def offsets(self) -> np.ndarray:
        """Pack i holds entries `offsets[i]` to `offsets[i + 1]`."""
        return np.concatenate([np.zeros(1, np.int64), self.ends])

    def load(self, name: str) -> np.ndarray:
        """What every pack holds of one resource."""
        return np.asarray(self._packs[name].to_numpy())

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows of the cost table, pack by pack."""
        return np.asarray(self._entries["row"].to_numpy())

    @property
    def cut(self) -> bool:
        """Are some rows truncated or split?"""
        return "start" in self._entries.column_names

    def pack(self, number: int) -> Pack:
        """One pack; only its own entries are read."""
        if not 0 <= number < self.num_packs:
            raise IndexError(f"pack {number} of {self.num_packs}")
        start = int(self.ends[number - 1]) if number else 0
        part = self._entries.slice(start, int(self.ends[number]) - start)
        rows = np.asarray(part["row"].to_numpy())
        if not self.cut:
            firsts = np.ones(len(rows), bool)
            return Pack(rows=rows, starts=np.zeros_like(rows), tokens=np.full_like(rows, -1), firsts=firsts)
        starts, tokens, firsts = (part[name].to_numpy() for name in ("start", "tokens", "first"))
        return Pack(rows=rows, starts=starts, tokens=tokens, firsts=firsts)


class PackPlan:
    """Packs for every epoch of a run, and everything that was decided about them."""

    def __init__(self, summary: PlanSummary, files: list[EpochPacks], folder: Path | None = None) -> None:
        self.summary = summary
        self.folder = folder
        self._files = files

    @classmethod
    def load(cls, path: str | Path, *, checked: bool | None = None) -> PackPlan:
        """Open a plan folder. Its packs are memory-mapped, so every process of a machine shares them.

        By default the first process of a node verifies their checksums, for the others.
        """
        folder = Path(path)
        if folder.name == PLAN:
            folder = folder.parent
        if not (folder / PLAN).is_file():
            raise PathError(
                str(folder),
                got=f"no {PLAN}" if folder.is_dir() else "a file" if folder.exists() else "no such folder",
                expected="a folder written by packtrain pack",
                fix="pack first: packtrain pack COSTS --packing-length N --out PLAN",
            )
        body = read_json(folder / PLAN, KIND, VERSION, checked=True, fix=_AGAIN)
        with whole_content(folder / PLAN, fix=_AGAIN):
            summary = from_json(PlanSummary, body, ignore=("kind", "version"))
        if checks_here() if checked is None else checked:
            names = (f"{kind}-{n:04d}.arrow" for n in range(summary.files) for kind in ("entries", "packs"))
            require_sums(folder, {name: summary.sums.get(name) for name in (*names, LEDGER)}, fix=_AGAIN)
        files = [
            EpochPacks(
                _mapped(folder / f"entries-{n:04d}.arrow", ENTRY_SCHEMA, CUT_SCHEMA),
                _mapped(folder / f"packs-{n:04d}.arrow", PACK_SCHEMA),
            )
            for n in range(summary.files)
        ]
        for number, (packs, counts) in enumerate(zip(files, summary.epochs, strict=False)):
            if (packs.num_packs, packs.num_entries) != (counts.packs, counts.entries):
                raise ArtifactError(
                    f"{folder}: file {number}",
                    got=f"{packs.num_packs} packs, {packs.num_entries} entries",
                    expected=f"{counts.packs} packs, {counts.entries} entries",
                    fix=_AGAIN,
                )
        return cls(summary, files, folder)

    def __repr__(self) -> str:
        where = f"{str(self.folder)!r}: " if self.folder is not None else ""
        config = self.config
        packs = f"{counted(self.num_packs, 'pack')} of {config.packing_length:,} tokens ({config.packing_strategy})"
        return f"PackPlan({where}{packs}, epochs: {self.num_epochs})"

    @property
    def config(self) -> PackingConfig:
        """How it was packed."""
        return self.summary.config

    @property
    def work(self) -> WorkModel:
        """The coefficients that predict a pack's work."""
        return self.summary.work

    @property
    def num_epochs(self) -> int:
        """For how many epochs it has packs."""
        return len(self.summary.epochs)

    def epoch(self, number: int) -> EpochPacks:
        """The packs of one epoch."""
        if not 0 <= number < self.num_epochs:
            raise IndexError(f"epoch {number} of {self.num_epochs}")
        return self._files[number if len(self._files) > 1 else 0]

    @property
    def num_packs(self) -> int:
        """Packs of all epochs."""
        return sum(counts.packs for counts in self.summary.epochs)

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the packs."""
        summary, own = self.summary, self.summary.packer_source
        known = {
            "config": summary.config.given(),
            "inputs": summary.inputs,
            "packer_version": summary.packer_version,
        }
        return digest({**known, "packer_source": own} if own is not None else known)

    def predicted_work(self, epoch: int) -> np.ndarray:
        """The predicted work of every pack of one epoch."""
        packs = self.epoch(epoch)
        work = self.work.of(
            tokens=packs.load("tokens"),
            squared_tokens=packs.load("attention"),
            patches=packs.load("patches"),
            squared_patches=packs.load("squared_patches"),
            supervised_tokens=packs.load("supervised_tokens"),
        )
        return np.asarray(work, np.float64)

    def at_table(self, table: CostTable) -> PackPlan:
        """This plan, of a table with the same content that may lie elsewhere; noted where the other is gone."""
        before, here = Path(self.summary.cost_table), str(table.folder.resolve())
        if str(before) == here:
            return self
        summary = replace(self.summary, cost_table=here)
        if self.folder is not None and not (before / TABLE).is_file():
            with suppress(OSError):  # a plan that may only be read
                write_json(self.folder / PLAN, KIND, VERSION, asdict(summary), checked=True)
        return PackPlan(summary, self._files, self.folder)

    def check_inputs(self, table: CostTable) -> None:
        """Refuse a cost table other than the one this plan was made from, naming what differs."""
        changed = differences(self.summary.inputs, plan_inputs(table))
        if changed:
            raise ArtifactError(
                f"plan {self.folder or ''}".strip(),
                got="made from other inputs: " + "; ".join(changed[:5]),
                expected=f"the cost table {table.folder}",
                fix="pack this table again",
            )


def plan_inputs(table: CostTable) -> dict[str, object]:
    """What identifies a cost table wherever it and its data lie, and the names under which a difference is reported."""
    inputs = identity_of(table.summary)
    shown = {name: value if len(str(value)) < 2000 else digest(value) for name, value in inputs.items()}
    return {
        "measured": shown,
        "rows": len(table),
        "mixture": table.summary.mixture,
        "limits": table.limits.given(),
    }


def _mapped(path: Path, *schemas: pa.Schema) -> pa.Table:
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        table.validate()
        if not any(table.schema.equals(one) for one in schemas):
            raise pa.ArrowInvalid(f"other columns: {', '.join(table.schema.names)}")
        return table
    except (OSError, pa.ArrowException) as error:
        got = in_one_line(error)
        raise ArtifactError(str(path), got=got, expected="a complete pack plan", fix=_AGAIN) from None
