"""How results look in a terminal: progress bars, tables, the line that says what to do next."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table

from packtrain.cli.show.bars import Bar
from packtrain.core.numbers import counted
from packtrain.measuring.measure_summary import MeasureSummary
from packtrain.measuring.measurement import MeasureOutcome
from packtrain.measuring.measurement import MeasureProgress as Measured

_SHOWN = {
    "tokens": "tokens",
    "text_tokens": "text tokens",
    "image_tokens": "image tokens",
    "video_tokens": "video tokens",
    "images": "images",
    "frames": "video frames",
    "objects": "objects",
    "patches": "vision patches",
    "supervised_tokens": "supervised tokens",
}
_NUMBERS = ("mean", "std", "min", "median", "p95", "p99", "max", "total")


class MeasureBar(Bar):
    """A bar over units of work, with records per second and the number skipped."""

    def __init__(self, verb: str, console: Console, *, quiet: bool) -> None:
        super().__init__(verb, console, quiet=quiet, counts=(MofNCompleteColumn(), TextColumn("parts")))
        self._told = quiet

    def update(self, progress: Measured) -> None:
        """Show where the run is, and first of all why it starts over."""
        for change in progress.changed[:5] if not self._told else ():
            self._bar.console.print(f"[yellow]measuring again:[/] {escape(change)}", soft_wrap=True)
        self._told = True
        elapsed = self._bar.tasks[0].elapsed or 0
        rate = f"{progress.entries / elapsed:,.0f}/s" if elapsed > 0.5 else ""
        detail = f"{progress.entries:,} records  {rate}  {progress.skipped:,} skipped"
        if progress.checking:
            detail = f"comparing {progress.checking} records with the real processor"
        self.show(progress.units, progress.total_units, detail)


def measured_json(outcome: MeasureOutcome) -> dict[str, object]:
    """A measurement for machines."""
    said = outcome.table.summary.to_json()
    return {
        "folder": str(outcome.table.folder),
        "reused": outcome.reused,
        "changed": outcome.changed,
        "resumed_units": outcome.resumed_units,
        "notes": list(outcome.notes),
        **{key: said[key] for key in ("unread", "schemas", "counts", "statistics", "measured_by", "check", "seconds")},
        "family": outcome.table.summary.model_type,
    }


def show_measured(outcome: MeasureOutcome, console: Console, *, then: bool = True) -> None:
    """A measurement for people."""
    summary = outcome.table.summary
    counts = summary.counts
    if outcome.reused:
        console.print("Nothing has changed since this was measured: the table is reused.")
        if any(reason.startswith("media: ") for reason in counts.reasons):
            console.print("Media are not checked again: to retry failed ones, measure into another folder.")
    if outcome.resumed_units:
        console.print(f"continued: {counted(outcome.resumed_units, 'part')} already complete")
    for note in outcome.notes:
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    console.print(_statistics_table(summary))
    console.print(
        f"{counted(counts.entries, 'entry', 'entries')} read = {counts.rows:,} measured + "
        f"{counts.ledger:,} in the ledger ({counts.failed:,} unusable, {counts.filtered:,} filtered out)"
    )
    if summary.schemas:
        read = (f"{name} {count:,}" for name, count in summary.schemas.items())
        console.print(f"read as {escape(', '.join(read))}", soft_wrap=True)
    if counts.cut_short:
        console.print(
            f"[bold red]{counts.cut_short:,} files could not be read completely:[/]"
            " more records are missing than the ledger lists"
        )
    if counts.reasons:
        console.print(_ledger_table(counts.reasons))
    console.print(escape(_how(summary)), soft_wrap=True)
    if not then:
        return
    folder = escape(str(outcome.table.folder))
    console.print(f"next: packtrain plan {folder} --gpu h200 --gpus 4 --out report", soft_wrap=True)


def _statistics_table(summary: MeasureSummary) -> Table:
    table = Table(title=f"Record costs ({summary.model_type})", title_justify="left")
    table.add_column("per record")
    for name in _NUMBERS:
        table.add_column(name, justify="right")
    for column, label in _SHOWN.items():
        found = summary.statistics.columns.get(column) or {}
        if found.get("max"):
            shown = (f"{found[name]:,.1f}" if name in ("mean", "std") else f"{found[name]:,.0f}" for name in _NUMBERS)
            table.add_row(label, *shown)
    return table


def _ledger_table(reasons: Mapping[str, int]) -> Table:
    table = Table(title="Not in the table", title_justify="left")
    table.add_column("stage: reason")
    table.add_column("records", justify="right")
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:8]:
        table.add_row(escape(reason), f"{count:,}")
    return table


def _how(summary: MeasureSummary) -> str:
    check = summary.check
    checked = (
        f"{counted(check.records, 'random record matches', 'random records match')} the real processor exactly"
        + (f" ({check.note})" if check.note else "")
        if check.records
        else f"not compared with the real processor ({check.note})"
    )
    family = summary.model_type
    how = (
        f"Computed by the rule of {family}, from headers alone"
        if summary.measured_by == "rule"
        else f"Measured by running the processor on every record (exact but slow: {family} has no rule)"
    )
    return f"{how}; {checked}. Measuring took {summary.seconds:,.1f} s"
