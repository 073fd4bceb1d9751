"""What a training run shows before its first step and when it has ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.app.train.course import Course
from packtrain.app.train.predicted import PredictedRun
from packtrain.app.train.prepared import RunNumbers
from packtrain.app.train.resolved_run import ResolvedRun
from packtrain.runs.run_facts import RunOutcome

if TYPE_CHECKING:
    from packtrain.delivery.collate.batch_values import BatchInfo
    from packtrain.verifying.verdict import Verdict


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlace:
    """Which of the started processes this is."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @property
    def first(self) -> bool:
        """Does this process speak for all?"""
        return self.rank == 0

    @classmethod
    def here(cls) -> ProcessPlace:
        """As launchers tell it: torchrun, accelerate launch, or none."""
        rank, world, local = (int(os.environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        return cls(rank=rank, world=max(world, 1), local_rank=local)


@dataclass(frozen=True, kw_only=True, slots=True)
class Learning:
    """One part of the model."""

    part: str
    weights: int
    trained: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadyRun:
    """A run before its first step."""

    run: ResolvedRun
    numbers: RunNumbers
    done: tuple[str, ...]  # what was reused, and what was made
    notes: tuple[str, ...]
    attn_implementation: str  # that really runs
    learns: tuple[Learning, ...]
    dtype: str
    masters: bool  # the optimizer keeps fp32 copies of half-precision weights that learn
    compiled: bool
    proof: Verdict | None  # of packing; None where rows are padded, or it was turned off
    course: Course
    expected: PredictedRun | None  # None without a GPU that is known
    batches: tuple[tuple[BatchInfo, ...], ...] = ()  # the first of each rank, where they were asked for
    warnings: tuple[str, ...] = ()  # what is not as it was asked for
    risks: tuple[str, ...] = ()  # what may end the run before its time
    resumed: int = 0  # the step that it goes on from


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainOutcome:
    """What became of a run."""

    folder: Path
    ready: ReadyRun
    outcome: RunOutcome
    report: Path | None = None
    final: Path | None = None
    problems: tuple[str, ...] = ()  # with what comes after training

    @property
    def interrupted(self) -> bool:
        """Was it asked to stop, and can go on?"""
        return self.outcome.status == "interrupted"
