"""A training run as its folder tells it: columns over its steps, evaluations, warnings, what was trained on what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

Scalar = str | int | float | bool | None

LEARNING_RATES = "learning_rates"
_BEGINNING, _SLOW = 10, 3.0  # see Steps.warm


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Steps:
    """What was logged of every optimizer step, in order; NaN where a step does not say."""

    columns: Mapping[str, np.ndarray]  # by the names of STEP_KEYS
    rates: Mapping[str, np.ndarray] = field(default_factory=dict)  # learning rates by part

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> np.ndarray:
        return self.columns[name]

    def known(self, name: str) -> bool:
        """Does any step say it?"""
        return bool(np.isfinite(self.columns[name]).any())

    @property
    def warm(self) -> np.ndarray:
        """Which steps warm up: workers start in them, or layers are compiled. No speed counts them.

        The first step, and single ones among the first ten that take thrice the median of those ten: a shape that is
        compiled later, or a process that resumes. Where half of the ten are slow, the machine was, and they count. A
        run of one step has none.
        """
        seconds = np.nan_to_num(self.columns["step_seconds"])
        found = np.zeros(len(seconds), bool)
        if len(seconds) < 2:
            return found
        beginning = seconds[:_BEGINNING]
        found[: len(beginning)] = beginning > _SLOW * np.median(beginning)
        found[0], found[len(seconds) // 2 :] = True, False  # at least half of a short run counts
        return found

    @property
    def elapsed(self) -> np.ndarray:
        """Seconds of training behind each step; steps that warm up count as if they were as fast as the others.

        So the time for some samples is their tokens over the run's tokens per second. Pauses between processes do not
        count.
        """
        seconds, tokens = (np.nan_to_num(self.columns[name]) for name in ("step_seconds", "tokens"))
        warm = self.warm
        if warm.any() and seconds[~warm].sum() > 0 and tokens[~warm].sum() > 0:
            seconds[warm] = tokens[warm] * seconds[~warm].sum() / tokens[~warm].sum()
        return np.cumsum(seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation."""

    step: int
    loss: float
    samples: float = math.nan  # seen in training until then


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned:
    """One early warning."""

    step: int
    kind: str
    found: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What run.json says; None where it does not."""

    model: str | None = None
    mode: str | None = None  # packed or padded
    plan: str | None = None
    packs_per_step: int | None = None
    rows_per_batch: int = 1
    seed: int = 0
    balance: str = "sorted"
    world: int = 1
    derived: Mapping[str, Scalar] = field(default_factory=dict)  # names of inner values are joined by dots
    outcome: Mapping[str, Scalar] = field(default_factory=dict)
    other: Mapping[str, Scalar] = field(default_factory=dict)
    said: tuple[str, ...] = ()  # what was printed before training: notes, what was reused and what was made


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingRun:
    """Everything a page shows of one run."""

    folder: Path
    name: str
    about: About
    steps: Steps
    evaluations: tuple[Evaluation, ...] = ()
    warnings: tuple[Warned, ...] = ()
    ledger: Mapping[str, int] = field(default_factory=dict)  # samples by stage and reason
    config: str = ""  # the text of run.yaml
    notes: tuple[str, ...] = ()  # what could not be read
    is_held: bool = False  # a process is at work in its folder

    @property
    def is_training(self) -> bool:
        """Is it still trained? A process that has said how the run ended holds its folder a little longer."""
        return self.is_held and not self.has_ended

    @property
    def has_ended(self) -> bool:
        """Has it said how?"""
        return self.status not in ("running", "begun", "not begun")

    @property
    def status(self) -> str:
        """How it ended, as far as it is known."""
        said = self.about.outcome.get("status")
        if said:
            return str(said)
        return "begun" if len(self.steps) else "not begun"
