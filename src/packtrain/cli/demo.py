"""`packtrain demo`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from packtrain.cli.common import Json, errors, output, print_json, progress_console
from packtrain.cli.interruptible import interruptible


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
    from packtrain.cli.show.demo import TrainingBars, show_trained, trained_json
    from packtrain.cli.show.pack import plan_json, show_plan
    from packtrain.cli.show.plan import planned_json, show_planned
    from packtrain.cli.show.terminal import MeasureBar, measured_json, show_measured
    from packtrain.demo.demo import run_demo
    from packtrain.measuring.measurement import MeasureProgress

    bar = MeasureBar("measuring", progress_console(), quiet=as_json)

    def say(line: str) -> None:
        bar.__exit__()  # a line beside a bar would be glued to it
        if not as_json:
            output.print(line, soft_wrap=True, markup=False)

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
    show_plan(result.packed.plan, (), output)
    if result.trained is not None:
        show_trained(result.trained, output)
    yaml = escape(str(result.planned.files["recommended.yaml"]))
    output.print(f"The recommended config, for the demo's model: packtrain train {yaml}", soft_wrap=True)
    output.print(f"Everything is in [bold]{escape(str(result.folder.resolve()))}[/]", soft_wrap=True)
    output.print("next, with your own data: packtrain train --model MODEL --data DATA", soft_wrap=True)
