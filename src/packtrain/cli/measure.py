"""`packtrain measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packtrain.cli.common import Json, measuring, output, print_json
from packtrain.cli.config_options import settings_of


@settings_of("measure")
def measure(
    data: Annotated[
        str,
        typer.Argument(
            help="A file or folder (json, jsonl, parquet, arrow, tar shards, HF dataset), a YAML mixture or a hub name."
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model folder, hub name or tiny:FAMILY (small, random weights).")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder for costs.parquet, media.parquet, measure.json and ledger.jsonl."),
    ],
    settings: dict[str, object],
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Stream a Hugging Face dataset instead of downloading it.")
    ] = False,
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster. Default: start one on this machine.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure what every record costs (tokens, patches, images, frames), exactly, from headers alone.

    Broken records go to ledger.jsonl with the reason. Rerunning the command continues an interrupted run, and does
    nothing if nothing has changed.

    Example: packtrain measure train.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct --out costs
    """
    from packtrain.app.measure import measure_outcome

    with measuring("measuring", quiet=as_json) as progress:
        outcome = measure_outcome(
            data,
            model=model,
            out=out,
            streaming=streaming,
            engine=engine,  # type: ignore[arg-type]
            address=address,
            seed=seed,
            progress=progress,
            **settings,
        )
    from packtrain.cli.show.terminal import measured_json, show_measured

    if as_json:
        print_json(measured_json(outcome))
    else:
        show_measured(outcome, output)
