"""The terminal: where all output goes, tables that fit into it, and progress bars."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import Any, Self

from rich.console import Console, ConsoleDimensions, ConsoleOptions
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from packtrain.core.numbers import clock
from packtrain.core.public import visible

_UNBOUNDED = 1000  # columns, of output that goes into a file or a pipe
_ANY_WIDTH = 10_000


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
        """Like Rich's print, but nothing is cut: text is not wrapped, and tables are made to fit."""
        options.setdefault("soft_wrap", all(isinstance(one, str | Text) for one in objects))
        parts = ([one] if not isinstance(one, Table) else fit_table(one, self) for one in objects)
        super().print(*(part for fitting in parts for part in fitting), **options)

    @property  # type: ignore[misc]
    def size(self) -> ConsoleDimensions:
        """The width is COLUMNS or the terminal's; without either, nothing is cut or wrapped."""
        dimensions, columns = super().size, os.environ.get("COLUMNS", "")
        if self._asked is None and columns.isdecimal() and int(columns) > 0:
            return dimensions._replace(width=int(columns))
        return dimensions if self.is_terminal else dimensions._replace(width=_UNBOUNDED)


# Nothing in paths and data may turn into colours or emoji.
errors = Terminal(stderr=True, highlight=False, emoji=False)
output = Terminal(highlight=False, emoji=False)


def table(title: str, columns: Iterable[str], text: Collection[str] = (), **options: Any) -> Table:
    """A table with columns of numbers, and of `text`."""
    result = Table(title=title, title_justify="left", **options)
    for name in columns:
        result.add_column(name, **({"overflow": "fold"} if name in text else {"justify": "right"}))  # type: ignore[arg-type]
    return result


def fit_table(table: Table, console: Console) -> list[Table]:
    """The table itself where there is room, then without lines, then in parts that each begin with the first column."""
    if Measurement.get(console, _any_width(console), table).maximum <= console.width:
        return [table]
    if _least_width(table, console) <= console.width:
        return [_with_whole_numbers(table, console, table.columns)]
    plain = copy(table)
    plain.box, plain.pad_edge = None, False
    parts: list[list[Column]] = [[]]
    for column in plain.columns:
        part = _with_whole_numbers(plain, console, [*parts[-1], column])
        if len(parts[-1]) > 1 and _least_width(part, console) > console.width:
            parts.append([plain.columns[0]])
        parts[-1].append(column)
    tables = [_with_whole_numbers(plain, console, columns) for columns in parts]
    for part in tables[1:]:
        part.title = None
    for part in tables[:-1]:
        part.caption = None
    return tables


def _with_whole_numbers(table: Table, console: Console, columns: Sequence[Column]) -> Table:
    """A table of these columns in which numbers keep their full width and other columns shrink."""
    part = copy(table)
    part.columns = []
    for at, column in enumerate(columns):
        kept = copy(column)
        kept._index = at
        if column.justify == "right" and column.width is None:
            kept.width = _number_width(column, console)
        part.columns.append(kept)
    return part


def _number_width(column: Column, console: Console) -> int:
    options = _any_width(console)
    head = Measurement.get(console, options, column.header).minimum
    return max([head, *(Measurement.get(console, options, cell).maximum for cell in column.cells)])


def _least_width(table: Table, console: Console) -> int:
    """The least width at which no number and no word is cut."""
    return Measurement.get(console, _any_width(console), _with_whole_numbers(table, console, table.columns)).minimum


def _any_width(console: Console) -> ConsoleOptions:
    return console.options.update(width=_ANY_WIDTH)


class ElapsedColumn(ProgressColumn):
    """How long it has taken, and about how long it still takes."""

    def render(self, task: Task) -> Text:
        """Rich's estimate; none where it has none."""
        text = f"elapsed {clock(task.finished_time if task.finished else task.elapsed)}"
        if not task.finished and task.time_remaining is not None:
            text += f", ~{clock(task.time_remaining)} left"
        return Text(text, style="progress.elapsed")


class Bar:
    """A bar on stderr that vanishes at the end; nothing is drawn without a terminal."""

    def __init__(
        self, verb: str, *, quiet: bool, console: Console | None = None, counts: tuple[ProgressColumn, ...] = ()
    ) -> None:
        console = console or errors
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn(verb),
            BarColumn(),
            *counts,
            TextColumn("{task.fields[detail]}"),
            ElapsedColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(verb, total=None, detail="")

    def show(self, done: int, total: int | None, detail: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, total=total, completed=done, detail=detail)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
