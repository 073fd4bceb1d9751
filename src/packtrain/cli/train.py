"""`packtrain train`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from packtrain.cli.common import Json, errors, output, print_json, progress_console
from packtrain.cli.interrupts import is_interrupt
from packtrain.core.secrets import override_without_secrets

INTERRUPTED = 130  # as shells say it of a command that was ended by Ctrl-C


def train(
    config: Annotated[Path, typer.Argument(help="The run's config: sections model, data and training.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Settings over the config, such as training.learning_rate=1e-5 data.packing=false."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in its folder, from the newest complete checkpoint.")
    ] = False,
    clear_cache: Annotated[
        bool, typer.Option("--clear-cache", help="First remove what this config has made in the cache.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Everything up to the first step: measure, pack, prove, predict.")
    ] = False,
    max_samples: Annotated[
        int | None,
        typer.Option(min=1, help="A trial run on so many samples, with caches and a run folder of its own."),
    ] = None,
    batch_stats: Annotated[
        int, typer.Option(min=0, help="Print what the first batches of every rank hold: so many of each.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Train: from a config to a model, a run folder and a report. Alone, or under torchrun or accelerate launch.

    What is not measured or packed yet is measured and packed first. Ctrl-C saves a checkpoint, and --resume goes on
    from it exactly.

    Example: packtrain train run.yaml training.learning_rate=1e-5 --dry-run
    """
    from packtrain.app.show.train import PrepareBar, outcome_json, show_outcome, show_ready
    from packtrain.app.train.run import train as run
    from packtrain.app.train.values import Ready

    bar = PrepareBar(progress_console(), quiet=as_json)

    def ready(found: Ready) -> None:
        bar.__exit__()
        if not as_json:
            show_ready(found, output)

    try:
        with bar:
            outcome = run(
                config,
                tuple(overrides or ()),
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
        errors.print(
            "\n[yellow]interrupted[/]; what is complete is kept: the same command goes on, a run with --resume"
        )
        raise typer.Exit(INTERRUPTED) from None
    from packtrain.app.train.values import Place

    if Place.here().first:
        again = shlex.join(["packtrain", "train", str(config), *map(override_without_secrets, overrides or ())])
        if as_json:
            print_json(outcome_json(outcome))
        else:
            show_outcome(outcome, output, again)
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)
