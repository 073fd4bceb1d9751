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
