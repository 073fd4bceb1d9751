"""`packtrain init`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from packtrain.cli.terminal import output
from packtrain.core.errors import ConfigError
from packtrain.core.public import public

_MODEL, _DATA = "Qwen/Qwen3-VL-2B-Instruct", "train.jsonl"
_BEGINNING = {"effective_batch_size": 16}  # a usual one; packs are as long as it needs


def init(
    file: Annotated[Path, typer.Argument(help="The config to write.")] = Path("run.yaml"),
    model: Annotated[str, typer.Option("--model", "-m", help="A model folder, hub name or tiny:FAMILY.")] = _MODEL,
    data: Annotated[
        str, typer.Option("--data", "-d", help="The data to train on: a file, a folder or a hub name.")
    ] = _DATA,
    output_dir: Annotated[
        str | None,
        typer.Option("--output-dir", "-o", help="The run's folder. Default: runs/, named after the config."),
    ] = None,
) -> None:
    """Write a starter config: every setting, with its meaning and default as comments.

    The effective batch size is 16; packtrain plan finds the packing length and batch size for your data and GPUs.

    Example: packtrain init run.yaml --model Qwen/Qwen3-VL-2B-Instruct --data train.jsonl
    """
    from packtrain.config.sample import sample_config

    given: dict[str, object] = {"model_name_or_path": model, "dataset_path": public(data), **_BEGINNING}
    for name in ("model_name_or_path", "dataset_path"):  # found from any folder
        if os.path.exists(there := os.path.expanduser(str(given[name]))):
            given[name] = os.path.abspath(there)
    text = sample_config({**given, "output_dir": output_dir} if output_dir is not None else given)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(
            str(file), got="an existing file", fix="choose another name; files are not overwritten"
        ) from None
    output.print(f"Wrote [bold]{escape(str(file))}[/].")
    if public(data) != data:
        said = "credentials in the URL are not written: pass data.dataset_path=URL to train"
        output.print(f"note: {said}")
    output.print(f"next: packtrain train {escape(str(file))} --dry-run")
