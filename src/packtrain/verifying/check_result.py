"""The result of a packing check: what each comparison found, and whether the whole passed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from packtrain.core.numbers import counted, elapsed, shown
from packtrain.core.values import Cost

if TYPE_CHECKING:
    from packtrain.delivery.encode.encoded_sample import EncodedSample

_NAME = 200  # characters of what may come from data
CheckOutcome = Literal["passed", "failed", "inconclusive"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PricedSample:
    """A sample to check with, and the cost that measuring computes for it."""

    sample: EncodedSample
    cost: Cost


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckResult:
    """One check: the largest difference, how much is allowed, and where it is."""

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
    def outcome(self) -> CheckOutcome:
        """Passed only if it could have failed."""
        if not self.passed:
            return "failed"
        return "passed" if self.conclusive else "inconclusive"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """All checks of one model on one attention backend, with their tolerances."""

    model: str
    attn_implementation: str  # that really ran
    device: str
    dtype: str
    samples: tuple[str, ...]  # id, kind and length of each
    tokens: int
    checks: tuple[CheckResult, ...]
    tolerances: tuple[str, ...] = ()  # how differences are measured and what is allowed, in words
    left_out: tuple[str, ...] = ()  # checks that could not be run, and why
    kinds: tuple[str, ...] = ()  # of samples: text, image, images, video
    longest: int = 0  # sample, in tokens
    seconds: float = 0.0

    @property
    def outcome(self) -> CheckOutcome:
        """Passed: something was checked, nothing failed, and every check could have failed."""
        if not self.checks or self.failures:
            return "failed"
        return "inconclusive" if self.inconclusive else "passed"

    @property
    def passed(self) -> bool:
        """Neither failed nor inconclusive."""
        return self.outcome == "passed"

    @property
    def failures(self) -> tuple[CheckResult, ...]:
        """The checks that did not pass."""
        return tuple(check for check in self.checks if not check.passed)

    @property
    def inconclusive(self) -> tuple[CheckResult, ...]:
        """The checks that passed and could not have failed."""
        return tuple(check for check in self.checks if check.outcome == "inconclusive")

    def summary_lines(self) -> tuple[str, ...]:
        """Lines for a run that may start: what was checked, what is inconclusive, and what was not checked."""
        apart = max((check.difference for check in self.checks), default=0.0)
        looked_at = f"{counted(len(self.samples), 'sample')} ({', '.join(self.kinds)}, longest {self.longest:,} tokens)"
        checks = counted(len(self.checks), "check")
        return (
            f"passed in {elapsed(self.seconds)}: {looked_at} packed vs. alone, "
            f"largest difference {apart:.1e} in {checks}",
            *(f"{one.check}: inconclusive, {shown(one.where, _NAME)}" for one in self.inconclusive),
            *(f"not checked: {shown(one, _NAME)}" for one in self.left_out),
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values; infinities and NaN as words, because JSON has no numbers for them."""
        plain = {"passed": self.passed, "outcome": self.outcome, **asdict(self), "seconds": round(self.seconds, 3)}
        plain["checks"] = [{**asdict(one), "passed": one.passed, "outcome": one.outcome} for one in self.checks]
        return dict(_plain(plain))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
