"""`packtrain report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from packtrain.cli.common import Json, print_json
from packtrain.cli.terminal import output


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders. Several are compared at equal samples.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="The HTML file. Default: report.html in the first folder, or comparison-OTHERS.html.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write report.html of a run: loss, speed, memory, warnings; or of several runs side by side.

    Also works while a run is training. Packed and padded runs are compared at equal samples.

    Example: packtrain report runs/packed runs/padded --out comparison.html
    """
    from packtrain.app.report import report as write

    result = write(runs, out)
    if as_json:
        print_json({"page": str(result.page), **result.content})
        return
    output.print(_line(result.content["headline"]), style="bold", markup=False)
    output.print(_line(result.content["lead"]), markup=False)
    if result.content["comparison"] is not None:
        output.print(_line(result.content["comparison"]["why"]), markup=False)
    for run in result.content["runs"]:
        if len(runs) > 1 and not run["complete"]:
            output.print(_line(f"{run['label']}: {run['ended']}"), markup=False)
    output.print(f"next: open [bold]{escape(str(result.page.resolve()))}[/]")


def _line(text: str) -> str:
    """Without the marks that keep names from turning a sentence, which terminals show as boxes."""
    return text.replace("\u2068", "").replace("\u2069", "")
