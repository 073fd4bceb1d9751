"""`packtrain init`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from packtrain.cli.common import output
from packtrain.core.errors import ConfigError
from packtrain.core.public import public

_MODEL, _DATA = "Qwen/Qwen3-VL-2B-Instruct", "train.jsonl"
# A step of a usual size: by default a pack is as long as the model takes, and holds as many samples as fit.
_BEGINNING = {"packing_length": 8192, "effective_batch_size": 16}


def init(
    file: Annotated[Path, typer.Argument(help="The config to write.")] = Path("run.yaml"),
    model: Annotated[str, typer.Option("--model", "-m", help="A model folder, hub name or tiny:FAMILY.")] = _MODEL,
    data: Annotated[
        str, typer.Option("--data", "-d", help="The data to train on: a file, a folder or a hub name.")
    ] = _DATA,
    output_dir: Annotated[
        str | None,
        typer.Option("--output-dir", "-o", help="The run's folder. Default: in runs/, by the config's name."),
    ] = None,
) -> None:
    """Write a config to begin with: every setting, its meaning and its default, as comments.

    Length and step are usual ones; packtrain plan finds those that suit your data and GPUs.

    Example: packtrain init run.yaml --model Qwen/Qwen3-VL-2B-Instruct --data train.jsonl
    """
    from packtrain.app.config.sample import sample_config

    given: dict[str, object] = {"model_name_or_path": model, "dataset_path": public(data), **_BEGINNING}
    text = sample_config({**given, "output_dir": output_dir} if output_dir is not None else given)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        raise ConfigError(str(file), got="a file of that name", fix="name another one; it is not overwritten") from None
    output.print(f"Wrote [bold]{escape(str(file))}[/].", soft_wrap=True)
    if given["dataset_path"] != data:
        said = "user, password and signature of the URL are not in it: give data.dataset_path=URL to train"
        output.print(f"note: {said}", soft_wrap=True)
    output.print(f"next: packtrain train {escape(str(file))} --dry-run", soft_wrap=True)
