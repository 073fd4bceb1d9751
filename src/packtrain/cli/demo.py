"""`packtrain demo`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from packtrain.cli.common import Json, print_json
from packtrain.cli.interruptible import interruptible
from packtrain.cli.measure import MeasureBar, measured_json, show_measured
from packtrain.cli.pack import plan_json, show_packs
from packtrain.cli.plan import planned_json, show_planned
from packtrain.cli.terminal import ElapsedColumn, Terminal, errors, output, table
from packtrain.core.numbers import counted, format_number

if TYPE_CHECKING:
    from packtrain.demo import DemoTraining, RunStanding
    from packtrain.measuring.measurement import MeasureProgress


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the demo's data and results.")] = Path(
        "packtrain-demo"
    ),
    pictures: Annotated[int, typer.Option(min=16, help="Number of images to draw.")] = 320,
    model: Annotated[str, typer.Option("--model", "-m", help="The model to measure for.")] = "tiny:qwen2_5_vl",
    workers: Annotated[int | None, typer.Option("--workers", "-w", help="Worker processes.")] = None,
    train: Annotated[
        bool, typer.Option("--train/--no-train", help="Train a tiny model packed and padded, and compare.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Make a small synthetic dataset and run the whole pipeline on it, in about three minutes on two cores.

    It measures, plans and packs, checks that packing is correct, trains a tiny model packed and padded, and compares
    the two in report.html.
    """
    from packtrain.demo import run_demo

    bar = MeasureBar(quiet=as_json)

    def say(line: str) -> None:
        bar.__exit__()  # a line beside a bar would be glued to it
        if not as_json:
            output.print(line, markup=False)

    def progress(measured: MeasureProgress) -> None:
        bar.__enter__()  # the first time; later nothing
        bar.update(measured)

    with interruptible(), ExitStack() as open_bars:
        open_bars.push(bar)  # to be stopped, whatever happens
        bars = open_bars.enter_context(TrainingBars(errors, quiet=as_json))
        result = run_demo(
            out,
            pictures=pictures,
            model=model,
            workers=workers,
            train=train,
            say=say,
            progress=progress,
            training=bars.update,
        )
    if as_json:
        print_json(
            {
                "folder": str(result.folder),
                "measure": measured_json(result.measured),
                "plan": planned_json(result.planned),
                "pack": plan_json(result.packed.plan),
                "train": trained_json(result.trained),
            }
        )
        return
    show_measured(result.measured, output, then=False)
    show_planned(result.planned, output, then=False)
    show_packs(result.packed.plan, output)
    if result.trained is not None:
        show_trained(result.trained, output)
    yaml = escape(str(result.planned.files["recommended.yaml"]))
    output.print(f"The recommended config, for the demo's model: packtrain train {yaml}")
    output.print(f"Everything is in [bold]{escape(str(result.folder.resolve()))}[/]")
    output.print("next, with your own data: packtrain train --model MODEL --data DATA")


class TrainingBars:
    """One bar for each run, once it has started; nothing when quiet or without a terminal."""

    def __init__(self, console: Terminal, *, quiet: bool) -> None:
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
        loss = "" if standing.loss is None else f"loss {format_number('loss', standing.loss)}"
        self._bars.update(self._tasks[standing.mode], completed=standing.step, loss=loss)


def trained_json(trained: DemoTraining | None) -> dict[str, Any] | None:
    """The two runs for machines."""
    if trained is None:
        return None
    return {
        "verified": trained.check_report.passed,
        "reused": trained.reused,
        "runs": [str(folder) for folder in trained.folders],
        "page": str(trained.reported.page),
        **trained.reported.content,
    }


def show_trained(trained: DemoTraining, console: Terminal) -> None:
    """The two runs for people."""
    from packtrain.reports.run_page import cell, compared_rows

    content = trained.reported.content
    if trained.reused:
        console.print("Nothing has changed since both were trained: the runs are reused.")
    report = trained.check_report
    outcome = {"passed": "passed", "failed": "FAILED", "inconclusive": "inconclusive"}[report.outcome]
    console.print(f"Packing check {outcome}: {counted(len(report.checks), 'check')}.")
    compared = table(escape(content["headline"]), ("", *(escape(run["label"]) for run in content["runs"])), text=("",))
    for row in compared_rows(content):
        compared.add_row(row.name, *(cell(content, row, at) for at in range(len(content["runs"]))))
    console.print(compared)
    console.print(f"The comparison: [bold]{escape(str(trained.reported.page.resolve()))}[/]")
