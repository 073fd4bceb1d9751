"""`packtrain plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from packtrain.cli.common import Json, numbers, print_json
from packtrain.cli.interruptible import STARTS_OVER, interruptible
from packtrain.cli.terminal import Bar, Terminal, output, table
from packtrain.core.numbers import GIB, gib, percent

if TYPE_CHECKING:
    from packtrain.app.plan import Planned
    from packtrain.planning.question import Baseline
    from packtrain.planning.study import StudyProgress
    from packtrain.planning.study_values import Reason, Study
    from packtrain.predicting.values import TrainingSetup


def plan(
    costs: Annotated[Path, typer.Argument(help="A folder written by packtrain measure.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the report and its files.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A model folder, hub name or tiny:FAMILY. Default: the one the data were measured for.",
        ),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(
            help="GPU name: h200, h100, a100-80, l40s, 4090, mi300x, ... For an unlisted one, a similar GPU and what "
            "differs, such as h100,memory_gib=64,tflops=400."
        ),
    ] = "h200",
    gpus: Annotated[
        int | None, typer.Option(min=1, help="Number of GPUs.", show_default="the config's num_gpus, or 1")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="Your current training config; its settings are kept.")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Packing lengths to try, such as 8192,16384. Default: from 8,000 to at least 24,000."),
    ] = None,
    max_images_per_pack: Annotated[
        str | None, typer.Option(help="Limits to try in addition to none, such as 8,16.")
    ] = None,
    max_patches_per_pack: Annotated[str | None, typer.Option(help="Limits to try in addition to none.")] = None,
    max_samples_per_pack: Annotated[str | None, typer.Option(help="Limits to try in addition to none.")] = None,
    method: Annotated[str | None, typer.Option(help="full, lora, dora or qlora. Default: full.")] = None,
    sharding: Annotated[str | None, typer.Option(help="ddp, zero1, zero2, zero3 or fsdp. Default: ddp.")] = None,
    checkpointing: Annotated[
        bool | None, typer.Option("--checkpointing/--no-checkpointing", help="Gradient checkpointing. Default: on.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Micro-batch size of your current padded run. Default: 2.")
    ] = None,
    effective_batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Samples per optimizer step; packs change it, by at most 10 % where possible. Default: about 128.",
        ),
    ] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs. Default: 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed. Default: the config's, or 0.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Write into a non-empty folder; other files in it are kept.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Find the best config for your model, data and GPUs; writes the config and an HTML report with the reasons.

    Packs the dataset at many lengths, predicts memory and throughput of each, and compares them with padded batches.

    Example: packtrain plan costs --model Qwen/Qwen3-VL-2B-Instruct --gpu h200 --gpus 4 --out report
    """
    from packtrain.app.plan import plan as make_plan

    limits = {
        "max_images_per_pack": max_images_per_pack,
        "max_patches_per_pack": max_patches_per_pack,
        "max_samples_per_pack": max_samples_per_pack,
    }
    with interruptible(STARTS_OVER), PlanBar(quiet=as_json) as bar:
        planned = make_plan(
            costs,
            out=out,
            model=model,
            gpu=gpu,
            gpus=gpus,
            config=config,
            lengths=numbers("--lengths", lengths) if lengths is not None else None,
            limits={name: numbers("--" + name.replace("_", "-"), text) for name, text in limits.items() if text},
            setup={
                "method": method,
                "sharding": sharding,
                "gradient_checkpointing": checkpointing,
                "vision_checkpointing": checkpointing,
            },
            baseline={
                "per_device_train_batch_size": batch_size,
                "effective_batch_size": effective_batch_size,
                "num_train_epochs": epochs,
            },
            seed=seed,
            overwrite=overwrite,
            progress=bar.update,
        )
    if as_json:
        print_json(planned_json(planned))
    else:
        show_planned(planned, output)


