"""`packtrain bench`: each benchmark prints ratios measured in one run."""

from __future__ import annotations

from typing import Annotated

import typer

from packtrain.cli.common import Json, numbers, output, print_json


def measure(
    records: Annotated[int, typer.Option(min=50, help="Records for the comparison with the processor.")] = 400,
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Processes on both sides.")] = 2,
    memory: Annotated[
        str, typer.Option(help="Numbers of records at which memory is measured; empty for none.")
    ] = "10000,100000,1000000",
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model whose processor is the yardstick.")
    ] = "tiny:qwen2_5_vl",
    as_json: Json = False,
) -> None:
    """Measuring against the HF processor on the same records, against its own lower bound, and its memory."""
    from packtrain.bench.measure import bench_measure, show_bench

    result = bench_measure(records=records, workers=workers, memory_sizes=numbers("--memory", memory), model=model)
    if as_json:
        print_json(result)
    else:
        show_bench(result, output)
