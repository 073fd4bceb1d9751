"""Early warnings of a run: their kinds, one of them, and the limits at which they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from packtrain.core.errors import ConfigError

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
    "time_mismatch",
    "memory_mismatch",
    "overfitting",
]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyWarning:
    """Something that would rather be known now than at the end of the run."""

    kind: str  # one of KINDS, but for the log of another version
    step: int
    message: str
    advice: str


MAY_BE_ZERO = ("timing_warmup_steps", "plateau_improvement", "eval_rise")  # of the limits


def _limit(default: float, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorLimits:
    """Where watching ends and warning begins: section `monitors` of a config."""

    window: int = _limit(64, "Steps that a loss or a gradient norm is compared with.")
    min_steps: int = _limit(16, "Steps before anything is compared.")
    early_factor: float = _limit(4.0, "Before that: a loss explodes at this multiple of the median.")
    spike_sigmas: float = _limit(6.0, "A loss spike is this many standard deviations above the median,")
    spike_rise: float = _limit(0.2, "and by this share of the median.")
    gradient_factor: float = _limit(10.0, "A high gradient norm is this multiple of the median.")
    memory_share: float = _limit(0.92, "Share of GPU memory above which it is nearly full.")
    timing_window: int = _limit(20, "Steps over which times and ranks are compared.")
    timing_warmup_steps: int = _limit(3, "First steps of a process, whose times do not count (compilation).")
    wait_share: float = _limit(0.10, "Share of a step that is spent waiting for data.")
    rank_imbalance: float = _limit(1.15, "Slowest rank over the mean of all.")
    variance_factor: float = _limit(3.0, "The loss is unstable when its variance grows by this factor.")
    time_mismatch: float = _limit(0.25, "Share by which step time and its prediction may differ.")
    memory_mismatch: float = _limit(0.10, "Share by which memory and its prediction may differ.")
    plateau_samples: int = _limit(2_000, "Samples of one span; three or more are compared with as many before.")
    plateau_steps: int = _limit(25, "Steps of one span, at least.")
    plateau_improvement: float = _limit(0.005, "Share by which the loss must fall from span to span.")
    eval_rise: float = _limit(0.01, "Share by which the evaluation loss may rise above its best.")
    cooldown: int = _limit(200, "Steps before the same warning is given again.")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> MonitorLimits:
        """Those of a config, and the defaults."""
        return cls(**given)

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value < 0 or (value == 0 and one.name not in MAY_BE_ZERO):
                raise ConfigError(f"training.monitors.{one.name}", got=value, expected="a positive number")
