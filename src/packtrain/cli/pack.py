"""`packtrain pack`, and how plans look: packs, limits, load balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from packtrain.cli.common import Json, print_json
from packtrain.cli.config_options import verb_options
from packtrain.cli.interruptible import STARTS_OVER, interruptible
from packtrain.cli.measure import ledger_table
from packtrain.cli.terminal import Bar, Terminal, output, table
from packtrain.core.errors import ConfigError
from packtrain.core.numbers import counted, decimal, percent

if TYPE_CHECKING:
    from packtrain.app.pack import PackOutcome
    from packtrain.packing.pack_plan import PackPlan
    from packtrain.packing.plan_builder import PackProgress
    from packtrain.packing.schedule import BalanceLine

_POOR_FILL, _HALF = 0.9, 0.5  # of a pack's tokens; of the probe samples that one limit rejects


@verb_options("pack")
def pack(
    costs: Annotated[Path, typer.Argument(help="A folder written by packtrain measure.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the plan. Plans are never overwritten.")],
    settings: dict[str, Any],
    epochs: Annotated[int, typer.Option(help="Number of epochs to pack.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    as_json: Json = False,
) -> None:
    """Pack samples into sequences: near-optimal under any number of limits, deterministic, every sample accounted for.

    The plan lists which samples share a pack in each epoch. Rerunning the command does nothing if nothing has changed.

    Example: packtrain pack costs --packing-length 16384 --max-images-per-pack 16 --out plan
    """
    from packtrain.app.pack import pack_outcome
    from packtrain.packing.pack_plan import PLAN
    from packtrain.packing.packing_config import PackingConfig
    from packtrain.packing.schedule import balance_table

    if "packing_length" not in settings:
        raise ConfigError("--packing-length", got="none", expected="a number of tokens, such as 16384")
    config = PackingConfig(epochs=epochs, seed=seed, **settings)
    there = (out / PLAN).exists()

    def then() -> str:
        return "the plan was already complete" if not there and (out / PLAN).exists() else STARTS_OVER

    with interruptible(then), PackBar(quiet=as_json) as bar:
        packed = pack_outcome(costs, config, out, bar.update)
    if as_json:
        facts = {"reused": packed.reused, "work_from": packed.work_from, "notes": list(packed.notes)}
        print_json({**facts, **plan_json(packed.plan, balance_table(packed.plan))})
    else:
        show_packed(packed, output)


class PackBar(Bar):
    """A bar over the rows of the epoch that is being packed."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__("packing", quiet=quiet)

    def update(self, progress: PackProgress) -> None:
        """Show where packing is."""
        detail = f"epoch {progress.epoch + 1} of {progress.epochs}, {progress.rows:,} of {progress.total:,} samples"
        self.show(progress.rows, progress.total, detail)


def plan_json(plan: PackPlan, balance: Sequence[BalanceLine] = ()) -> dict[str, object]:
    """A plan for machines."""
    summary = asdict(plan.summary)
    keys = ("config", "epochs", "blocked", "ledger", "packer_version", "cost_table")
    return {
        "folder": str(plan.folder) if plan.folder else None,
        "fingerprint": plan.fingerprint,
        **{key: summary[key] for key in keys},
        "balance": [asdict(line) for line in balance],
    }


def show_packed(packed: PackOutcome, console: Terminal) -> None:
    """A plan that was just made."""
    if packed.reused:
        console.print("Nothing has changed since this was packed: the plan is reused.")
    for note in packed.notes:
        console.print(f"[yellow]{escape(note)}[/]")
    show_packs(packed.plan, console)
    if packed.plan.folder is not None:
        folder = escape(str(packed.plan.folder))
        console.print(f"next: packtrain inspect {folder} --pack 0, or without --pack limits and load balance")
        console.print(f"then: packtrain train --model MODEL --data DATA data.plan={folder}")


def show_packs(plan: PackPlan, console: Terminal) -> None:
    """Packs and fill of each epoch, and what is in none."""
    console.print(_epochs_table(plan))
    for line in _sentences(plan):
        console.print(line)
    reasons = plan.summary.ledger.reasons
    if reasons:
        console.print(ledger_table("Dropped", "samples", reasons))


