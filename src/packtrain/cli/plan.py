"""`packtrain plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packtrain.cli.common import Json, numbers, output, print_json, progress_console
from packtrain.cli.interruptible import STARTS_OVER, interruptible


def plan(
    costs: Annotated[Path, typer.Argument(help="A folder written by packtrain measure.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the report and its files.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A model folder, hub name or tiny:FAMILY. Default: the one the data were measured for.",
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            help="GPU name: h200, h100, a100-80, l40s, 4090, mi300x, ... For an unlisted one, a similar GPU and what "
            "differs, such as h100,memory_gib=64,tflops=400."
        ),
    ] = "h200",
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of GPUs.", show_default="the config's num_gpus, or 1")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Your current training config; its settings are kept.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Packing lengths to try, such as 8192,16384. Default: from 8,000 to at least 24,000."),
    ] = None,
    max_images_per_pack: Annotated[
        str | None, typer.Option(help="Limits to try in addition to none, such as 8,16.")
    ] = None,
    max_patches_per_pack: Annotated[str | None, typer.Option(help="Limits to try in addition to none.")] = None,
    max_samples_per_pack: Annotated[str | None, typer.Option(help="Limits to try in addition to none.")] = None,
    method: Annotated[str | None, typer.Option(help="full, lora, dora or qlora. Default: full.")] = None,
    sharding: Annotated[str | None, typer.Option(help="ddp, zero1, zero2, zero3 or fsdp. Default: ddp.")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Gradient checkpointing. Default: on.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Micro-batch size of your current padded run. Default: 2.")
    ] = None,
    effective_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per optimizer step, which the plan keeps. Default: about 128.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs. Default: 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed. Default: the config's, or 0.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into a non-empty folder; other files in it are kept.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the best config for your model, data and GPUs; writes the config and an HTML report with the reasons.

    Packs the dataset at many lengths, predicts memory and throughput of each, and compares them with padded batches.

    Example: packtrain plan costs --model Qwen/Qwen3-VL-2B-Instruct --gpu h200 --gpus 4 --out report
    """
    from packtrain.app.plan import plan as make_plan
    from packtrain.cli.show.plan import PlanBar, planned_json, show_planned

    limits = {
        "max_images_per_pack": max_images_per_pack,
        "max_patches_per_pack": max_patches_per_pack,
        "max_samples_per_pack": max_samples_per_pack,
    }
    with interruptible(STARTS_OVER), PlanBar(progress_console(), quiet=as_json) as bar:
        planned = make_plan(
            costs,
            out=out,
            model=model,
            gpu=gpu,
            gpus=gpus,
            config=config,
            lengths=numbers("--lengths", lengths) if lengths is not None else None,
            limits={name: numbers("--" + name.replace("_", "-"), text) for name, text in limits.items() if text},
            setup={
                "method": method,
                "sharding": sharding,
                "gradient_checkpointing": checkpointing,
                "vision_checkpointing": checkpointing,
            },
            baseline={
                "per_device_batch_size": batch_size,
                "effective_batch_size": effective_batch_size,
                "epochs": epochs,
            },
            seed=seed,
            overwrite=overwrite,
            progress=bar.update,
        )
    if as_json:
        print_json(planned_json(planned))
    else:
        show_planned(planned, output)
