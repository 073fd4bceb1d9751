"""The result of a packing check: one finding per check, and the verdict."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from packtrain.core.numbers import counted, shown
from packtrain.core.values import Cost

if TYPE_CHECKING:
    from packtrain.delivery.encode.encoded_sample import EncodedSample

_NAME = 200  # characters of what may come from data
VerdictOutcome = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Priced:
    """A sample to prove with, and the cost that was computed for it without encoding it."""

    sample: EncodedSample
    cost: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One check: the largest difference that was found, what is allowed, and where it was found."""

    check: str
    difference: float
    allowed: float
    where: str = ""  # the sample, parameter or quantity with the largest difference
    # Of a check that changes one sample and looks at the others: the least that a change moved the sample itself, and
    # how much it takes to be told from noise. None: nothing is changed.
    effect: float | None = None
    needed: float = 0.0

    @property
    def passed(self) -> bool:
        """Not-a-number never passes."""
        return not math.isnan(self.difference) and self.difference <= self.allowed

    @property
    def conclusive(self) -> bool:
        """Could it have failed? Others do not move visibly with a sample that hardly moves itself."""
        return self.effect is None or self.effect >= self.needed

    @property
    def outcome(self) -> VerdictOutcome:
        """Passed only where it could have failed."""
        if not self.passed:
            return "failed"
        return "passed" if self.conclusive else "inconclusive"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """All findings of one model on one backend, and how they were judged."""

    model: str
    attn_implementation: str  # what really ran, in words
    device: str
    dtype: str
    samples: tuple[str, ...]  # what was packed, in words
    tokens: int
    findings: tuple[Finding, ...]
    judged: tuple[str, ...] = ()  # how differences were measured and what was allowed
    left_out: tuple[str, ...] = ()  # checks that could not be made, and why
    kinds: tuple[str, ...] = ()  # of samples: text, image, ...
    longest: int = 0  # tokens of a sample
    seconds: float = 0.0

    @property
    def outcome(self) -> VerdictOutcome:
        """Passed: something was checked, nothing failed, and every check could have failed."""
        if not self.findings or self.failures:
            return "failed"
        return "inconclusive" if self.powerless else "passed"

    @property
    def passed(self) -> bool:
        """Neither failed nor inconclusive."""
        return self.outcome == "passed"

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that did not pass."""
        return tuple(finding for finding in self.findings if not finding.passed)

    @property
    def powerless(self) -> tuple[Finding, ...]:
        """The findings that passed and could not have failed."""
        return tuple(finding for finding in self.findings if finding.outcome == "inconclusive")

    def passed_in_words(self) -> tuple[str, ...]:
        """Lines for a run that may start: what was checked, what is inconclusive, and what was not checked."""
        apart = max((finding.difference for finding in self.findings), default=0.0)
        looked_at = f"{counted(len(self.samples), 'sample')} ({', '.join(self.kinds)}, longest {self.longest:,} tokens)"
        checks = counted(len(self.findings), "check")
        return (
            f"passed in {self.seconds:.1f} s: {looked_at} packed vs. alone, largest difference {apart:.1e} in {checks}",
            *(f"{one.check}: inconclusive, {shown(one.where, _NAME)}" for one in self.powerless),
            *(f"not checked: {shown(one, _NAME)}" for one in self.left_out),
        )

    def as_json(self) -> dict[str, Any]:
        """The verdict as plain values; what is not finite becomes a word, because JSON has no number for it."""
        findings = [{**asdict(one), "passed": one.passed, "outcome": one.outcome} for one in self.findings]
        whole = {"passed": self.passed, "outcome": self.outcome, **asdict(self), "findings": findings}
        return dict(_plain({**whole, "seconds": round(self.seconds, 3)}))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
