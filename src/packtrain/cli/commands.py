"""The verbs, by name."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import packtrain
from packtrain.cli import bench as benchmarks
from packtrain.cli import cache as caches
from packtrain.cli import config as configs
from packtrain.cli.calibrate import calibrate
from packtrain.cli.common import run
from packtrain.cli.demo import demo
from packtrain.cli.doctor import doctor
from packtrain.cli.help_page import Command
from packtrain.cli.init import init
from packtrain.cli.inspect import inspect
from packtrain.cli.interruptible import interruptible
from packtrain.cli.measure import measure
from packtrain.cli.pack import pack
from packtrain.cli.plan import plan
from packtrain.cli.report import report
from packtrain.cli.train import train
from packtrain.cli.verify import verify


class Verbs(TyperGroup):
    """Commands that answer Ctrl-C in our words also before and after their own output."""

    def invoke(self, ctx: Any) -> Any:
        """Run the verb."""
        with interruptible():
            try:
                return super().invoke(ctx)
            except Exception as error:
                if hasattr(error, "option_name") and hasattr(error, "possibilities"):  # typer has a click of its own
                    error.possibilities = _meant(error) or error.possibilities
                raise


def _meant(error: Any) -> list[str]:
    """The option or setting of a run that another trainer's name for an option means."""
    from packtrain.config.sections import ALIASES, HOMES, LEADS

    name = error.option_name.lstrip("-").replace("-", "_")
    key = ALIASES[name][0] if name in ALIASES else LEADS.get(name, name)
    parameters = error.ctx.command.params if error.ctx is not None else ()
    options = {option for one in parameters for option in one.opts}
    if here := [dashed for one in (name, key) if (dashed := "--" + one.replace("_", "-")) in options]:
        return here[:1]
    if "config" not in {one.name for one in parameters} or key not in HOMES:
        return []
    return [f"{HOMES[key]}.{key}={_option_value(error.option_name)}, without dashes"]


def _option_value(option: str) -> str:
    """The value given to an option."""
    arguments = sys.argv[1:]
    for at, one in enumerate(arguments):
        if one.startswith(option + "="):
            return one.partition("=")[2]
        if one == option and at + 1 < len(arguments) and not arguments[at + 1].startswith("--"):
            return arguments[at + 1]
    return "VALUE"


app = typer.Typer(
    cls=Verbs,
    help="Sequence packing for fine-tuning vision-language and text models: measure a dataset, plan, pack, train.\n\n"
    "Start with: packtrain demo, or with your own data: packtrain train --model MODEL --data DATA",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
bench = typer.Typer(
    help="Benchmarks: each compares alternatives within one run.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(bench, name="bench")
cache = typer.Typer(help="The cache: list, clear, verify.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cache, name="cache")
config = typer.Typer(
    help="Convert configs of other systems; show a resolved config.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(config, name="config")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"packtrain {packtrain.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Sequence packing for fine-tuning vision-language and text models."""


app.command("init", cls=Command, short_help="Write a starter config with every setting explained.")(init)
app.command("measure", cls=Command, short_help="Measure what every record costs, exactly, from headers alone.")(measure)
app.command("plan", cls=Command, short_help="Find the best config for your model, data and GPUs.")(plan)
app.command("pack", cls=Command, short_help="Pack samples into sequences, under any number of limits.")(pack)
app.command("inspect", cls=Command, short_help="Inspect a plan or a run: one pack, one sample, one step.")(inspect)
app.command("verify", cls=Command, short_help="Check that packing is correct for a model and its attention.")(verify)
app.command("calibrate", cls=Command, short_help="Fit the memory and time models to this GPU.")(calibrate)
app.command("train", cls=Command, short_help="Train a model; writes a run folder and a report.")(train)
app.command("report", cls=Command, short_help="Write the report of a run, or compare several.")(report)
app.command("demo", cls=Command, short_help="Run the whole pipeline on a small synthetic dataset.")(demo)
app.command("doctor", cls=Command, short_help="Check the environment: GPU, kernels, packages.")(doctor)
config.command("convert", cls=Command, short_help="Convert another system's config; every key is accounted for.")(
    configs.convert
)
config.command("show", cls=Command, short_help="Print the resolved config, with all that it extends.")(configs.show)
cache.command("ls", cls=Command)(caches.ls)
cache.command("clear", cls=Command)(caches.clear)
cache.command("verify", cls=Command)(caches.verify)
bench.command("measure", cls=Command)(benchmarks.measure)
bench.command("pack", cls=Command)(benchmarks.pack)
bench.command("loader", cls=Command)(benchmarks.loader)
bench.command("train", cls=Command)(benchmarks.train)
bench.command("families", cls=Command)(benchmarks.families)


def main() -> None:
    """Run the command line."""
    run(app)
