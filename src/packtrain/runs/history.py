"""What early warnings are made from: the last steps in a few numbers each, all of them values that JSON has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Literal, get_args

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.runs.step_metrics import StepMetrics

Kind = Literal[
    "loss_not_finite",
    "loss_spike",
    "gradient_high",
    "gradient_exploding",
    "gradient_zero",
    "learning_rate_zero",
    "memory_near_limit",
    "data_bound",
    "unequal_ranks",
    "plateau",
    "instability",
    "time_apart",
    "memory_apart",
    "overfitting",
]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyWarning:
    """Something that would rather be known now than at the end of the run."""

    kind: Kind
    step: int
    found: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorLimits:
    """Where watching ends and warning begins. Windows are in steps."""

    window: int = 64  # that a loss or a norm is compared with
    fewest: int = 16  # steps before anything is compared
    early_factor: float = 4.0  # above the median of fewer steps than those: a loss that explodes
    spike_sigmas: float = 6.0
    spike_rise: float = 0.2  # of the median, at least
    gradient_factor: float = 10.0
    memory_share: float = 0.92
    timing_window: int = 20
    settling_steps: int = 3  # of each process: they compile, and start workers
    wait_share: float = 0.10
    spread: float = 1.15
    variance_factor: float = 3.0
    time_apart: float = 0.25
    memory_apart: float = 0.10
    plateau_samples: int = 2_000  # of one span; three or more are compared with as many before
    plateau_steps: int = 25  # of one span, at least
    plateau_improvement: float = 0.005
    eval_rise: float = 0.01
    cooldown: int = 200  # steps before the same is said again

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value < 0 or (value == 0 and one.name not in ("settling_steps", "plateau_improvement", "eval_rise")):
                raise ConfigError(f"monitors.{one.name}", got=value, expected="a positive number")


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """One step as it is remembered."""

    step: int
    loss: float | None  # None: not finite, or there is none
    taught: bool  # some token carries loss
    grad_norm: float | None  # None: not finite, or not known
    grad_broken: bool  # not finite
    rate: float | None  # the highest learning rate of any part
    seconds: float
    wait: float
    spread: float
    slowest: int
    work_spread: float | None
    predicted_seconds: float | None
    memory: int | None
    memory_limit: int | None
    predicted_memory: int | None
    settled: bool  # its time counts

    @property
    def memory_share(self) -> float:
        return self.memory / self.memory_limit if self.memory and self.memory_limit else 0.0


def remembered(metrics: StepMetrics, *, settled: bool) -> Seen:
    """What stays of a step."""
    norm = metrics.grad_norm
    return Seen(
        step=metrics.step,
        loss=_finite(metrics.loss),
        taught=metrics.loss is not None,
        grad_norm=_finite(norm),
        grad_broken=norm is not None and not math.isfinite(norm),
        rate=max(metrics.learning_rates.values(), default=None),
        seconds=metrics.step_seconds,
        wait=metrics.data_wait_seconds,
        spread=metrics.spread,
        slowest=metrics.slowest_rank,
        work_spread=metrics.work_spread,
        predicted_seconds=metrics.predicted_seconds,
        memory=metrics.memory_bytes,
        memory_limit=metrics.memory_limit,
        predicted_memory=metrics.predicted_memory_bytes,
        settled=settled,
    )


def to_rows(seen: Sequence[Seen]) -> list[list[object]]:
    """A history for a state; the names of its columns are the fields of Seen."""
    return [list(astuple(one)) for one in seen]


def from_rows(rows: object) -> list[Seen]:
    """A history from a state."""
    names = [one.name for one in fields(Seen)]
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == len(names) for row in rows):
        raise ArtifactError("state of the monitors", got=str(rows)[:200], expected=f"rows of {', '.join(names)}")
    return [Seen(**dict(zip(names, row, strict=True))) for row in rows]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
