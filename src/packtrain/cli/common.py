"""What the verbs share: consoles, JSON output, progress bars, errors without a traceback."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleDimensions, ConsoleOptions
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from packtrain.cli.interruptible import CONTINUES, Interrupted, interruptible, never_lost
from packtrain.core.artifacts import DiskFull
from packtrain.core.errors import ConfigError, PacktrainError, of_missing, of_system
from packtrain.core.public import public, visible, visible_json

_UNBOUNDED = 1000  # columns, of output that goes into a file or a pipe


class Terminal(Console):
    """Where all output goes. Paths and data appear in it: control characters in them are shown, not obeyed."""

    def __init__(self, *, width: int | None = None, **options: Any) -> None:
        super().__init__(width=width, **options)
        self._asked = width

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Rich's own segments; those that control the terminal are marked as such, and are not text."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def print(self, *objects: Any, **options: Any) -> None:
        """As Rich does; of tables that are too wide nothing is cut."""
        super().print(*(part for one in objects for part in self._fitted(one)), **options)

    def _fitted(self, one: Any) -> list[Any]:
        if not isinstance(one, Table):
            return [one]
        from packtrain.cli.narrow import fitted

        return [*fitted(one, self)]

    @property  # type: ignore[misc]
    def size(self) -> ConsoleDimensions:
        """As wide as COLUMNS says, or the terminal; nothing is cut or wrapped where neither has a width."""
        found, said = super().size, os.environ.get("COLUMNS", "")
        if self._asked is None and said.isdecimal() and int(said) > 0:
            return found._replace(width=int(said))
        return found if self.is_terminal else found._replace(width=_UNBOUNDED)


# Nothing in paths and data may turn into colours or emoji, or be broken into lines.
errors = Terminal(stderr=True, highlight=False, emoji=False, soft_wrap=True)
output = Terminal(highlight=False, emoji=False)

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
        said = error if isinstance(error, DiskFull) else of_system(error)
        errors.print(f"[bold red]error:[/] {escape(str(said))}")
        sys.exit(said.exit_code if isinstance(said, PacktrainError) else 1)
    except ImportError as error:
        errors.print(f"[bold red]error:[/] {escape(str(of_missing(error)))}")
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


def progress_console() -> Console:
    """For a bar on stderr."""
    return Terminal(stderr=True)


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
    """As Python shows it, made visible."""
    text = warnings.formatwarning(message, category, filename, lineno, line)  # type: ignore[arg-type]
    (file or sys.stderr).write(visible(public(text)))


class _Logged(logging.Handler):
    """What other libraries log, as Python shows it where nobody asks for it, made visible."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(visible(public(self.format(record))) + "\n")


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
        raise ConfigError(option, got=text, expected="positive integers, such as 8192,16384")
    return [int(part) for part in parts]


def names_of(option: str, text: str) -> dict[str, str]:
    """Names by other names, as NAME=NAME with commas between."""
    pairs = [[name.strip() for name in pair.split("=")] for pair in text.split(",")]
    if not all(len(pair) == 2 and all(pair) for pair in pairs):
        raise ConfigError(option, got=text, expected="NAME_IN_DATA=NAME_HERE,..., such as query=question,reply=answer")
    return dict(pairs)


@contextmanager
def measuring(verb: str, *, quiet: bool) -> Iterator[Callable[[Any], None]]:
    """A progress bar on stderr: how far, how fast, how long still, how many were skipped."""
    from packtrain.cli.show.terminal import MeasureBar

    with interruptible(), MeasureBar(verb, progress_console(), quiet=quiet) as bar:
        yield bar.update
