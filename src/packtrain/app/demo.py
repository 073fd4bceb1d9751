"""The demo: make a small dataset and run every stage that exists on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packtrain.app.demo_data import write_dataset
from packtrain.app.measure import measure_outcome
from packtrain.costs.run import Outcome, Progress

MODEL = "tiny:qwen2_5_vl"


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """What the demo made and where it is."""

    folder: Path
    data: Path
    measured: Outcome


def run_demo(
    folder: Path,
    *,
    pictures: int = 320,
    model: str = MODEL,
    workers: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> DemoResult:
    """Make the data, measure it."""
    say(f"Drawing {pictures} pictures with objects, and a few broken records, into {folder / 'data'}")
    data = write_dataset(folder / "data", pictures)
    say(f"Measuring what each record costs {model}")
    measured = measure_outcome(
        data,
        model=model,
        out=folder / "costs",
        workers=workers,
        max_failure_rate=0.5,  # the faults are planted, and in a small demo they are many
        content_hash=True,  # the same data are written again by every run
        progress=progress,
    )
    return DemoResult(folder=folder, data=data, measured=measured)
