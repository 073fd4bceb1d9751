"""How a study looks in a terminal: the sweep, padding beside packing, the recommendation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packtrain.app.plan import Planned
from packtrain.cli.show.bars import Bar
from packtrain.core.numbers import GIB, gib
from packtrain.planning.choice import dropped_share
from packtrain.planning.question import Baseline
from packtrain.planning.study import StudyProgress as Studying
from packtrain.planning.study_values import Reason, Study
from packtrain.predicting.values import TrainingSetup
from packtrain.reports.recommended import train_command
from packtrain.reports.study_content import study_content


class PlanBar(Bar):
    """A bar over the packings that are tried."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        super().__init__("planning", console, quiet=quiet)

    def update(self, progress: Studying) -> None:
        """Show what is being tried."""
        self.show(progress.done, progress.total, progress.doing)


def planned_json(planned: Planned) -> dict[str, Any]:
    """A study for machines: what the files hold, and where they are."""
    return {
        "files": {name: str(path) for name, path in planned.files.items()},
        "understood": list(planned.notes),
        **study_content(planned.study),
    }


def show_planned(planned: Planned, console: Console, *, then: bool = True) -> None:
    """A study for people."""
    study = planned.study
    for note in planned.notes:
        console.print(f"[dim]{escape(note)}[/]", soft_wrap=True)
    console.print(_sweep_table(study))
    console.print(_padding_table(study))
    if reasons := _worth_showing(study):
        console.print(_reasons_table(reasons))
    if study.recommendation.warning:
        console.print(f"[bold yellow]{escape(study.recommendation.warning)}[/]", soft_wrap=True)
    console.print(f"[bold]{escape(study.recommendation.verdict)}[/]", soft_wrap=True)
    for advice in study.recommendation.advice:
        console.print(f"- {escape(advice)}", soft_wrap=True)
    if not then:
        return
    page, text = (escape(str(planned.files[name])) for name in ("report.html", "summary.md"))
    console.print(f"next: open {page}, or read {text}", soft_wrap=True)
    console.print(f"then: {escape(train_command(study, planned.files['recommended.yaml']))}", soft_wrap=True)


def _sweep_table(study: Study) -> Table:
    usable = f"{gib(study.memory.usable_bytes)} usable"
    table = Table(
        title=f"Packing lengths tried for {escape(study.model_type)} on {study.gpus} x {study.gpu}, "
        f"{_layers(study.setup)}",
        caption=f"* {study.recommendation.mark}   - needs more than the {usable}   "
        "idle: share of the GPUs' micro-batches without a pack",
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("\nlength", justify="right", overflow="fold")  # limits go on in the next line, numbers never do
    columns = ("\npacks", "of\nbound", "\nfill", "samples\npacked", "\ndropped", "packs/\nstep", "GPUs\nidle")
    for name in (*columns, "\nsteps", "\nGiB", "\ntokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, one in enumerate(study.simulations):
        limits = "".join(f" {name.removeprefix('max_')}={value}" for name, value in one.limits.items())
        mark = "*" if number == study.recommendation.simulation else "" if one.fits else "-"
        table.add_row(
            f"{mark}{one.packing_length:,}{limits}",
            f"{one.packs:,}",
            f"{one.of_bound:.1%}",
            f"{one.fill:.1%}",
            f"{one.samples_packed:,}",
            f"{one.samples_dropped:,} ({dropped_share(one):.1%})",
            f"{one.packs_per_step:,}",
            f"{one.idle:.0%}",
            f"{one.steps:,}",
            f"{one.memory_bytes / GIB:.1f}",
            f"{one.tokens_per_second:,.0f}",
        )
    return table


def _layers(trained: TrainingSetup | Baseline) -> str:
    """How layers are taken to run, of a setup or a baseline."""
    return "torch.compile" if trained.compiled else "eager"


def _padding_table(study: Study) -> Table:
    name = "your current run first" if study.baseline.today else "default settings first"
    table = Table(title=f"Without packing, {name}", title_justify="left", box=None)
    for title in ("batches", "kernels", "size", "samples", "steps", "padding", "GiB", "tokens/s", ""):
        table.add_column(title, justify="right", no_wrap=title not in ("batches", "kernels"))
    for run in study.padded:
        own = f"{study.baseline.attention}, {_layers(study.baseline)}"
        table.add_row(
            "random" if run.order == "random" else "grouped by length",
            own if run.kernels == "own" else "as packed",
            str(run.batch_size),
            f"{run.samples:,}",
            f"{run.steps:,}",
            f"{run.waste:.1%}",
            f"{run.memory_bytes / GIB:.1f}",
            f"{run.tokens_per_second:,.0f}",
            "" if run.fits else "too large",
        )
    return table


def _worth_showing(study: Study) -> list[Reason]:
    """What changes of a run that is trained today; of any other what recommended.yaml has."""
    config = study.recommendation.config
    reasons = [
        reason
        for reason in study.recommendation.reasons
        if reason.baseline != reason.packing.removesuffix(" (follows)")
    ]
    if study.baseline.today:
        return reasons
    written = {name for values in config.values() for name in values}
    return [reason for reason in reasons if reason.parameter in written]


def _reasons_table(reasons: Sequence[Reason]) -> Table:
    table = Table(title="Recommended (the report has every value)", title_justify="left")
    known = any(reason.baseline for reason in reasons)
    for name in ("parameter", *(("was",) if known else ()), "recommended", "reason"):
        table.add_column(name, overflow="fold", no_wrap=name == "parameter")  # a name that goes on is no name
    for one in reasons:
        was = (one.baseline,) if known else ()
        table.add_row(*(escape(text) for text in (one.parameter, *was, one.packing, one.reason)))
    return table
