"""The results of `packtrain bench loader` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def show_bench(result: Mapping[str, Any], console: Console) -> None:
    """One table for each question."""
    console.print(
        f"{result['model']}, {result['cores']} cores, load {result['load']:.1f} at the start; "
        "one thread for each process."
    )
    console.print(_speed(result["speed"]))
    console.print(_data(result["data"]))
    console.print(_start(result["start"]))
    console.print(_memory(result["memory"]))


def _table(title: str, columns: Iterable[str], *, words: int = 0) -> Table:
    """A table whose first columns are words and the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < words else "right")
    return table


def _speed(found: Mapping[str, Any]) -> Table:
    title = (
        f"Speed: {found['samples']:,} samples, {found['images']:,} images, {found['tokens']:,} tokens, "
        f"packs of {found['capacity']:,}; medians of {found['rounds']} interleaved epochs"
    )
    columns = ("", "workers", "batches", "padding", "samples /s", "images /s", "batches /s", "x plain", "range")
    table = _table(title, columns, words=1)
    for line in found["lines"]:
        table.add_row(
            line["way"],
            str(line["workers"]),
            f"{line['batches']:,}",
            f"{line['padding']:.1%}",
            f"{line['samples_per_second']:,.1f}",
            f"{line['images_per_second']:,.1f}",
            f"{line['batches_per_second']:,.2f}",
            f"{line['ratio']:.2f}",
            f"{line['ratio_lowest']:.2f}-{line['ratio_highest']:.2f}",
        )
    return table


def _data(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("rows", "packs", "fill", "from costs to packs, s", "data MB", "costs, plan and rows, MB")
    table = _table(f"Long datasets, packs of {rows[0]['capacity']:,} tokens", columns)
    for row in rows:
        table.add_row(
            f"{row['rows']:,}",
            f"{row['packs']:,}",
            f"{row['fill']:.4f}",
            f"{row['prepare_seconds']:.1f}",
            f"{row['data_bytes'] / 1e6:,.0f}",
            f"{row['made_bytes'] / 1e6:,.0f}",
        )
    return table


def _start(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = ("", "rows", "epoch done", "seconds", "import", "open", "state", "first batch")
    table = _table("Time to the first batch of a new process, no workers, data files not in memory", columns, words=1)
    for row in rows:
        table.add_row(
            row["way"],
            f"{row['rows']:,}",
            f"{row['share']:.0%}",
            *(f"{row[name]:.2f}" for name in ("seconds", "import_seconds", "open_seconds")),
            *(f"{row[name]:.3f}" for name in ("state_seconds", "batch_seconds")),
        )
    return table


def _memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    title = f"Memory of {rows[0]['processes']} processes, MiB: mean over the first and over the last steps"
    table = _table(title, ("kind", "rows", "steps", "samples", "first", "last", "growth"), words=1)
    for kind, shown in _KINDS.items():
        for row in rows:
            if kind in row["first"]:
                first, last = (row[end][kind] / 2**20 for end in ("first", "last"))
                counts = (f"{row[name]:,}" for name in ("rows", "batches", "samples"))
                table.add_row(shown, *counts, f"{first:,.1f}", f"{last:,.1f}", f"{last - first:+,.1f}")
    return table


_KINDS = {
    "rss": "resident, shared pages in each process",
    "pss": "resident, shared pages once (PSS)",
    "anonymous": "  of it the processes' own",
    "file": "  of it pages of files, which the system may drop",
    "shared": "  of it shared memory",
}
