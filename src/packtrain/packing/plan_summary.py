"""plan.json as values: how it was packed, from what, what every epoch holds, and what its limits kept out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from packtrain.packing.packing_config import PackingConfig
from packtrain.predicting.flops import WorkModel


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochCounts:
    """What one epoch holds; drawn = entries + dropped + tail."""

    packs: int
    entries: int  # samples, or pieces of samples, in packs
    drawn: int = 0
    dropped: int = 0  # no pack can hold them
    unlabelled: int = 0  # of these, pieces without loss
    tail: int = 0  # in packs that are left out
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
    """What became of offering samples to finished packs, for one limit."""

    stopped: int  # offers that this limit refused
    alone: int  # of these, offers that no other limit refused
    fullest: int  # packs of which this limit is used up most


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedSummary:
    """What became of offering typical samples to the finished packs of the first epoch."""

    offers: int = 0
    refused: int = 0
    limits: Mapping[str, BlockedCount] = field(default_factory=dict)  # by resource

    def to_json(self) -> dict[str, Any]:
        """As plan.json has it: the limits beside the totals."""
        counts = {name: asdict(count) for name, count in self.limits.items()}
        return {"offers": self.offers, "refused": self.refused, **counts}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> BlockedSummary:
        """From what `to_json` gave."""
        limits = {name: BlockedCount(**one) for name, one in body.items() if name not in ("offers", "refused")}
        return cls(offers=body["offers"], refused=body["refused"], limits=limits)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCounts:
    """Samples in no pack."""

    measured: int = 0  # that measuring left out
    reasons: Mapping[str, int] = field(default_factory=dict)  # "pack: reason" -> ledger lines of the plan


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSummary:
    """Everything that plan.json says."""

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

    def to_json(self) -> dict[str, Any]:
        """The content of plan.json."""
        plain = {one.name: getattr(self, one.name) for one in fields(self)}
        return plain | {
            "config": self.config.describe(),
            "work": asdict(self.work),
            "epochs": [asdict(one) for one in self.epochs],
            "blocked": self.blocked.to_json(),
            "ledger": asdict(self.ledger),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> PlanSummary:
        """From the content of plan.json."""
        found = {name: value for name, value in body.items() if name not in ("kind", "version")}
        return cls(
            **found
            | {
                "config": PackingConfig.from_description(found["config"]),
                "work": WorkModel(**found["work"]),
                "epochs": tuple(EpochCounts(**one) for one in found["epochs"]),
                "blocked": BlockedSummary.from_json(found["blocked"]),
                "ledger": LedgerCounts(**found["ledger"]),
            }
        )
