"""What a proof says: one finding for each check, and the verdict that they make up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packtrain.core.values import Cost

if TYPE_CHECKING:
    from packtrain.packs.values import EncodedSample


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

    @property
    def passed(self) -> bool:
        """Not-a-number never passes."""
        return not math.isnan(self.difference) and self.difference <= self.allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """All findings of one model on one backend, and how they were judged."""

    model: str
    backend: str  # what really ran, in words
    device: str
    dtype: str
    samples: tuple[str, ...]  # what was packed, in words
    tokens: int
    findings: tuple[Finding, ...]
    judged: tuple[str, ...] = ()  # how differences were measured and what was allowed
    left_out: tuple[str, ...] = ()  # checks that could not be made, and why

    @property
    def passed(self) -> bool:
        """Something was checked, and nothing failed."""
        return bool(self.findings) and all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that did not pass."""
        return tuple(finding for finding in self.findings if not finding.passed)

    def as_json(self) -> dict[str, Any]:
        """The verdict as plain values; what is not finite becomes a word, because JSON has no number for it."""
        return {
            "passed": self.passed,
            "model": self.model,
            "backend": self.backend,
            "device": self.device,
            "dtype": self.dtype,
            "samples": list(self.samples),
            "tokens": self.tokens,
            "findings": [
                {
                    "check": finding.check,
                    "difference": _plain(finding.difference),
                    "allowed": _plain(finding.allowed),
                    "passed": finding.passed,
                    "where": finding.where,
                }
                for finding in self.findings
            ],
            "judged": list(self.judged),
            "left_out": list(self.left_out),
        }


def _plain(number: float) -> float | str:
    return number if math.isfinite(number) else str(number)
