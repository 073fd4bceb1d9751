"""`packtrain config`: configs of other systems in our own form, and what a config says."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from packtrain.cli.common import Json, print_json, write_new
from packtrain.cli.terminal import errors
from packtrain.core.errors import ConfigError

if TYPE_CHECKING:
    from packtrain.app.convert import Converted

_File = Annotated[Path, typer.Argument(help="A YAML file, a .py file with dataclasses, or a .sh file with arguments.")]


def convert(
    file: _File,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The config to write. Default: stdout.")] = None,
    leave_out: Annotated[
        bool, typer.Option("--leave-out", help="Drop unsupported keys; they are listed in the file.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a config of LLaMA-Factory, axolotl, TRL, ms-swift, lmms-engine or nanoVLM in packtrain's own keys.

    Every key is accounted for: what it maps to, why it has no effect, or why it is not supported. With unsupported
    keys, nothing is written without --leave-out. Several datasets become a mixture file beside the config.

    packtrain train and packtrain plan --config also read such a file directly.

    Example: packtrain config convert qwen2vl_lora_sft.yaml --out run.yaml

    Example: packtrain config convert sft.sh --leave-out > run.yaml
    """
    from packtrain.app.convert import convert as read

    converted = read(file)
    if converted.mixture and out is None:
        got = f"{len(converted.mixture)} datasets, which need a mixture file of their own"
        raise ConfigError("config convert", got=got, fix="set the config's path: --out run.yaml")
    mixture = out.with_name(f"{out.stem}.datasets.yaml") if converted.mixture and out is not None else None
    if mixture is not None:
        converted = replace(
            converted, config=replace(converted.config, data=replace(converted.config.data, dataset_path=str(mixture)))
        )
    refused = bool(converted.refused) and not leave_out
    if as_json:
        print_json(_plain(converted) | {"written": None if refused or out is None else str(out)})
    else:
        _show(replace(converted, refused=()) if refused else converted)  # then the error says it
    if refused:
        if as_json:
            raise typer.Exit(2)
        fix = "change these keys, or drop them with --leave-out"
        raise ConfigError(str(file), problems=converted.refused, expected="keys that packtrain supports", fix=fix)
    text = converted.text(of=file.name)
    if out is None:
        if not as_json:
            sys.stdout.write(text)
        return
    for path, content in ((out, text), (mixture, converted.mixture_text(beside=out.parent) if mixture else "")):
        if path is not None:
            write_new(path, content)
            errors.print(f"Wrote [bold]{escape(str(path))}[/].")
    errors.print(f"next: packtrain train {escape(str(out))} --dry-run")


def show(
    file: _File,
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides, such as data.packing=false.")] = None,
    as_json: Json = False,
) -> None:
    """Print the resolved config, with all that it extends, in packtrain's own keys.

    Example: packtrain config show leaf.yaml training.learning_rate=1e-5
    """
    from packtrain.app.convert import config_sections, sections_text
    from packtrain.config.data_options import section_defaults
    from packtrain.config.run_config import load_config

    config, notes = section_defaults(load_config(file, overrides or ()))
    if as_json:
        print_json({"config": config_sections(config), "notes": [*config.notes, *notes]})
        return
    for note in (*config.notes, *notes):
        errors.print(f"[yellow]note:[/] {escape(note)}")
    sys.stdout.write(sections_text(config))


def _plain(converted: Converted) -> dict[str, object]:
    from packtrain.app.convert import config_sections

    return {
        "config": config_sections(converted.config),
        "systems": list(converted.systems),
        "read_as": list(converted.read_as),
        "no_effect": dict(converted.no_effect),
        "refused": list(converted.refused),
        "missing": list(converted.missing),
        "notes": list(converted.notes),
        "mixture": [dict(one) for one in converted.mixture],
    }


def _show(converted: Converted) -> None:
    """The account, on stderr: stdout may be the config."""
    for title, lines in (
        (f"read as ({' and '.join(converted.systems) or 'packtrain'})", converted.read_as),
        ("no effect here", [f"{key}: {why}" for key, why in converted.no_effect.items()]),
        ("different here", converted.notes),
        ("missing", converted.missing),
        ("not supported", converted.refused),
    ):
        if lines:
            errors.print(f"[bold]{escape(title)}[/]")
        for line in lines:
            errors.print(f"  {escape(line)}")
