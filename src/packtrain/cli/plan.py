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
        typer.Option("--model", "-m", help="A model folder, hub name or tiny:FAMILY. Default: the one measured for."),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            help="Name of the GPU: h200, h100, a100-80, l40s, 4090, mi300x, ... One that is not listed: the nearest and"
            " what differs, as in h100,memory_gib=64,tflops=400."
        ),
    ] = "h200",
    gpus: Annotated[
        int | None, typer.Option(min=1, help="How many GPUs.", show_default="the config's num_gpus, or 1")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="The config you train with today; its choices are kept.")
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Packing lengths to try, such as 8192,16384. Default: 8,000 to 24,000 and more.")
    ] = None,
    max_images_per_pack: Annotated[str | None, typer.Option(help="Limits to try beside none, such as 8,16.")] = None,
    max_patches_per_pack: Annotated[str | None, typer.Option(help="Limits to try beside none.")] = None,
    max_samples_per_pack: Annotated[str | None, typer.Option(help="Limits to try beside none.")] = None,
    method: Annotated[str | None, typer.Option(help="full, lora, dora or qlora. Default: full.")] = None,
    sharding: Annotated[str | None, typer.Option(help="ddp, zero1, zero2, zero3 or fsdp. Default: ddp.")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Gradient checkpointing. Default: on.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of a micro-batch in the padded run of today. Default: 2.")
    ] = None,
    effective_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples per optimizer step, which are kept. Default: about 128.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs. Default: 1.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of everything that is drawn at random. Default: the config's, or 0.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into a folder that holds other files; those stay.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the best config for your model, data and GPUs, with the reasons, as files and one HTML page.

    Packs the dataset at many lengths, predicts memory and time of each, computes what padding would waste on the
    batches it would form, and recommends.

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
