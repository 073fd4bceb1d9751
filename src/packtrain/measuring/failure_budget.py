"""The failure budget of a run: when too many records fail it stops, with the most frequent reasons and what helps."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from packtrain.core.errors import ConfigError, DataError
from packtrain.core.numbers import exact_percent
from packtrain.core.values import LedgerEntry
from packtrain.measuring.journal import UnitResult
from packtrain.measuring.request import Request
from packtrain.records.open import spoils_file
from packtrain.records.shards.decompression import SPOILT

_BY_REASON = {
    "media: file not found": "set the folder that these paths start from (--media-root)",
    "media: path outside the media root": "set a folder that holds them all (--media-root), or allow any path "
    "(--allow-outside-root)",
    "media: remote media are not fetched": "download the media, and replace the URLs by their paths",
    "family: audio has no token rule yet": "leave the audio out: no model family here supports it",
    "template: the chat template refused the record": "change the records, or use another template "
    "(--chat-template FILE)",
}
_NOT_WRITTEN = "template: the chat template does not write "  # tools, their answers, reasoning
_OF_MODEL = ("template: ", "family: ")  # stages in which a model says what it takes
_PLACES = ("media: file not found", "media: path outside the media root")


@dataclass(frozen=True, kw_only=True, slots=True)
class Remedies:
    """What is known of a measurement that helps to say what to do."""

    ledger: str = ""  # the file that names each record
    roots: tuple[str, ...] = ()  # where the media paths of each source start
    model: str = ""  # by its user's name
    lacks: Mapping[str, str] = field(default_factory=dict)  # of the model, by reason, with what to do

    def example(self, reason: str, entry: LedgerEntry, source: int) -> str:
        """The first record with this fault, and where its media were looked for."""
        detail = f" {entry.detail}" if entry.detail else ""
        if reason in _PLACES and source < len(self.roots):
            detail += f", from the media root {self.roots[source]}"
        elif reason.startswith(_OF_MODEL) and self.model:
            detail += f"{',' if detail else ''} with the model {self.model}"
        return f"{entry.origin}:{detail}" if detail else entry.origin

    def to_do(self, reason: str) -> str:
        """The fix for this reason, unless the record itself is wrong."""
        if reason in self.lacks:
            return self.lacks[reason]
        if " takes no " in reason:
            kind = reason.rpartition(" ")[2]
            return f"use a model that takes {kind}s, or leave the {kind}s out"
        if reason.startswith(_NOT_WRITTEN):
            what = reason.removeprefix(_NOT_WRITTEN)
            return f"use a model whose chat template writes {what}, or such a template (--chat-template FILE)"
        return _BY_REASON.get(reason, "")

    def listed(self) -> str:
        """Where all of them are named."""
        return f"{self.ledger} lists each record" if self.ledger else "the ledger lists each record"


def remedies_of(request: Request, ledger: Path, model: str | None = None) -> Remedies:
    """For one measurement; `model` is the user's name of it."""
    settings = request.settings()
    name = model or request.model
    lacks = {}
    if settings.chat_template is None:
        own = "use your own (--chat-template FILE), or an instruction-tuned model"
        lacks["template: the model has no chat template"] = f"model {name} has no chat template: {own}"
    roots = tuple(spec.media_root for spec in request.specs)
    return Remedies(ledger=os.fspath(ledger), roots=roots, model=name, lacks=lacks)


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


class FailureJudge:
    """Looks at units in dataset order, whatever order they finish in, so that the verdict is always the same."""

    def __init__(self, budget: FailureBudget, remedies: Remedies | None = None) -> None:
        self._budget, self._remedies = budget, remedies or Remedies()
        self._waiting: dict[int, tuple[UnitResult, Mapping[str, str]]] = {}
        self._next = 0
        self._judged = self._failed = 0  # records that no filter left out, and how many of them cannot be used
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, str] = {}  # the first record of each reason
        self._file: tuple[int, str] | None = None  # the one whose units are looked at, and its rows so far
        self._rows = 0

    def take(self, result: UnitResult) -> None:
        """Take a finished unit; raises DataError as soon as the budget is spent."""
        self._waiting[result.number] = replace(result, costs=b"", media=b"", ledger=b""), self._first_of(result)
        while (waiting := self._waiting.pop(self._next, None)) is not None:
            ready, examples = waiting
            self._next += 1
            self._examples = {**examples, **self._examples}
            self._judged += ready.rows + ready.failed
            self._failed += ready.failed
            self._reasons.update(ready.reasons)
            self._give_up(ready)
            if ready.failed and self._budget.on_error == "fail":
                raise self._at_once(examples)
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
            worst = self._reasons.most_common(3)
            raise DataError(
                f"{self._failed:,} of the first {self._judged:,} records are unusable",
                problems=[f"{count:,} x {self._said(reason)}" for reason, count in worst],
                expected=f"at most {exact_percent(self._budget.max_failure_rate)}",
                fix=self._fix([reason for reason, _ in worst]),
            )

    def _said(self, reason: str) -> str:
        return f"{reason} (first {self._examples[reason]})" if reason in self._examples else reason

    def _fix(self, reasons: list[str]) -> str:
        """What helps against each; the data are to blame where nothing else is."""
        known = [self._remedies.to_do(reason) for reason in reasons]
        helps = list(dict.fromkeys(filter(None, known)))
        if not all(known):
            helps.append("fix the records")
        if self._failed < self._judged:  # otherwise nothing would be left
            helps.append("or raise --max-failure-rate")
        return "; ".join((*helps, self._remedies.listed()))

    def _at_once(self, examples: Mapping[str, str]) -> DataError:
        reason, example = next(iter(examples.items()))
        helps = self._remedies.to_do(reason) or "fix it"
        return DataError("a record is unusable", got=f"{reason} ({example})", fix=f"{helps}; or --on-error skip")

    def _first_of(self, unit: UnitResult) -> dict[str, str]:
        """The first record of each reason; no more lines are read than that takes."""
        examples: dict[str, str] = {}
        if not unit.failed:
            return examples
        for line in unit.ledger.splitlines():
            entry = LedgerEntry(**json.loads(line))
            reason = f"{entry.stage}: {entry.reason}"
            if not entry.filtered and reason not in examples:
                examples[reason] = self._remedies.example(reason, entry, unit.source)
            if len(examples) == len(unit.reasons):
                break
        return examples
