"""`packtrain init`."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape

from packtrain.cli.common import write_new
from packtrain.cli.terminal import output
from packtrain.config.keys import Key
from packtrain.config.sections import SECTIONS
from packtrain.core.public import public
from packtrain.records.yaml_text import Dumper

_MODEL, _DATA = "Qwen/Qwen3-VL-2B-Instruct", "train.jsonl"
_BEGINNING = {"effective_batch_size": 16}  # a usual one; packs are as long as it needs
_WIDTH = 110
# What most people set, first in its section.
_FIRST = (
    *("model_name_or_path", "method", "dataset_path", "eval_path", "packing", "packing_length", "cutoff_len"),
    *("output_dir", "effective_batch_size", "learning_rate", "num_train_epochs", "max_steps", "lr_scheduler_type"),
    *("warmup_steps", "weight_decay", "save_steps", "eval_steps", "report_to"),
)
_HEAD = """\
# A run of packtrain: packtrain train FILE. Settings that begin with # are not set; their defaults are beside them.
# Any of them may also be set on the command line: packtrain train FILE training.learning_rate=1e-5
"""
_TAIL = "Every setting of transformers.TrainingArguments can be set here too."


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
    given: dict[str, object] = {"model_name_or_path": model, "dataset_path": public(data), **_BEGINNING}
    for name in ("model_name_or_path", "dataset_path"):  # found from any folder
        if os.path.exists(there := os.path.expanduser(str(given[name]))):
            given[name] = os.path.abspath(there)
    text = sample_config({**given, "output_dir": output_dir} if output_dir is not None else given)
    write_new(file, text)
    output.print(f"Wrote [bold]{escape(str(file))}[/].")
    if public(data) != data:
        note = "credentials in the URL are not written: pass data.dataset_path=URL to train"
        output.print(f"note: {note}")
    output.print(f"next: packtrain train {escape(str(file))} --dry-run")


def sample_config(given: Mapping[str, object]) -> str:
    """The text of a config in which these settings are set."""
    parts = [_HEAD]
    for name, section in SECTIONS.items():
        lines = [f"{name}:"]
        keys = section.known()
        for key in (*(key for key in _FIRST if key in keys), *(key for key in keys if key not in _FIRST)):
            if keys[key].help:
                lines += _setting(key, keys[key], given)
        if name == "training":
            lines += ["", f"  # {_TAIL}"]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _setting(name: str, one: Key, given: Mapping[str, object]) -> Iterator[str]:
    default = f"Default: {one.shown}." if one.shown else ""
    comment = " ".join(filter(None, (one.help, default)))
    yield ""
    yield from textwrap.wrap(comment, _WIDTH, initial_indent="  # ", subsequent_indent="  # ")
    if name in given:
        yield f"  {name}: {_yaml_value(given[name])}"
    else:
        yield f"  #{name}:" + ("" if one.default is None or one.shown else f" {_yaml_value(one.default)}")


def _yaml_value(value: Any) -> str:
    return (
        yaml.dump(value, Dumper=Dumper, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
    )
