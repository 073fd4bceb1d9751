"""`packtrain measure`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from packtrain.cli.common import Json, measuring, output, print_json, text_of


def measure(
    data: Annotated[
        str,
        typer.Argument(
            help="A file or folder (json, jsonl, parquet, arrow, tar shards, HF dataset), a YAML mixture or a hub name."
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model folder, a hub name, or tiny:FAMILY for a random small one.")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder for costs.parquet, media.parquet, measure.json and ledger.jsonl."),
    ],
    media_root: Annotated[
        Path | None, typer.Option(help="Where relative media paths start. Default: the data file's folder.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers",
            "-w",
            help="Worker processes. Default: one for each core. The result is the same for any number.",
        ),
    ] = None,
    dataset_format: Annotated[
        str | None,
        typer.Option(help="json, jsonl, parquet, arrow, hf_dataset, webdataset, yaml. Default: recognised."),
    ] = None,
    dataset_type: Annotated[
        str, typer.Option(help="vision (text, images, video) or fineweb_edu (plain text).")
    ] = "vision",
    split: Annotated[str, typer.Option(help="Which split of a Hugging Face dataset.")] = "train",
    subset: Annotated[
        str | None, typer.Option(help="Which configuration of a Hugging Face dataset that has several.")
    ] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Stream a Hugging Face dataset instead of downloading it.")
    ] = False,
    schema: Annotated[
        str | None, typer.Option(help="Chat schema of the records. Default: recognised for each record.")
    ] = None,
    formatting: Annotated[
        str | None, typer.Option(help="Your own module:function that turns a raw record into messages.")
    ] = None,
    object_ordering: Annotated[
        str, typer.Option(help="Order of annotated objects: sorted, random or as_is.")
    ] = "sorted",
    emit_norm: Annotated[
        str, typer.Option(help="Coordinates of objects: none (as they are), norm100, norm1000.")
    ] = "none",
    object_template: Annotated[Path | None, typer.Option(help="File with your own Jinja template for objects.")] = None,
    loss_on: Annotated[
        str | None,
        typer.Option(help="assistant, completion or all. Default: assistant for chats, all for plain text."),
    ] = None,
    add_eos: Annotated[
        bool, typer.Option("--add-eos", help="Append the end token, unless it is there already.")
    ] = False,
    min_pixels: Annotated[int | None, typer.Option(help="Smallest image, in pixels (Qwen-VL).")] = None,
    max_pixels: Annotated[int | None, typer.Option(help="Largest image, in pixels (Qwen-VL).")] = None,
    max_img_size: Annotated[
        int | None, typer.Option(help="Longest edge of an image (Idefics3, SmolVLM, nanoVLM).")
    ] = None,
    num_frames: Annotated[int | None, typer.Option(help="Frames sampled from a video.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames sampled per second of video.")] = None,
    max_frames: Annotated[int | None, typer.Option(help="Most frames sampled from a video.")] = None,
    limit: Annotated[int | None, typer.Option(help="Measure a random sample of this many records.")] = None,
    source: Annotated[list[str] | None, typer.Option(help="Only this source of a mixture; may be repeated.")] = None,
    min_seconds: Annotated[float | None, typer.Option(help="Leave out shorter videos.")] = None,
    max_seconds: Annotated[float | None, typer.Option(help="Leave out longer videos.")] = None,
    max_images_per_sample: Annotated[int | None, typer.Option(help="Leave out records with more images.")] = None,
    max_sample_length: Annotated[int | None, typer.Option(help="Leave out records with more tokens.")] = None,
    allow_outside_root: Annotated[
        bool, typer.Option("--allow-outside-root", help="Allow media outside the media root (absolute paths, links).")
    ] = False,
    on_error: Annotated[
        str, typer.Option(help="skip (into the ledger) or fail at the first unusable record.")
    ] = "skip",
    max_failure_rate: Annotated[
        float, typer.Option(help="Stop when more than this share of records is unusable.")
    ] = 0.05,
    check: Annotated[
        int, typer.Option(help="Records to encode again with the real processor; 0 turns the check off.")
    ] = 32,
    content_hash: Annotated[
        bool, typer.Option("--content-hash", help="Recognise changed data files by content, not by size and time.")
    ] = False,
    template_date: Annotated[
        str | None,
        typer.Option(help="The day, YYYY-MM-DD, for chat templates that write the date of today. Default: today."),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster. Default: one started on this machine.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything that is drawn at random.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure what every record will cost: tokens, patches, images, frames; exact, from headers alone.

    Broken records go to ledger.jsonl with the reason. The same command continues an interrupted run, and does nothing
    when nothing has changed.

    Example: packtrain measure train.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct --out costs
    """
    from packtrain.app.measure import measure_outcome
    from packtrain.records.schemas.convert import SchemaOptions

    with measuring("measuring", quiet=as_json) as progress:
        outcome = measure_outcome(
            data,
            model=model,
            out=out,
            media_root=media_root,
            dataset_format=dataset_format,
            dataset_type=dataset_type,
            split=split,
            subset=subset,
            streaming=streaming,
            workers=workers,
            engine=engine,  # type: ignore[arg-type]
            address=address,
            processor_config={
                "min_pixels": min_pixels,
                "max_pixels": max_pixels,
                "max_img_size": max_img_size,
                "num_frames": num_frames,
                "fps": fps,
                "max_frames": max_frames,
            },
            loss_on=loss_on,  # type: ignore[arg-type]
            add_eos=add_eos,
            schema=SchemaOptions(
                schema=schema,
                formatting=formatting,
                object_ordering=object_ordering,
                emit_norm=emit_norm,
                object_template=text_of("--object-template", object_template) if object_template else None,
                seed=seed,
            ),
            limit=limit,
            sources=tuple(source or ()),
            min_seconds=min_seconds,
            max_seconds=max_seconds,
            max_images_per_sample=max_images_per_sample,
            max_sample_length=max_sample_length,
            allow_outside_root=allow_outside_root,
            on_error=on_error,  # type: ignore[arg-type]
            max_failure_rate=max_failure_rate,
            check=check,
            content_hash=content_hash,
            template_date=template_date,
            seed=seed,
            progress=progress,
        )
    from packtrain.app.show.terminal import measured_json, show_measured

    if as_json:
        print_json(measured_json(outcome))
    else:
        show_measured(outcome, output)