def show_plan(plan: PackPlan, balance: Sequence[BalanceLine], console: Terminal) -> None:
    """A plan in full."""
    show_packs(plan, console)
    show_blocked(plan, console)
    if balance:
        console.print(_balance_table(balance))


def _epochs_table(plan: PackPlan) -> Table:
    config = plan.config
    title = f"Packs of {config.packing_length:,} tokens, {config.packing_strategy}"
    epochs = table(escape(title), ("epoch", "packs", "lower bound", "fill", "samples", "per pack", "dropped"))
    for number, counts in enumerate(plan.summary.epochs[:8]):
        samples = plan.epoch(number).num_samples
        epochs.add_row(
            str(number),
            f"{counts.packs:,}",
            f"{counts.bound:,}",
            percent(counts.fill),
            f"{samples:,}",
            decimal(samples / max(counts.packs, 1)),
            f"{counts.ledger:,}",
        )
    more = plan.num_epochs - 8
    if more > 0:
        epochs.caption = f"and {more} more epochs"
    return epochs


def _limits_table(plan: PackPlan) -> Table:
    from packtrain.packing.packing_config import SETTING_OF

    columns = ("limit", "allowed", "largest pack", "tightest in", "rejects", "only this")
    limits = table("Limits of a pack (first epoch)", columns, text=("limit",))
    counts, blocked = plan.summary.epochs[0], plan.summary.blocked
    offers = max(blocked.offers, 1)
    for resource, limit in plan.config.capacities().items():
        numbers = blocked.limits[resource]
        limits.add_row(
            SETTING_OF[resource],
            f"{limit:,}",
            f"{counts.most[resource]:,}",
            counted(numbers.fullest, "pack"),
            percent(numbers.stopped / offers),
            percent(numbers.alone / offers),
        )
    return limits


def _sentences(plan: PackPlan) -> list[str]:
    from packtrain.packing.packing_config import SETTING_OF

    counts, blocked = plan.summary.epochs[0], plan.summary.blocked
    sentences = []
    for resource in plan.config.capacities():
        alone = blocked.limits[resource].alone / max(blocked.offers, 1)
        if resource != "tokens" and counts.fill < _POOR_FILL and alone > _HALF:
            sentences.append(
                f"{SETTING_OF[resource]} keeps packs only {percent(counts.fill)} full: "
                "raise it, or choose a shorter packing_length"
            )
    if counts.cut_rows:
        lost = f"{counts.tokens_lost:,} tokens and {counts.supervised_lost:,} supervised tokens are not used"
        sentences.append(f"{counted(counts.cut_rows, 'sample')} cut; {lost}.")
    if counts.waiting:
        sentences.append(f"{counted(counts.waiting, 'sample')} left for later epochs (mixture weight below 1).")
    total = counts.entries + counts.ledger
    ledger = counts.ledger
    sentences.append(f"{counted(total, 'sample')} = {counts.entries:,} packed + {ledger:,} dropped{_listed(ledger)}")
    return sentences


def _listed(dropped: int) -> str:
    return "; ledger.jsonl lists them with the reason" if dropped else ""


def _balance_table(balance: Sequence[BalanceLine]) -> Table:
    spread = any(round(one.length_spread) for line in balance for one in (line.random, line.sorted, line.strict))
    title = "Load balance: slowest rank / mean" + (" (spread of a step's mean sample length)" if spread else "")
    orders = ("random order", "default: sorted in steps", "balance: strict")
    ranks = table(title, ("ranks", "packs per step", "steps", *orders))
    for line in balance:
        ranks.add_row(
            f"{line.ranks:,}",
            f"{line.packs_per_step:,}",
            f"{line.steps:,}",
            *(
                f"{one.slowest:.3f}" + (f" ({one.length_spread:,.0f})" if spread else "")
                for one in (line.random, line.sorted, line.strict)
            ),
        )
    return ranks


def show_blocked(plan: PackPlan, console: Terminal) -> None:
    """How many placements each limit rejected."""
    blocked = plan.summary.blocked
    console.print(_limits_table(plan))
    console.print(
        f"rejects: of {counted(blocked.offers, 'probe sample')}, the share that this limit keeps out of finished packs;"
        " only this: no other limit rejects them"
    )
    fitting = blocked.offers - blocked.refused
    console.print(f"{fitting:,} of {counted(blocked.offers, 'probe sample')} would still have fitted.")
