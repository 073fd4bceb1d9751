"""`packtrain calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packtrain.cli.common import Json, output, print_json, progress_console
from packtrain.cli.interruptible import STARTS_OVER, interruptible


def calibrate(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A model folder, a known shape or tiny:FAMILY. Default: several shapes."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer settings: to see that it works.")] = False,
    held_out: Annotated[
        bool, typer.Option("--held-out/--no-held-out", help="Measure settings to judge the fit by, too.")
    ] = True,
    mode: Annotated[str, typer.Option(help="both, eager or compiled: which layers are measured now.")] = "both",
    only: Annotated[
        str,
        typer.Option(
            help="Measure settings with one of these words in their names, separated by ;, and keep the stored others."
        ),
    ] = "",
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: the GPU.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The data sheet, where the driver's name is not known.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Keep a copy of the stored file here; a table .md beside it.")
    ] = None,
    again: Annotated[
        Path | None,
        typer.Option(
            help="Measure nothing: fit to the measurements of this file, from whichever machine, and store it."
        ),
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds after which no further setting is begun.")] = 400.0,
    as_json: Json = False,
) -> None:
    """Fit the memory and time models to this GPU, in a few minutes.

    Training steps of random models are measured: full and LoRA, packed and padded, recomputed or not, compiled or not.
    Plans and runs on this kind of GPU use the result from then on. Exit code 1: nothing could be fitted.

    Example: packtrain calibrate --out calibration.json

    Example: packtrain calibrate --again calibration.json
    """
    from packtrain.app.calibration.calibrate import calibrate as measure
    from packtrain.app.calibration.calibrate import refit
    from packtrain.cli.show.bars import Bar
    from packtrain.cli.show.calibrate import markdown, show_calibration

    with interruptible(STARTS_OVER), Bar("calibrating", progress_console(), quiet=as_json) as bar:
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
