"""`packtrain calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from packtrain.cli.common import Json, print_json
from packtrain.cli.interruptible import STARTS_OVER, interruptible
from packtrain.cli.terminal import Bar, Terminal, output, table
from packtrain.core.errors import ConfigError
from packtrain.core.numbers import GIB, exact_percent, percent, shown, signed_percent

if TYPE_CHECKING:
    from packtrain.app.calibrate import CalibrationOutcome
    from packtrain.predicting.calibration import Predicted

_COLUMNS = ("setting", "", "step s", "predicted", "off", "GiB", "predicted", "off", "reserved", "context")


def calibrate(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A model folder, a known shape or tiny:FAMILY. Default: several shapes."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Measure fewer settings, as a smoke test.")] = False,
    held_out: Annotated[
        bool, typer.Option("--held-out/--no-held-out", help="Also measure held-out settings, to evaluate the fit.")
    ] = True,
    mode: Annotated[str, typer.Option(help="both, eager or compiled: which layers to measure.")] = "both",
    only: Annotated[
        str,
        typer.Option(
            help="Measure only settings whose names contain one of these words, separated by ;, and keep the others "
            "as stored."
        ),
    ] = "",
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: the GPU.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The GPU's name, if the driver's name for it is unknown.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Also write the result here, and a Markdown table beside it.")
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(help="Refit to the measurements in this file, from any machine, without measuring."),
    ] = None,
    budget: Annotated[float, typer.Option(help="Time budget in seconds: no setting starts after it.")] = 400.0,
    as_json: Json = False,
) -> None:
    """Fit the memory and time models to this GPU, in a few minutes.

    Measures training steps of random models: full and LoRA, packed and padded, with and without checkpointing and
    torch.compile.
    Later plans and runs on this kind of GPU use the result. Exit code 1: nothing could be fitted.

    Example: packtrain calibrate --out calibration.json

    Example: packtrain calibrate --again calibration.json
    """
    from packtrain.app.calibrate import calibrate as measure
    from packtrain.app.calibrate import refit

    if again is not None and not again.is_file():
        got = f"{again}, which {'is a folder' if again.is_dir() else 'does not exist'}"
        raise ConfigError("--again", got=got, expected="a file that packtrain calibrate --out wrote")
    with interruptible(STARTS_OVER), Bar("calibrating", quiet=as_json) as bar:
        if again is not None:
            outcome = refit(again, out=out)
        else:
            outcome = measure(
                model=model,
                quick=quick,
                held_out=held_out,
                modes=mode,  # type: ignore[arg-type]
                only=[word.strip() for word in only.split(";") if word.strip()],
                device=device,
                gpu=gpu,
                out=out,
                budget=budget,
                progress=bar.show,
            )
    fitted = outcome.calibration is not None and bool(outcome.calibration.fits)
    if out is not None and fitted:
        out.with_suffix(".md").write_text(markdown(outcome), encoding="utf-8")
    if as_json:
        print_json(outcome.as_json())
    else:
        show_calibration(outcome, output)
    if not fitted:
        raise typer.Exit(1)


def show_calibration(outcome: CalibrationOutcome, console: Terminal) -> None:
    """Measured beside predicted, and how near that is."""
    if outcome.calibration is None:
        console.print(f"[yellow]no GPU that torch can use[/]: on an {outcome.gpu} these settings would be measured")
        for name in outcome.trials:
            console.print(f"  {escape(shown(name))}")
        console.print("next: run it on the GPU machine, or try --device cpu --quick")
        return
    measured = outcome.calibration
    about = f"{measured.device}, torch {measured.torch}, transformers {measured.transformers}, {measured.date}"
    fits = table(escape(shown(about)), ("setting", "step s", "off", "GiB", "off", "reserved", "context"), ("setting",))
    fits.columns[0].min_width = 30
    for row in outcome.rows:
        name, used, seconds, _, time_off, memory, _, memory_off, reserved, context = map(escape, cells(row))
        mark = "" if used == "fit" else " [bold](held out)[/]"
        fits.add_row(name + mark, seconds, time_off, memory, memory_off, reserved, context)
    console.print(fits)
    for one in outcome.failed:
        console.print(f"[yellow]not measured:[/] {escape(shown(one.name))}: {escape(shown(one.error, 400))}")
    for name in outcome.skipped:
        console.print(f"[yellow]skipped (out of budget):[/] {escape(shown(name))}")
    console.print(summary(outcome))
    for path in outcome.files if measured.fits else ():
        console.print(f"stored in {escape(str(path))}")


def summary(outcome: CalibrationOutcome) -> str:
    """How near held-out settings are predicted."""
    from packtrain.app.calibrate import MEMORY_GOAL, TIME_GOAL

    held_out = outcome.held_out
    if not held_out:
        return "nothing was held out, so nothing is known about how near predictions come"
    time = max(abs(row.time_error) for row in held_out)
    memory = max((abs(row.memory_error) for row in held_out if row.memory_error is not None), default=None)
    text = f"{len(held_out)} held-out settings: time at most {percent(time)} off"
    text += f", memory at most {percent(memory)} off" if memory is not None else ", no memory was measured"
    missed = len(outcome.missed())
    goals = f"(goals {exact_percent(TIME_GOAL)} and {exact_percent(MEMORY_GOAL)})"
    return f"{text} {goals}" if not missed else f"{text} {goals}; {missed} of them miss a goal"


def markdown(outcome: CalibrationOutcome) -> str:
    """The table for documentation."""
    measured = outcome.calibration
    if measured is None:
        return ""
    lines = [
        f"{measured.device}, torch {measured.torch}, transformers {measured.transformers}, {measured.date}.",
        "",
        "| " + " | ".join(column or "used for" for column in _COLUMNS) + " |",
        "|" + "---|" * len(_COLUMNS),
        *("| " + " | ".join(cells(row)) + " |" for row in outcome.rows),
        "",
        summary(outcome).capitalize() + ".",
        "",
    ]
    return "\n".join(lines)


def cells(row: Predicted) -> tuple[str, ...]:
    """One line of the table."""
    one = row.measurement
    memory = ("-", "-", "-", "-", "-")
    if row.memory_error is not None:
        sizes = (one.allocated, row.allocated, one.reserved, one.context)
        measured, predicted, reserved, context = (f"{size / GIB:.2f}" for size in sizes)
        memory = (measured, predicted, signed_percent(row.memory_error), reserved, context)
    used = "held out" if row.held_out else "fit"
    return (one.name, used, f"{one.seconds:.3f}", f"{row.seconds:.3f}", signed_percent(row.time_error), *memory)
