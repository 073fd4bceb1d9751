"""`packtrain bench`: each benchmark prints ratios measured in one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from packtrain.cli.common import Json, numbers, print_json
from packtrain.cli.interruptible import STARTS_OVER, interruptible
from packtrain.cli.terminal import errors, output
from packtrain.core.errors import ConfigError


def measure(
    records: Annotated[int, typer.Option(min=50, help="Records to compare with the processor on.")] = 400,
    workers: Annotated[
        int, typer.Option("--workers", "-w", min=1, help="Worker processes, the same on both sides.")
    ] = 2,
    memory: Annotated[
        str, typer.Option(help="Dataset sizes to measure memory at; empty for none.")
    ] = "10000,100000,1000000",
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model whose processor is the baseline.")
    ] = "tiny:qwen2_5_vl",
    as_json: Json = False,
) -> None:
    """Measuring against the HF processor on the same records, against its own lower bound, and its memory."""
    from packtrain.bench.measure import bench_measure
    from packtrain.bench.printing import show_measure

    result = bench_measure(records=records, workers=workers, memory_sizes=numbers("--memory", memory), model=model)
    if as_json:
        print_json(asdict(result))
    else:
        show_measure(result, output)


def pack(
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="npz, npy, csv, text, costs.parquet or a cost table. Default: synthetic, with the lengths of LVIS."
        ),
    ] = None,
    capacities: Annotated[str, typer.Option(help="Packing lengths, in tokens.")] = "20000,8192,4096",
    sizes: Annotated[
        str, typer.Option(help="Dataset sizes to measure time and memory at; empty for none.")
    ] = "1000000,10000000,100000000",
    several: Annotated[int, typer.Option(min=1000, help="Samples in the mixtures with several limits.")] = 200_000,
    others: Annotated[
        bool, typer.Option("--others/--no-others", help="Also run packers of other installed packages.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Packing against the bound, against other packages' packers, by size, with several limits; equal work.

    Example: packtrain bench pack --lengths costs --capacities 16384 --sizes ""
    """
    from packtrain.bench.pack import bench_pack
    from packtrain.bench.printing import show_pack

    with interruptible(), errors.status("warming up") as status:
        result = bench_pack(
            lengths,
            numbers("--capacities", capacities),
            numbers("--sizes", sizes),
            others,
            lambda doing: status.update(doing),
            several=several,
        )
    if as_json:
        print_json(asdict(result))
    else:
        show_pack(result, output)


def loader(
    samples: Annotated[
        int | None, typer.Option(min=8, help="Samples, one image each, for measuring speed. Default: 64 (16).")
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            min=100,
            help="Rows of the larger dataset for startup time and memory. Default: 1,000,000 (100,000).",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=2, help="Steps to measure memory over. Default: 2,000 (300).")
    ] = None,
    workers: Annotated[
        str, typer.Option("--workers", "-w", help="Worker counts; memory is measured with the largest.")
    ] = "0,1,2",
    quick: Annotated[bool, typer.Option("--quick", help="Use smaller sizes: the defaults in brackets.")] = False,
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model whose processor is the baseline.")
    ] = "tiny:qwen3_vl",
    as_json: Json = False,
) -> None:
    """Delivering packs: speed against a plain DataLoader, time to the first batch and on resuming, memory.

    Example: packtrain bench loader --quick --workers 0,2
    """
    from packtrain.bench.loader import bench_loader
    from packtrain.bench.printing import show_loader

    usual = (16, 100_000, 300) if quick else (64, 1_000_000, 2_000)
    given = (samples, rows, steps)
    sizes = [own if one is None else one for one, own in zip(given, usual, strict=True)]
    with interruptible(STARTS_OVER), errors.status("making data") as status:
        result = bench_loader(
            samples=sizes[0],
            rows=sizes[1],
            steps=sizes[2],
            workers=_worker_counts(workers),
            model=model,
            progress=lambda doing: status.update(doing),
        )
    if as_json:
        print_json(asdict(result))
    else:
        show_loader(result, output)


def train(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="qwen3-vl-2b, qwen3-8b (text; LoRA, DoRA and QLoRA), tiny or tiny-text."),
    ] = None,
    rows: Annotated[
        str, typer.Option(help="Only rows whose names contain one of these words, separated by semicolons.")
    ] = "",
    tokens: Annotated[
        int | None, typer.Option(min=100, help="Real tokens to time each row on. Default: 160,000 (60,000).")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-w", min=0, help="DataLoader workers.")] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="Use fewer tokens: the defaults in brackets.")] = False,
    out: Annotated[Path | None, typer.Option(help="JSON file for the table, written after each row.")] = None,
    as_json: Json = False,
) -> None:
    """Training on one GPU: padded and packed, eager and compiled, with and without checkpointing, full and adapters.

    By default a model in the shape of Qwen3-VL-2B, and a tiny one where there is no GPU. The memory that `packtrain`
    predicts is shown beside what torch allocated.

    Example: packtrain bench train --rows "packed 16,384;padded" --out speed.json
    """
    import torch

    from packtrain.modeling.load import quiet_libraries

    quiet_libraries()
    from packtrain.bench.printing import show_train
    from packtrain.bench.train import bench_train
    from packtrain.bench.train_loop import TINY_SETTINGS, LoopSettings
    from packtrain.bench.train_rows import TINY, bench_model

    name = model or ("qwen3-vl-2b" if torch.cuda.is_available() else TINY)
    usual = LoopSettings(tokens=60_000 if quick else 160_000, workers=workers)
    settings = replace(TINY_SETTINGS if bench_model(name).tiny else usual, workers=workers)
    if tokens is not None:
        settings = replace(settings, tokens=tokens)
    words = [word.strip() for word in rows.split(";") if word.strip()]
    with interruptible(STARTS_OVER), errors.status("starting") as status:
        result = bench_train(
            model=name,
            only=words,
            settings=settings,
            progress=lambda doing: status.update(doing),
            done=lambda result: _write_json(out, result),
        )
    if as_json:
        print_json(result)
    else:
        show_train(result, output)


def families(
    types: Annotated[
        str, typer.Option(help="Image-text types of transformers, separated by commas; empty for all.")
    ] = "",
    workers: Annotated[int, typer.Option("--workers", "-w", min=1, help="Types tried at the same time.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Markdown file for the table, such as docs/families.md.")] = None,
    as_json: Json = False,
) -> None:
    """Which image-text types of the installed transformers train here, packed and padded, as tiny random models.

    Each is verified with images and with text alone, and trained for two padded steps, in fp32 on the CPU.

    Example: packtrain bench families --types glm4v,mistral3
    """
    from packtrain.bench.families import bench_families, families_page
    from packtrain.bench.printing import show_families

    words = [word.strip() for word in types.split(",") if word.strip()]
    with interruptible(STARTS_OVER), errors.status("starting") as status:
        result = bench_families(words, workers=workers, progress=lambda doing: status.update(doing))
    if out is not None:
        options = [*(["--types", ",".join(words)] if words else []), "--out", str(out)]
        out.write_text(families_page(result, " ".join(["packtrain bench families", *options])), encoding="utf-8")
    if as_json:
        print_json(asdict(result))
    else:
        show_families(result, output)


def _write_json(out: Path | None, result: Mapping[str, object]) -> None:
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _worker_counts(text: str) -> tuple[int, ...]:
    """Different numbers, 0 among them where the loading process itself does the work."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and part.isascii() for part in parts):
        raise ConfigError("--workers", got=text, expected="non-negative integers, such as 0,1,2")
    return tuple(sorted({int(part) for part in parts}))
