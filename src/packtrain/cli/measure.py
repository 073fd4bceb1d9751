"""`packtrain measure`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn, TextColumn
from rich.table import Table

from packtrain.cli.common import Json, print_json
from packtrain.cli.config_options import verb_options
from packtrain.cli.help_page import RUN
from packtrain.cli.interruptible import interruptible
from packtrain.cli.terminal import Bar, Terminal, output, table
from packtrain.core.numbers import counted, elapsed

if TYPE_CHECKING:
    from packtrain.measuring.measure_summary import MeasureSummary
    from packtrain.measuring.measurement import MeasureOutcome, MeasureProgress

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


@verb_options("measure")
def measure(
    data: Annotated[
        str,
        typer.Argument(
            help="A file or folder (json, jsonl, parquet, arrow, tar shards, HF dataset), a YAML mixture or a hub name."
        ),
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="A model folder, hub name or tiny:FAMILY (small, random weights).")
    ],
    out: Annotated[
        Path,
        typer.Option("--out", "-o", help="Folder for costs.parquet, media.parquet, measure.json and ledger.jsonl."),
    ],
    settings: dict[str, object],
    streaming: Annotated[
        bool,
        typer.Option(
            "--streaming", rich_help_panel="Data", help="Stream a Hugging Face dataset instead of downloading it."
        ),
    ] = False,
    engine: Annotated[str, typer.Option(rich_help_panel=RUN, help="local, or ray for a cluster.")] = "local",
    address: Annotated[
        str | None,
        typer.Option(rich_help_panel=RUN, help="Address of the Ray cluster. Default: start one here."),
    ] = None,
    seed: Annotated[int, typer.Option(rich_help_panel=RUN, help="Random seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure what every record costs (tokens, patches, images, frames), exactly, from headers alone.

    Broken records go to ledger.jsonl with the reason. Rerunning the command continues an interrupted run, and does
    nothing if nothing has changed.

    Example: packtrain measure train.jsonl --model Qwen/Qwen2.5-VL-3B-Instruct --out costs
    """
    from packtrain.app.measure import measure_outcome

    with interruptible(), MeasureBar(quiet=as_json) as bar:
        outcome = measure_outcome(
            data,
            model=model,
            out=out,
            streaming=streaming,
            engine=engine,  # type: ignore[arg-type]
            address=address,
            seed=seed,
            progress=bar.update,
            **settings,
        )
    if as_json:
        print_json(measured_json(outcome))
    else:
        show_measured(outcome, output)


class MeasureBar(Bar):
    """A bar over units of work, with records per second and the number skipped."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__("measuring", quiet=quiet, counts=(MofNCompleteColumn(), TextColumn("parts")))
        self._told = quiet

    def update(self, progress: MeasureProgress) -> None:
        """Show where the run is, and first of all why it starts over."""
        for change in progress.changed[:5] if not self._told else ():
            self._bar.console.print(f"[yellow]measuring again:[/] {escape(change)}")
        self._told = True
        elapsed = self._bar.tasks[0].elapsed or 0
        rate = f"{progress.entries / elapsed:,.0f}/s" if elapsed > 0.5 else ""
        detail = f"{progress.entries:,} records  {rate}  {progress.skipped:,} skipped"
        if progress.checking:
            detail = f"comparing {progress.checking} records with the real processor"
        self.show(progress.units, progress.total_units, detail)


def measured_json(outcome: MeasureOutcome) -> dict[str, object]:
    """A measurement for machines."""
    body = outcome.table.summary.to_json()
    return {
        "folder": str(outcome.table.folder),
        "reused": outcome.reused,
        "changed": outcome.changed,
        "resumed_units": outcome.resumed_units,
        "notes": list(outcome.notes),
        **{key: body[key] for key in ("unread", "schemas", "counts", "statistics", "measured_by", "check", "seconds")},
        "family": outcome.table.summary.model_type,
    }


def show_measured(outcome: MeasureOutcome, console: Terminal, *, then: bool = True) -> None:
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
        console.print(f"[yellow]{escape(note)}[/]")
    console.print(_statistics_table(summary))
    console.print(
        f"{counted(counts.entries, 'record')} read = {counts.rows:,} measured + {counts.ledger:,} skipped "
        f"({counts.failed:,} unusable, {counts.filtered:,} filtered out)"
        + ("; ledger.jsonl lists them with the reason" if counts.ledger else "")
    )
    if summary.schemas:
        read = (f"{name} ({count:,})" for name, count in summary.schemas.items())
        console.print(f"read as: {escape(', '.join(read))}")
    if counts.cut_short:
        console.print(
            f"[bold red]{counted(counts.cut_short, 'file')} could not be read completely:[/]"
            " more records are missing than the ledger lists"
        )
    if by_count := sorted(counts.reasons.items(), key=lambda item: -item[1]):
        console.print(ledger_table("Skipped", "records", dict(by_count[:8])))
    console.print(escape(_how(summary)))
    if not then:
        return
    folder = escape(str(outcome.table.folder))
    console.print(f"next: packtrain plan {folder} --gpu GPU --gpus N --out report")


def _statistics_table(summary: MeasureSummary) -> Table:
    costs = table(f"Record costs ({summary.model_type})", ("per record", *_NUMBERS), text=("per record",))
    for column, label in _SHOWN.items():
        values = summary.statistics.columns.get(column) or {}
        if values.get("max"):
            shown = (f"{values[name]:,.1f}" if name in ("mean", "std") else f"{values[name]:,.0f}" for name in _NUMBERS)
            costs.add_row(label, *shown)
    return costs


def ledger_table(title: str, counted: str, reasons: Mapping[str, int]) -> Table:
    """A table of the ledger: what was skipped, by reason."""
    ledger = table(title, ("stage: reason", counted), text=("stage: reason",))
    for reason, count in reasons.items():
        ledger.add_row(escape(reason), f"{count:,}")
    return ledger


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
    return f"{how}; {checked}. Measuring took {elapsed(summary.seconds)}"
