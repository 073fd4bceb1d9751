"""Samples that could not be delivered: counted over all ranks, written to one ledger, and judged by all ranks alike."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from packtrain.core.errors import ArtifactError, ConfigError, DataError
from packtrain.core.numbers import exact_percent
from packtrain.core.values import LedgerEntry
from packtrain.delivery.collate.batch_values import BatchInfo
from packtrain.measuring.failure_budget import JUDGED_AFTER, FailureBudget

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_STATE = 1  # version of the saved state
_COUNTS = ("samples", "failures", "ledger_bytes")


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureVerdict:
    """Samples and failures of a run so far: the same value on every rank."""

    samples: int  # tried, those that failed included
    failures: int
    reasons: Mapping[str, int]
    votes: int = 0  # ranks that said yes to what was asked beside


class FailureCounter:
    """The failure budget of a training run.

    `take` every batch; then all ranks call `decide` together, at the end of each step and before a state is saved. What
    was taken is added up over the ranks, so that all of them stop, with the same message, or none does. Only the first
    rank writes the ledger: no shared file system is needed, and a step that was never finished leaves no line. Resuming
    cuts the ledger back to where the state was saved, because what came later is met again.

    A run that does not resume begins its ledger again, and so does one that resumes where the file is not; the totals
    are part of the state.
    """

    def __init__(
        self,
        max_failure_rate: float = 0.05,
        ledger_path: str | Path | None = None,
        *,
        on_error: Literal["skip", "fail"] = "skip",
        judged_after: int = JUDGED_AFTER,  # samples, before a rate means anything
    ) -> None:
        self._budget = FailureBudget(on_error=on_error, max_failure_rate=max_failure_rate)
        if judged_after < 0:
            raise ConfigError("judged_after", got=judged_after, expected="a number of samples, 0 or more")
        self._judged_after = judged_after
        self._ledger = _Ledger(Path(ledger_path)) if ledger_path is not None else None
        self._samples = self._failures = self._ledger_bytes = 0  # of all ranks, until the last decision
        self._reasons: Counter[str] = Counter()
        self._votes = 0  # of the last decision
        self._new_samples = 0  # of this rank, since then
        self._new_lines: list[_Line] = []

    def take(self, info: BatchInfo) -> None:
        """Count one delivered batch of this rank."""
        keys = info.keys
        epoch, pack = (keys[0].epoch, keys[0].pack) if len(keys) == 1 else (keys[0].epoch if keys else None, None)
        lines = [_Line(epoch=epoch, pack=pack, entry=entry) for entry in info.failures]
        self._new_samples += info.samples + sum(not line.entry.filtered for line in lines)
        self._new_lines += lines

    def decide(self, group: ProcessGroup | None = None, *, vote: bool = False, whole: bool = False) -> FailureVerdict:
        """Add up what all ranks took, write the ledger, and raise DataError on all of them if the budget is spent.

        `vote` is this rank's answer to another question: one sum is enough for both. A `whole` epoch, or run, is judged
        however few samples it has.
        """
        self._add_up(group, vote)
        judged = whole or self._samples >= self._judged_after
        if judged or (self._failures and self._budget.on_error == "fail"):
            self._require_budget()
        return self.verdict

    def finish(self, group: ProcessGroup | None = None) -> FailureVerdict:
        """The last decision of a run, however small it was."""
        return self.decide(group, whole=True)

    @property
    def verdict(self) -> FailureVerdict:
        """The verdict of the last decision."""
        reasons = dict(self._reasons)
        return FailureVerdict(samples=self._samples, failures=self._failures, reasons=reasons, votes=self._votes)

    def state_dict(self) -> dict[str, Any]:
        """The totals of all ranks at the last decision, as JSON; the same on every rank, and good for any number."""
        counts = {name: getattr(self, f"_{name}") for name in _COUNTS}
        return {"version": _STATE, **counts, "reasons": dict(sorted(self._reasons.items()))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; what was taken since is forgotten."""
        reasons = state.get("reasons")
        is_valid = state.get("version") == _STATE and isinstance(reasons, Mapping)
        counts = [*(state.get(name) for name in _COUNTS), *(reasons.values() if isinstance(reasons, Mapping) else ())]
        if not is_valid or not all(isinstance(count, int) and count >= 0 for count in counts):
            expected = f"version {_STATE} with {', '.join(_COUNTS)} and reasons"
            raise ArtifactError("failure counts of the checkpoint", got=str(state)[:200], expected=expected)
        self._samples, self._failures, self._ledger_bytes = (int(state[name]) for name in _COUNTS)
        self._reasons = Counter(reasons)
        self._new_samples, self._new_lines = 0, []
        if self._ledger is not None:
            self._ledger.forget()

    def _add_up(self, group: ProcessGroup | None, vote: bool = False) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if distributed else (0, 1)
        mine, lines = (self._new_samples, len(self._new_lines), int(vote)), [self._new_lines]
        total, num_new, self._votes = mine if world_size == 1 else _sum(mine, group)
        if num_new and world_size > 1:  # all ranks know the sum, so all take part
            lines = [[] for _ in range(world_size)]
            dist.all_gather_object(lines, self._new_lines, group=group)
        self._new_samples, self._new_lines = 0, []
        new = sorted((line for part in lines for line in part), key=_Line.place) if num_new else []
        self._samples += total
        failures = [line.entry for line in new if not line.entry.filtered]
        self._failures += len(failures)
        self._reasons.update(f"{entry.stage}: {entry.reason}" for entry in failures)
        self._write(new, rank, world_size, group)

    def _write(self, new: list[_Line], rank: int, world_size: int, group: ProcessGroup | None) -> None:
        """Let the first rank write; a fault of its disk is one of all ranks, or the others would wait for it."""
        if self._ledger is None or (not new and self._ledger.is_open):
            return
        written = self._ledger.append(new, self._ledger_bytes) if rank == 0 else None
        outcome: list[int | str | None] = [written]
        if world_size > 1:
            # Not a broadcast: that one names its source by the rank in the whole job, not in the group.
            outcome = [None] * world_size
            dist.all_gather_object(outcome, written, group=group)
        self._ledger.is_open = True
        size = outcome[0]
        if not isinstance(size, int):
            raise ArtifactError(str(self._ledger.path), got=size, expected="a ledger that can be continued")
        self._ledger_bytes = size

    def _require_budget(self) -> None:
        skips = self._budget.on_error == "skip"
        rate = self._budget.max_failure_rate if skips else 0.0
        lenient = "raise max_failure_rate" if skips else "set on_error: skip"
        if self._failures > rate * self._samples:
            # Equal counts in alphabetical order: the message must not depend on who came first.
            common = sorted((-count, reason) for reason, count in self._reasons.items())
            raise DataError(
                f"{self._failures:,} of the first {self._samples:,} samples could not be delivered",
                got="; ".join(f"{-count:,} x {reason}" for count, reason in common[:3]),
                expected=f"at most {exact_percent(rate)}" if rate else "none",
                fix=f"fix the data, or {lenient}; the ledger names each sample",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Line:
    """One line of the ledger."""

    epoch: int | None
    pack: int | None  # None where a batch holds several
    entry: LedgerEntry

    def place(self) -> tuple[int, int, str, str]:
        """Lines are in an order that does not depend on the number of ranks."""
        epoch, pack = (-1 if number is None else number for number in (self.epoch, self.pack))
        return epoch, pack, self.entry.origin, self.entry.id

    def text(self) -> str:
        return json.dumps({"epoch": self.epoch, "pack": self.pack, **asdict(self.entry)}, ensure_ascii=False) + "\n"


class _Ledger:
    """The file, as its only writer sees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_open = False  # has what a former run left been read

    def forget(self) -> None:
        """Look at the file again before the next line."""
        self.is_open = False

    def append(self, lines: Sequence[_Line], kept: int) -> int | str:
        """Write after the first `kept` bytes; the new size, or what went wrong."""
        try:
            return self._append(lines, kept)
        except OSError as error:
            return f"{type(error).__name__}: {error}"

    def _append(self, lines: Sequence[_Line], kept: int) -> int | str:
        if not self.is_open:
            size = self.path.stat().st_size if self.path.exists() else None
            if size is not None and size < kept:
                return f"{size} bytes, where {kept} were written before the state was saved"
            kept = kept if size is not None else 0
            if size is None and not lines:
                return 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "r+b" if self.path.exists() else "w+b") as stream:
            stream.truncate(kept)  # also what a killed process wrote without getting to say so
            stream.seek(kept)
            # a lone surrogate, as in a file name that is not UTF-8, becomes the escape that JSON has for it
            stream.write("".join(line.text() for line in lines).encode("utf-8", "backslashreplace"))
            stream.flush()
            os.fsync(stream.fileno())
            return stream.tell()


def _sum(counts: tuple[int, int, int], group: ProcessGroup | None) -> tuple[int, int, int]:
    """Each count, added up over the ranks."""
    on_host = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_host else torch.accelerator.current_accelerator(check_available=True)
    together = torch.tensor(counts, dtype=torch.int64, device=device)
    dist.all_reduce(together, group=group)
    samples, failures, votes = together.tolist()
    return samples, failures, votes
