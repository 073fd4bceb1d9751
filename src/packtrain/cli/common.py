"""Shared by the commands: values of options, JSON output, errors without a traceback."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from packtrain.cli.interruptible import CONTINUES, Interrupted, never_lost
from packtrain.cli.terminal import errors
from packtrain.core.artifacts import DiskFull
from packtrain.core.errors import ConfigError, PacktrainError, missing_package_error, system_error
from packtrain.core.public import public, visible, visible_json

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def run(app: typer.Typer) -> None:
    """Run the command line; user mistakes are printed without a traceback."""
    _speak_utf8()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that are not UTF-8
    warnings.showwarning = _show_warning
    logging.basicConfig(format="%(message)s", handlers=[_Logged()])
    try:
        with never_lost():
            app()
    except PacktrainError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(error.exit_code)
    except OSError as error:  # a folder that cannot be written
        shown_error = error if isinstance(error, DiskFull) else system_error(error)
        errors.print(f"[bold red]error:[/] {escape(str(shown_error))}")
        sys.exit(shown_error.exit_code if isinstance(shown_error, PacktrainError) else 1)
    except ImportError as error:
        errors.print(f"[bold red]error:[/] {escape(str(missing_package_error(error)))}")
        sys.exit(1)
    except (KeyboardInterrupt, Interrupted) as stop:
        errors.print(f"\n[yellow]interrupted[/]; {escape(str(stop) or CONTINUES)}")
        sys.exit(1)
    except Exception:  # a mistake of ours
        sys.stderr.write(visible(public(traceback.format_exc())))
        sys.exit(1)


def _speak_utf8() -> None:
    """Where the locale is C and Python was kept from UTF-8, begin again with it: files have any names."""
    if sys.getfilesystemencoding().lower() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONUTF8": "1"})


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    typer.echo(visible_json(json.dumps(value, indent=2, ensure_ascii=False, default=str)))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Show a warning as Python does, with control characters escaped."""
    text = warnings.formatwarning(message, category, filename, lineno, line)  # type: ignore[arg-type]
    (file or sys.stderr).write(visible(public(text)))


class _Logged(logging.Handler):
    """Shows what other libraries log, as Python does by default, with control characters escaped."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(visible(public(self.format(record))) + "\n")


def numbers(option: str, text: str) -> list[int]:
    """A list of integers, separated by commas."""
    parts = [part.strip().replace("_", "") for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and part.isascii() and int(part) > 0 for part in parts):
        raise ConfigError(option, got=text, expected="positive integers, such as 8192,16384")
    return [int(part) for part in parts]


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet."""
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        got = f"an existing {'folder' if path.is_dir() else 'file'}"
        raise ConfigError(str(path), got=got, fix="choose another name; files are not overwritten") from None
