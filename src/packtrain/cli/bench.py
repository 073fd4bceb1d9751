"""`packtrain bench`: each benchmark prints ratios measured in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from packtrain.cli.common import Json, interruptible, numbers, output, print_json


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


def pack(
    lengths: Annotated[
        Path | None,
        typer.Option(help="npz, npy, csv, text, costs.parquet or a cost table. Default: a generated set, LVIS-shaped."),
    ] = None,
    capacities: Annotated[str, typer.Option(help="Tokens of a pack.")] = "20000,8192,4096",
    sizes: Annotated[
        str, typer.Option(help="Numbers of samples at which time and memory are shown; empty for none.")
    ] = "1000000,10000000,100000000",
    several: Annotated[int, typer.Option(min=1000, help="Samples of the mixtures with several limits.")] = 200_000,
    others: Annotated[
        bool, typer.Option("--others/--no-others", help="Run the packers of other packages that are installed.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Packing against the bound, against other packages' packers, by size, with several limits; equal work.

    Example: packtrain bench pack --lengths costs --capacities 16384 --sizes ""
    """
    from packtrain.bench.pack import bench_pack, show_bench

    with interruptible(), Console(stderr=True).status("warming up") as status:
        result = bench_pack(
            lengths,
            numbers("--capacities", capacities),
            numbers("--sizes", sizes),
            others,
            lambda doing: status.update(doing),
            several=several,
        )
    if as_json:
        print_json(result)
    else:
        show_bench(result, output)
