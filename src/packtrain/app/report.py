"""The page of a run, or of several compared, and what machines are told of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.reports.run_content import runs_content
from packtrain.reports.run_page import write_run_report
from packtrain.runs.training_run import read_run

__all__ = ["Reported", "report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reported:
    """A page that was written, and the numbers on it."""

    page: Path
    content: dict[str, Any]  # JSON


def report(runs: Sequence[str | Path], out: str | Path | None = None) -> Reported:
    """Write the page of the first run, compared with the others."""
    first, *others = runs
    page = write_run_report(first, others=others, out=Path(out) if out is not None else None)
    return Reported(page=page, content=runs_content([read_run(folder) for folder in runs]))
