"""`packtrain train`."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import MofNCompleteColumn

from packtrain.cli.common import Json, print_json
from packtrain.cli.config_options import parse_names
from packtrain.cli.interruptible import is_interrupt
from packtrain.cli.ready import ready_json, show_ready
from packtrain.cli.terminal import Bar, Terminal, errors, output
from packtrain.core.checksums import Checking
from packtrain.core.numbers import counted, duration

if TYPE_CHECKING:
    from packtrain.app.train.outcome import ReadyRun, TrainOutcome
    from packtrain.delivery.encode.token_cache import TokenProgress
    from packtrain.measuring.measurement import MeasureProgress
    from packtrain.packing.plan_builder import PackProgress

    State = MeasureProgress | PackProgress | TokenProgress | Checking | str

_SETTINGS = {
    "model": "model.model_name_or_path",
    "data": "data.dataset_path",
    "columns": "data.columns",
    "output_dir": "training.output_dir",
}
INTERRUPTED = 130  # as shells say it of a command that was ended by Ctrl-C


def train(
    config: Annotated[
        str | None,
        typer.Argument(
            help="The run's config: sections model, data and training. With --resume also the folder of a run.",
            show_default=False,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides, such as training.learning_rate=1e-5 data.packing=false."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="A model folder, hub name or tiny:FAMILY. With --data no config is needed."),
    ] = None,
    data: Annotated[
        str | None, typer.Option("--data", "-d", help="The data to train on: a file, a folder or a hub name.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option("--columns", help="Column mapping, such as query=question,response=answer."),
    ] = None,
    output_dir: Annotated[
        str | None,
        typer.Option("--output-dir", "-o", help="The run's folder. Default: runs/, named after the config."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest complete checkpoint in the run's folder.")
    ] = False,
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="First remove this config's cache entries.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Do everything up to the first step: measure, pack, check, predict.")
    ] = False,
    max_samples: Annotated[
        int | None,
        typer.Option(min=1, help="Trial run on at most this many samples, with its own caches and run folder."),
    ] = None,
    batch_stats: Annotated[int, typer.Option(min=0, help="Print statistics of the first N batches of every rank.")] = 0,
    as_json: Json = False,
) -> None:
    """Train a model; writes a run folder and a report. Works alone or under torchrun or accelerate launch.

    Data that are not measured and packed yet are measured and packed first. Ctrl-C saves a checkpoint; --resume
    continues from it exactly.

    Without a config, --model and --data are enough: packing length, batch size and memory savings are chosen for your
    GPU. packtrain train --resume RUN continues a run from its folder alone.

    Example: packtrain train --model Qwen/Qwen3-VL-2B-Instruct --data train.jsonl

    Example: packtrain train run.yaml training.learning_rate=1e-5 --dry-run
    """
    from packtrain.app.train.train import train as run

    if config is not None and "=" in config and not Path(config).exists():  # there is none, but settings
        overrides, config = [config, *(overrides or ())], None
    named = parse_names("--columns", columns) if columns is not None else None
    given = [*_as_settings(model=model, data=data, columns=named, output_dir=output_dir), *(overrides or ())]
    bar = PrepareBar(quiet=as_json)

    started: list[Path] = []

    def ready(prepared: ReadyRun) -> None:
        bar.__exit__()
        started.append(prepared.run.folder)
        if not as_json:
            show_ready(prepared, output)

    try:
        with bar:
            outcome = run(
                config,
                given,
                resume=resume,
                clear_cache=clear_cache,
                dry_run=dry_run,
                max_samples=max_samples,
                batch_stats=batch_stats,
                progress=bar.update,
                ready=ready,
                console=None if as_json else errors,
            )
    except (KeyboardInterrupt, SystemError) as error:
        if not is_interrupt(error):
            raise
        message = f"interrupted; {_what_is_lost(started)}"
        if started:  # libraries that were left in the middle of a step may crash when Python takes them down
            from packtrain.delivery.trainers.watch import end_process

            end_process(f"\n{message}", code=INTERRUPTED)
        errors.print(f"\n[yellow]{escape(message)}[/]")
        raise typer.Exit(INTERRUPTED) from None
    from packtrain.app.train.outcome import ProcessPlace

    if ProcessPlace.here().first:
        if as_json:
            print_json(outcome_json(outcome))
        else:
            show_outcome(outcome, output, _resume(outcome.folder))
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)


def _what_is_lost(started: list[Path]) -> str:
    """Where a run was stopped in the middle of a step, or before it."""
    if not started:
        return "nothing was trained yet; what is measured and packed is kept, so the same command continues"
    from packtrain.training.checkpoints import lost_by_stopping

    return lost_by_stopping(started[0], _resume(started[0]))


def _resume(folder: Path) -> str:
    """The command that continues a run: its config is in its folder."""
    return shlex.join(["packtrain", "train", "--resume", str(folder)])


def _as_settings(**options: Any) -> list[str]:
    """Options of which there are settings, in their words."""
    return [f"{_SETTINGS[name]}={json.dumps(value)}" for name, value in options.items() if value is not None]


class PrepareBar(Bar):
    """A bar over measuring, packing and tokenizing, whichever is running; without a terminal, a line for each."""

    def __init__(self, *, quiet: bool, console: Terminal = errors) -> None:
        super().__init__("preparing", quiet=quiet, console=console, counts=(MofNCompleteColumn(),))
        self._console, self._stage = console, None if quiet or console.is_terminal else ""

    def update(self, state: State) -> None:
        """Show where preparation is; a text is a stage that nothing is counted of."""
        stage, done, total, detail = _progress(state)
        if self._stage is not None and stage != self._stage:
            self._stage = stage
            self._console.print(f"{stage} ...")
        self.show(done, total, detail)


def _progress(
    state: State,
) -> tuple[str, int, int | None, str]:
    """The stage, how much of it is done, of how much, and the words beside the bar."""
    from packtrain.measuring.measurement import MeasureProgress
    from packtrain.packing.plan_builder import PackProgress

    if isinstance(state, str):
        return state, 0, None, state
    if isinstance(state, MeasureProgress):
        detail = f"measuring: {state.entries:,} records, {state.skipped:,} skipped"
        return "measuring", state.units, state.total_units, detail
    if isinstance(state, PackProgress):
        stage = "planning batches" if state.padded else "packing"
        return stage, state.rows, state.total, f"{stage}, epoch {state.epoch + 1} of {state.epochs}"
    if isinstance(state, Checking):
        return "reading the checkpoint", state.bytes >> 20, state.total >> 20, f"reading {state.path.name} (MiB)"
    return "tokenizing", state.rows, state.total, "tokenizing"


def show_outcome(outcome: TrainOutcome, console: Terminal, again: str) -> None:
    """How a run ended, and what to do next; `again` is the command that continues it."""
    ended = outcome.outcome
    if ended.status == "not trained":
        console.print("dry run: nothing was trained; run the same command without --dry-run to train")
        return
    which = "final loss" if ended.status == "complete" else "loss"
    mean = f" (mean of the last {counted(ended.loss_samples, 'sample')})" if ended.loss_samples else ""
    loss = f", {which} {ended.loss:.4f}{mean}" if ended.loss is not None else ""
    evaluated = f", evaluation loss {ended.eval_loss:.4f}" if ended.eval_loss is not None else ""
    speed = (
        f" ({ended.tokens_per_second:,.0f} tokens/s without the first steps)"
        if ended.tokens_per_second is not None
        else ""
    )
    lost = f" ({ended.undelivered:,} more could not be decoded)" if ended.undelivered else ""
    why = f" ({escape(ended.detail)})" if ended.status == "complete" and ended.detail else ""
    console.print(
        f"[bold]{ended.status}[/]{why}: step {ended.step:,} of {ended.steps:,}{loss}{evaluated}, "
        f"{counted(ended.samples_seen, 'sample')}{lost} in {duration(ended.seconds)}{speed}"
    )
    for problem in outcome.problems:
        console.print(f"[yellow]{escape(problem)}[/]")
    if outcome.interrupted:
        console.print(f"next: {escape(again)}")
        return
    if outcome.final is not None:
        console.print(f"weights: {escape(str(outcome.final))}")
    if outcome.report is not None:
        console.print(f"next: open {escape(str(outcome.report))}")


def outcome_json(outcome: TrainOutcome) -> dict[str, object]:
    """A run for machines."""
    return {
        **ready_json(outcome.ready),
        "outcome": outcome.outcome.plain(),
        "report": None if outcome.report is None else str(outcome.report),
        "final": None if outcome.final is None else str(outcome.final),
        "problems": list(outcome.problems),
    }