class PlanBar(Bar):
    """A bar over the packings that are tried."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__("planning", quiet=quiet)

    def update(self, progress: StudyProgress) -> None:
        """Show what is being tried."""
        self.show(progress.done, progress.total, progress.doing)


def planned_json(planned: Planned) -> dict[str, Any]:
    """A study for machines: what the files hold, and where they are."""
    from packtrain.reports.study_content import study_content

    return {
        "files": {name: str(path) for name, path in planned.files.items()},
        "understood": list(planned.notes),
        **study_content(planned.study),
    }


def show_planned(planned: Planned, console: Terminal, *, then: bool = True) -> None:
    """A study for people."""
    study = planned.study
    for note in planned.notes:
        console.print(f"[dim]{escape(note)}[/]")
    console.print(_sweep_table(study))
    console.print("; ".join(_legend(study)))
    console.print(_padding_table(study))
    if reasons := _worth_showing(study):
        console.print(_reasons_table(reasons))
    if study.recommendation.warning:
        console.print(f"[bold yellow]{escape(study.recommendation.warning)}[/]")
    console.print(f"[bold]{escape(study.recommendation.verdict)}[/]")
    for advice in study.recommendation.advice:
        console.print(f"- {escape(advice)}")
    if not then:
        return
    from packtrain.reports.recommended import train_command

    page, text = (escape(str(planned.files[name])) for name in ("report.html", "summary.md"))
    console.print(f"next: open {page}, or read {text}")
    console.print(f"then: {escape(train_command(study, planned.files['recommended.yaml']))}")


def _sweep_table(study: Study) -> Table:
    columns = ("\npacks", "lower\nbound", "\nfill", "samples\npacked", "\ndropped", "packs/\nstep", "GPUs\nidle")
    sweep = table(
        f"Packing lengths tried for {escape(study.model_type)} on {study.gpus} x {study.gpu}, {_layers(study.setup)}",
        ("\nlength", *columns, "\nsteps", "\nGiB", "\ntokens/s"),
        box=None,
        padding=(0, 1, 0, 0),
    )
    sweep.columns[0].overflow = "fold"  # limits go on in the next line, numbers never do
    for column in sweep.columns[1:]:
        column.no_wrap = True
    for number, one in enumerate(study.simulations):
        limits = "".join(f" {name.removeprefix('max_')}={value}" for name, value in one.limits.items())
        mark = "*" if number == study.recommendation.simulation else "" if one.fits else "-"
        sweep.add_row(
            f"{mark}{one.packing_length:,}{limits}",
            f"{one.packs:,}",
            f"{one.bound:,}",
            percent(one.fill),
            f"{one.samples_packed:,}",
            f"{one.samples_dropped:,} ({percent(one.dropped_share)})",
            f"{one.packs_per_step:,}",
            percent(one.idle),
            f"{one.steps:,}",
            f"{one.memory_bytes / GIB:.1f}",
            f"{one.tokens_per_second:,.0f}",
        )
    return sweep


def _legend(study: Study) -> Iterator[str]:
    yield f"* {study.recommendation.mark}"
    if not all(one.fits for one in study.simulations):
        yield f"- needs more than {gib(study.memory.usable_bytes)}"
    yield "lower bound: no packing has fewer packs"
    yield "GPUs idle: without a pack in a full step"


def _layers(trained: TrainingSetup | Baseline) -> str:
    """How layers are taken to run, of a setup or a baseline."""
    return "torch.compile" if trained.compiled else "uncompiled"


def _padding_table(study: Study) -> Table:
    name = "your current run first" if study.baseline.today else "default settings first"
    columns = ("batches", "attention, layers", "batch size", "samples", "steps", "padding", "GiB", "tokens/s", "")
    padding = table(f"Without packing, {name}", columns, box=None)
    for run in study.padded:
        own = f"{study.baseline.attn_implementation}, {_layers(study.baseline)}"
        padding.add_row(
            "random" if run.order == "random" else "grouped by length",
            own if run.kernels == "own" else "as packed",
            str(run.batch_size),
            f"{run.samples:,}",
            f"{run.steps:,}",
            percent(run.waste),
            f"{run.memory_bytes / GIB:.1f}",
            f"{run.tokens_per_second:,.0f}",
            "" if run.fits else "too large",
        )
    return padding


def _worth_showing(study: Study) -> list[Reason]:
    """The settings that change in a run trained today; for any other run, those of recommended.yaml."""
    config = study.recommendation.config
    reasons = [
        reason
        for reason in study.recommendation.reasons
        if reason.baseline != reason.packing.removesuffix(" (derived)")
    ]
    if study.baseline.today:
        return reasons
    names = {name for values in config.values() for name in values}
    return [reason for reason in reasons if reason.parameter in names]


def _reasons_table(reasons: Sequence[Reason]) -> Table:
    has_baseline = any(reason.baseline for reason in reasons)
    columns = ("parameter", *(("was",) if has_baseline else ()), "recommended", "reason")
    recommended = table("Recommended (the report has every value)", columns, text=columns)
    recommended.columns[0].no_wrap = True  # a name that goes on is no name
    for one in reasons:
        was = (one.baseline,) if has_baseline else ()
        recommended.add_row(*(escape(text) for text in (one.parameter, *was, one.packing, one.reason)))
    return recommended
