"""Tables in terminals that are too narrow for them: no number is cut; columns move below instead."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Column, Table

_ANY_WIDTH = 10_000


def fitted(table: Table, console: Console) -> list[Table]:
    """The table itself where there is room, then without lines, then in parts that each begin with the first column."""
    if Measurement.get(console, _unbounded(console), table).maximum <= console.width:
        return [table]
    if _needed(table, console) <= console.width:
        return [_with_whole_numbers(table, console, table.columns)]
    plain = copy(table)
    plain.box, plain.pad_edge = None, False
    parts: list[list[Column]] = [[]]
    for column in plain.columns:
        part = _with_whole_numbers(plain, console, [*parts[-1], column])
        if len(parts[-1]) > 1 and _needed(part, console) > console.width:
            parts.append([plain.columns[0]])
        parts[-1].append(column)
    found = [_with_whole_numbers(plain, console, columns) for columns in parts]
    for part in found[1:]:
        part.title = None
    for part in found[:-1]:
        part.caption = None
    return found


def _with_whole_numbers(table: Table, console: Console, columns: Sequence[Column]) -> Table:
    """Of these columns; those of numbers are as wide as these, and what else there is gives way."""
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
    options = _unbounded(console)
    head = Measurement.get(console, options, column.header).minimum
    return max([head, *(Measurement.get(console, options, cell).maximum for cell in column.cells)])


def _needed(table: Table, console: Console) -> int:
    """The least width at which no number and no word is cut."""
    return Measurement.get(console, _unbounded(console), _with_whole_numbers(table, console, table.columns)).minimum


def _unbounded(console: Console) -> ConsoleOptions:
    return console.options.update(width=_ANY_WIDTH)
