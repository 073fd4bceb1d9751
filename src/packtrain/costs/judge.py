"""The failure budget of a run: when too much is lost, the run stops and says what was lost most."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from packtrain.core.errors import ConfigError, DataError
from packtrain.costs.journal import UnitResult
from packtrain.records.formats.compression import SPOILT
from packtrain.records.open import spoils_file

JUDGED_AFTER = 1000  # records, before a rate means anything


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureBudget:
    """What may go wrong before a run is stopped."""

    on_error: Literal["skip", "fail"] = "skip"
    max_failure_rate: float = 0.05

    def __post_init__(self) -> None:
        if self.on_error not in ("skip", "fail"):
            raise ConfigError("on_error", got=self.on_error, expected="skip or fail")
        if not 0 <= self.max_failure_rate <= 1:
            raise ConfigError("max_failure_rate", got=self.max_failure_rate, expected="a share between 0 and 1")


class Judge:
    """Looks at units in dataset order, whatever order they finish in, so that the verdict is always the same."""

    def __init__(self, budget: FailureBudget) -> None:
        self._budget = budget
        self._waiting: dict[int, UnitResult] = {}
        self._next = 0
        self._judged = self._failed = 0  # records that no filter left out, and how many of them cannot be used
        self._reasons: Counter[str] = Counter()
        self._file: tuple[int, str] | None = None  # the one whose units are looked at, and its rows so far
        self._rows = 0

    def take(self, result: UnitResult) -> None:
        """Take a finished unit; raises DataError as soon as the budget is spent."""
        ledger = result.ledger if result.failed and self._budget.on_error == "fail" else b""
        self._waiting[result.number] = replace(result, costs=b"", media=b"", ledger=ledger)
        while (ready := self._waiting.pop(self._next, None)) is not None:
            self._next += 1
            self._judged += ready.rows + ready.failed
            self._failed += ready.failed
            self._reasons.update(ready.reasons)
            self._give_up(ready)
            if ready.failed and self._budget.on_error == "fail":
                raise DataError("a record cannot be used", got=_first(ready.ledger), fix="mend it, or --on-error skip")
            if self._judged >= JUDGED_AFTER:
                self._judge()

    def _give_up(self, unit: UnitResult) -> None:
        """A fault in a compressed file takes the rows before it along."""
        self._rows = unit.rows + (self._rows if self._file == (unit.source, unit.file) else 0)
        self._file = unit.source, unit.file
        if spoils_file(unit.reasons):
            self._failed += self._rows
            self._reasons[f"read: {SPOILT}"] += self._rows
            self._rows = 0

    def finish(self) -> None:
        """The last word, for datasets of any size."""
        self._judge()

    def _judge(self) -> None:
        if self._failed > self._budget.max_failure_rate * self._judged:
            raise DataError(
                f"{self._failed:,} of the first {self._judged:,} records cannot be used",
                got="; ".join(f"{count:,} x {reason}" for reason, count in self._reasons.most_common(3)),
                expected=f"at most {self._budget.max_failure_rate:.1%}",
                fix="mend the data, or raise --max-failure-rate; the ledger names each record",
            )


def _first(ledger: bytes) -> str:
    entries = (json.loads(line) for line in ledger.decode().split("\n") if line)
    entry = next(entry for entry in entries if not entry["filtered"])
    return f"{entry['origin']}: {entry['stage']}: {entry['reason']} {entry['detail']}".strip()
