"""The command line: verbs only. Every verb calls one function of the library and shows what it returned."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

import packtrain
from packtrain.core.errors import ConfigError, PacktrainError

app = typer.Typer(
    help="Measure, pack and train multimodal datasets at the speed the GPUs have.\n\nStart with: packtrain demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(help="Benchmarks: each prints ratios measured in one run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

# Paths and data appear in what is printed: nothing in them may turn into colours or emoji, or be broken into lines.
_errors = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
_output = Console(highlight=False, emoji=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def main() -> None:
    """Run the command line; user mistakes are printed without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that are not UTF-8
    try:
        app()
    except PacktrainError as error:
        _errors.print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a folder that cannot be written
        _errors.print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(1)
    except (KeyboardInterrupt, _Interrupted):
        _errors.print("\n[yellow]interrupted[/]; the same command continues from what is complete")
        sys.exit(1)


class _Interrupted(Exception):
    """Ctrl-C in the middle of a command: typer would end a KeyboardInterrupt itself, with words of its own."""


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"packtrain {packtrain.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Measure, pack and train multimodal datasets at the speed the GPUs have."""


@app.command("measure")
def _measure(
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

    with _progress("measuring", quiet=as_json) as progress:
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
                object_template=_text_of(object_template) if object_template else None,
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
            seed=seed,
            progress=progress,
        )
    from packtrain.app.show import measured_json, show_measured

    if as_json:
        _print_json(measured_json(outcome))
    else:
        show_measured(outcome, _output)


@app.command("demo")
def _demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the demo's data and results.")] = Path(
        "packtrain-demo"
    ),
    pictures: Annotated[int, typer.Option(min=16, help="How many pictures to draw.")] = 320,
    model: Annotated[str, typer.Option("--model", "-m", help="The model to measure for.")] = "tiny:qwen2_5_vl",
    workers: Annotated[int | None, typer.Option("--workers", "-w", help="Worker processes.")] = None,
    as_json: Json = False,
) -> None:
    """Make a small dataset that looks like yours and run the whole pipeline on it. Takes less than two minutes."""
    from packtrain.app.demo import run_demo
    from packtrain.app.show import measured_json, show_measured

    def say(line: str) -> None:
        if not as_json:
            _output.print(line, soft_wrap=True, markup=False)

    with _progress("measuring", quiet=as_json) as progress:
        result = run_demo(out, pictures=pictures, model=model, workers=workers, say=say, progress=progress)
    if as_json:
        _print_json({"folder": str(result.folder), "measure": measured_json(result.measured)})
    else:
        show_measured(result.measured, _output)
        _output.print(f"Everything is in [bold]{escape(str(result.folder.resolve()))}[/]", soft_wrap=True)


@bench.command("measure")
def _bench_measure(
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

    if not all(size.isdigit() for size in memory.split(",") if size):
        raise ConfigError("--memory", got=memory, expected="numbers of records, such as 10000,100000")
    sizes = [int(size) for size in memory.split(",") if size]
    result = bench_measure(records=records, workers=workers, memory_sizes=sizes, model=model)
    if as_json:
        _print_json(result)
    else:
        show_bench(result, _output)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--object-template", got=f"{path}: {error}", expected="a text file in UTF-8") from None


@contextmanager
def _progress(verb: str, *, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A progress bar on stderr: how far, how fast, how long still, how many were skipped."""
    from packtrain.app.show import MeasureBar

    try:
        with MeasureBar(verb, Console(stderr=True), quiet=quiet) as bar:
            yield bar.update
    except KeyboardInterrupt:
        raise _Interrupted from None


if __name__ == "__main__":
    main()
