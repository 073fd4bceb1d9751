"""What the verbs share: consoles, JSON output, progress bars, errors without a traceback."""

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

from packtrain.cli.interrupts import CONTINUES, Interrupted, interruptible, never_lost
from packtrain.core.errors import ConfigError, PacktrainError

# Paths and data appear in what is printed: nothing in them may turn into colours or emoji, or be broken into lines.
errors = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
output = Console(highlight=False, emoji=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def run(app: typer.Typer) -> None:
    """Run the command line; user mistakes are printed without a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for file names that are not UTF-8
    try:
        with never_lost():
            app()
    except PacktrainError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(error.exit_code)
    except OSError as error:  # a full disk, a folder that cannot be written
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(1)
    except (KeyboardInterrupt, Interrupted) as stop:
        errors.print(f"\n[yellow]interrupted[/]; {str(stop) or CONTINUES}")
        sys.exit(1)


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def text_of(option: str, path: Path) -> str:
    """The content of a file that an option names."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(option, got=f"{path}: {error}", expected="a text file in UTF-8") from None


def numbers(option: str, text: str) -> list[int]:
    """A list of whole numbers, separated by commas."""
    parts = [part.strip().replace("_", "") for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and part.isascii() and int(part) > 0 for part in parts):
        raise ConfigError(option, got=text, expected="positive whole numbers, such as 8192,16384")
    return [int(part) for part in parts]


@contextmanager
def measuring(verb: str, *, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A progress bar on stderr: how far, how fast, how long still, how many were skipped."""
    from packtrain.app.show.terminal import MeasureBar

    with interruptible(), MeasureBar(verb, Console(stderr=True), quiet=quiet) as bar:
        yield bar.update
