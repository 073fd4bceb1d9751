"""The results of `packtrain bench pack` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

_WHAT = {"alone": "lengths to packs", "plan": "costs to a plan"}


def show_bench(result: Mapping[str, Any], console: Console) -> None:
    """One table for each question."""
    console.print(
        f"{result['set']}: {result['samples']:,} samples, {result['tokens']:,} tokens. "
        f"One core of {result['cores']}, load {result['load']:.1f} at the start; compilation is not counted."
    )
    console.print(_one_resource(result["one_resource"]))
    console.print(_strategies(result["strategies"]))
    if result["others"]["rows"]:
        console.print(_others(result["others"]["rows"]))
        for note in result["others"]["notes"]:
            console.print(note)
    for name, why in result["others"]["not_run"].items():
        console.print(f"not run: {name} ({why})")
    console.print(_several(result["several"]))
    for found in result["equal_work"]["sets"]:
        console.print(_equal_work(result["equal_work"]["model"], found))
    if result["scaling"]:
        console.print(_scaling(result["scaling"]))


def _table(title: str, columns: Iterable[str], *, words: int = 0) -> Table:
    """A table whose first columns are words and the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < words else "right")
    return table


def _one_resource(rows: list[dict[str, Any]]) -> Table:
    columns = ("capacity", "samples that fit", "bound", "packs", "of bound", "seconds", "samples /s", "ns a sample")
    table = _table("Best fit, one resource", columns)
    for row in rows:
        table.add_row(
            f"{row['capacity']:,}",
            f"{row['samples']:,}",
            f"{row['bound']:,}",
            f"{row['packs']:,}",
            f"{row['of_bound']:.4f}",
            f"{row['seconds']:.4f}",
            f"{row['samples_per_second']:,.0f}",
            f"{row['nanoseconds_per_sample']:,.0f}",
        )
    return table


def _strategies(found: Mapping[str, Any]) -> Table:
    columns = ("strategy", "packs", "of bound", "seconds", "samples /s")
    table = _table(f"Strategies at {found['capacity']:,} tokens", columns, words=1)
    for row in found["rows"]:
        table.add_row(
            row["strategy"],
            f"{row['packs']:,}",
            f"{row['of_bound']:.4f}",
            f"{row['seconds']:.4f}",
            f"{row['samples_per_second']:,.0f}",
        )
    return table


def _others(rows: list[dict[str, Any]]) -> Table:
    columns = ("packer", "capacity", "samples", "bound", "packs", "ours", "seconds", "ours", "packs x", "seconds x")
    table = _table("Other projects' packers, and ours on the same lengths", columns, words=1)
    for row in rows:
        table.add_row(
            f"{row['packer']} ({row['version']})",
            f"{row['capacity']:,}",
            f"{row['samples']:,}",
            f"{row['bound']:,}",
            f"{row['packs']:,}",
            f"{row['our_packs']:,}",
            f"{row['seconds']:.4f}",
            f"{row['our_seconds']:.4f}",
            f"{row['times_our_packs']:.4f}",
            f"{row['times_our_seconds']:,.1f}",
        )
    return table


def _several(rows: list[dict[str, Any]]) -> Table:
    ways = ("fast", "best", "first_fit_random", "first_fit_decreasing", "best_fit_decreasing")
    columns = (
        *("mixture", "tokens / vision tokens / images", "fast", "best", "first fit, random order"),
        *("first fit, decreasing", "best fit, decreasing", "fast, s a million", "best, s a million"),
    )
    table = _table("Several resources: share of the bound (synthetic mixtures)", columns, words=2)
    for row in rows:
        table.add_row(
            row["mixture"],
            " / ".join(f"{limit:,}" for limit in row["limits"]),
            *(f"{row[way]:.4f}" for way in ways),
            *(f"{row[f'{effort}_seconds_per_million']:.1f}" for effort in ("fast", "best")),
        )
    return table


def _equal_work(model: str, found: Mapping[str, Any]) -> Table:
    limits = ", ".join(f"{name} {limit:,}" for name, limit in found["limits"].items())
    columns = ("ranks", "packs a step", "steps", "order", "slowest / mean", "spread of length", "spread of samples")
    title = (
        f"Equal work of {model}: {found['set']}, {found['samples']:,} samples in {found['packs']:,} packs ({limits})"
    )
    table = _table(title, columns)
    for line in found["lines"]:
        for order in ("random", "sorted", "strict"):
            counts = [f"{line[name]:,}" if order == "random" else "" for name in ("ranks", "packs_per_step", "steps")]
            even = line[order]
            table.add_row(
                *counts,
                order,
                f"{even['slowest']:.4f}",
                f"{even['length_spread']:.1f}",
                f"{even['samples_spread']:.1f}",
            )
    return table


def _scaling(rows: list[dict[str, Any]]) -> Table:
    columns = (
        "what",
        "samples",
        "at once",
        "packs",
        "of bound",
        "seconds",
        "ns a sample",
        "peak GiB",
        "extra bytes a sample",
    )
    title = f"Growth: best fit at {rows[0]['capacity']:,} tokens, one process for each line"
    table = _table(title, columns, words=1)
    for row in sorted(rows, key=lambda row: (row["what"], row["samples"])):
        table.add_row(
            _WHAT[row["what"]],
            f"{row['samples']:,}",
            f"{row['window']:,}",
            f"{row['packs']:,}",
            f"{row['of_bound']:.4f}",
            f"{row['seconds']:,.2f}",
            f"{row['nanoseconds_per_sample']:,.0f}",
            f"{row['peak_gib']:.2f}",
            f"{row['extra_bytes_per_sample_of_a_window']:,.0f}",
        )
    return table
