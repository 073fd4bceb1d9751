"""How the demo's training looks in a terminal."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from packtrain.cli.show.bars import ElapsedColumn
from packtrain.core.numbers import formatted
from packtrain.demo.train import DemoTraining, RunStanding
from packtrain.reports.run_page import cell, compared_rows


class TrainingBars:
    """One bar for each run, once it has started; nothing when quiet or without a terminal."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        columns = (
            TextColumn("{task.description:<8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
        )
        self._bars = Progress(*columns, ElapsedColumn(), console=console, disable=quiet or not console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def update(self, standing: RunStanding) -> None:
        """Show how far a run is."""
        if standing.mode not in self._tasks:
            self._bars.start()  # only now: until then another bar is shown
            self._tasks[standing.mode] = self._bars.add_task(standing.mode, total=standing.steps, loss="")
        said = "" if standing.loss is None else f"loss {formatted('loss', standing.loss)}"
        self._bars.update(self._tasks[standing.mode], completed=standing.step, loss=said)


def trained_json(trained: DemoTraining | None) -> dict[str, Any] | None:
    """The two runs for machines."""
    if trained is None:
        return None
    return {
        "verified": trained.verdict.passed,
        "reused": trained.reused,
        "runs": [str(folder) for folder in trained.folders],
        "page": str(trained.reported.page),
        **trained.reported.content,
    }


def show_trained(trained: DemoTraining, console: Console) -> None:
    """The two runs for people."""
    content = trained.reported.content
    if trained.reused:
        console.print("Nothing has changed since both were trained: the runs are reused.")
    verdict = trained.verdict
    said = {"passed": "passed", "failed": "FAILED", "inconclusive": "inconclusive"}[verdict.outcome]
    console.print(f"Packing check {said}: {len(verdict.findings)} checks.")
    table = Table(title=escape(content["headline"]), title_justify="left")
    table.add_column("")
    for run in content["runs"]:
        table.add_column(escape(run["label"]), justify="right")
    for row in compared_rows(content):
        table.add_row(row.name, *(cell(content, row, at) for at in range(len(content["runs"]))))
    console.print(table)
    console.print(f"The comparison: [bold]{escape(str(trained.reported.page.resolve()))}[/]", soft_wrap=True)
