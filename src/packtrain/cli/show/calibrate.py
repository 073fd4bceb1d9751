"""How a calibration looks in a terminal, and as the table that documentation keeps."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packtrain.app.calibrate import MEMORY_GOAL, TIME_GOAL, CalibrationOutcome
from packtrain.core.numbers import GIB, shown
from packtrain.predicting.calibration import Predicted

_COLUMNS = ("setting", "", "step s", "predicted", "off", "GiB", "predicted", "off", "reserved", "context")


def show_calibration(outcome: CalibrationOutcome, console: Console) -> None:
    """Measured beside predicted, and how near that is."""
    if outcome.calibration is None:
        console.print(f"[yellow]no GPU that torch can use[/]: on an {outcome.gpu} these settings would be measured")
        for name in outcome.trials:
            console.print(f"  {escape(shown(name))}", soft_wrap=True)
        console.print("next: run it on the GPU machine, or try --device cpu --quick")
        return
    known = outcome.calibration
    about = f"{known.device}, torch {known.torch}, transformers {known.transformers}, {known.date}"
    table = Table(title=escape(shown(about)), title_justify="left")
    table.add_column("setting", overflow="fold", min_width=30)
    for column in ("step s", "off", "GiB", "off", "reserved", "context"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in outcome.rows:
        name, used, seconds, _, time_off, memory, _, memory_off, reserved, context = map(escape, cells(row))
        mark = "" if used == "fit" else " [bold](held out)[/]"
        table.add_row(name + mark, seconds, time_off, memory, memory_off, reserved, context)
    console.print(table)
    for one in outcome.failed:
        console.print(
            f"[yellow]not measured:[/] {escape(shown(one.name))}: {escape(shown(one.error, 400))}", soft_wrap=True
        )
    for name in outcome.skipped:
        console.print(f"[yellow]skipped (out of budget):[/] {escape(shown(name))}", soft_wrap=True)
    console.print(summary(outcome), soft_wrap=True)
    for path in outcome.files if known.fits else ():
        console.print(f"stored in {escape(str(path))}", soft_wrap=True)


def summary(outcome: CalibrationOutcome) -> str:
    """How near held-out settings are predicted."""
    held_out = outcome.held_out
    if not held_out:
        return "nothing was held out, so nothing is known about how near predictions come"
    time = max(abs(row.time_error) for row in held_out)
    memory = max((abs(row.memory_error) for row in held_out if row.memory_error is not None), default=None)
    said = f"{len(held_out)} held-out settings: time at most {time:.1%} off"
    said += f", memory at most {memory:.1%} off" if memory is not None else ", no memory was measured"
    missed = len(outcome.missed())
    goals = f"(goals {TIME_GOAL:.0%} and {MEMORY_GOAL:.0%})"
    return f"{said} {goals}" if not missed else f"{said} {goals}; {missed} of them miss a goal"


def markdown(outcome: CalibrationOutcome) -> str:
    """The table for documentation."""
    known = outcome.calibration
    if known is None:
        return ""
    lines = [
        f"{known.device}, torch {known.torch}, transformers {known.transformers}, {known.date}.",
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
        found = (one.allocated, row.allocated, one.reserved, one.context)
        measured, predicted, reserved, context = (f"{size / GIB:.2f}" for size in found)
        memory = (measured, predicted, f"{row.memory_error:+.1%}", reserved, context)
    used = "held out" if row.held_out else "fit"
    return (one.name, used, f"{one.seconds:.3f}", f"{row.seconds:.3f}", f"{row.time_error:+.1%}", *memory)
