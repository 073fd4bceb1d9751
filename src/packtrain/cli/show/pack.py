"""How plans look in a terminal: packs, limits, equal work, one pack, one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packtrain.app.inspection.plan import PackedSample, PackPlace
from packtrain.app.pack import PackOutcome
from packtrain.cli.show.bars import Bar
from packtrain.core.numbers import counted, shown
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.packing_config import SETTING_OF
from packtrain.packing.plan_builder import PackProgress as Packing
from packtrain.packing.schedule import BalanceLine

_ID, _NAME = 120, 48  # characters of names from data that are shown
_POOR_FILL, _HALF = 0.9, 0.5  # of a pack's tokens; of the probe samples that one limit rejects


class PackBar(Bar):
    """A bar over the rows of the epoch that is being packed."""

    def __init__(self, console: Console, *, quiet: bool) -> None:
        super().__init__("packing", console, quiet=quiet)

    def update(self, progress: Packing) -> None:
        """Show where packing is."""
        detail = f"epoch {progress.epoch + 1} of {progress.epochs}, {progress.rows:,} of {progress.total:,} samples"
        self.show(progress.rows, progress.total, detail)


def plan_json(plan: PackPlan, balance: Sequence[BalanceLine] = ()) -> dict[str, object]:
    """A plan for machines."""
    said = plan.summary.to_json()
    keys = ("config", "epochs", "blocked", "ledger", "packer_version", "cost_table")
    return {
        "folder": str(plan.folder) if plan.folder else None,
        "fingerprint": plan.fingerprint,
        **{key: said[key] for key in keys},
        "balance": [asdict(line) for line in balance],
    }


def show_packed(packed: PackOutcome, balance: Sequence[BalanceLine], console: Console) -> None:
    """A plan that was just made."""
    if packed.reused:
        console.print("Nothing has changed since this was packed: the plan is reused.")
    for note in packed.notes:
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    show_plan(packed.plan, balance, console)
    console.print(f"Work per pack is predicted for {escape(packed.work_from)}.", soft_wrap=True)
    if packed.plan.folder is not None:
        console.print(f"next: packtrain inspect {escape(str(packed.plan.folder))} --pack 0", soft_wrap=True)


def show_plan(plan: PackPlan, balance: Sequence[BalanceLine], console: Console) -> None:
    """A plan for people."""
    console.print(_epochs_table(plan))
    console.print(_limits_table(plan))
    for line in _sentences(plan):
        console.print(line, soft_wrap=True)
    if balance:
        console.print(_balance_table(balance))
    reasons = plan.summary.ledger.reasons
    if reasons:
        table = Table(title="Not packed", title_justify="left")
        table.add_column("stage: reason")
        table.add_column("samples", justify="right")
        for reason, count in reasons.items():
            table.add_row(escape(reason), f"{count:,}")
        console.print(table)


def _epochs_table(plan: PackPlan) -> Table:
    config = plan.config
    title = f"Packs of {config.packing_length:,} tokens, {config.packing_strategy}"
    table = Table(title=escape(title), title_justify="left")
    for name in ("epoch", "packs", "bound", "of bound", "fill", "samples", "per pack", "dropped"):
        table.add_column(name, justify="right")
    for number, counts in enumerate(plan.summary.epochs[:8]):
        samples = plan.epoch(number).num_samples
        table.add_row(
            str(number),
            f"{counts.packs:,}",
            f"{counts.bound:,}",
            f"{counts.of_bound:.4f}",
            f"{counts.fill:.2%}",
            f"{samples:,}",
            f"{samples / max(counts.packs, 1):.1f}",
            f"{counts.ledger:,}",
        )
    more = plan.num_epochs - 8
    if more > 0:
        table.caption = f"and {more} more epochs"
    return table


def _limits_table(plan: PackPlan) -> Table:
    table = Table(title="Limits of a pack (first epoch)", title_justify="left")
    table.add_column("limit")
    for name in ("allowed", "largest pack", "tightest in", "rejects", "only this"):
        table.add_column(name, justify="right")
    counts, blocked = plan.summary.epochs[0], plan.summary.blocked
    offers = max(blocked.offers, 1)
    for resource, limit in plan.config.capacities().items():
        found = blocked.limits[resource]
        table.add_row(
            SETTING_OF[resource],
            f"{limit:,}",
            f"{counts.most[resource]:,}",
            counted(found.fullest, "pack"),
            f"{found.stopped / offers:.1%}",
            f"{found.alone / offers:.1%}",
        )
    return table


def _sentences(plan: PackPlan) -> list[str]:
    counts, blocked = plan.summary.epochs[0], plan.summary.blocked
    found = [
        f"rejects: of {counted(blocked.offers, 'probe sample')}, the share that this limit keeps out of finished packs;"
        " only this: no other limit rejects them"
    ]
    for resource in plan.config.capacities():
        alone = blocked.limits[resource].alone / max(blocked.offers, 1)
        if resource != "tokens" and counts.fill < _POOR_FILL and alone > _HALF:
            found.append(
                f"{SETTING_OF[resource]} keeps packs only {counts.fill:.1%} full: "
                "raise it, or choose a shorter packing_length"
            )
    if counts.cut_rows:
        lost = f"{counts.tokens_lost:,} tokens and {counts.supervised_lost:,} labels are not used"
        found.append(f"{counted(counts.cut_rows, 'sample')} cut; {lost}.")
    if counts.waiting:
        found.append(f"{counted(counts.waiting, 'sample')} left for later epochs (mixture weight below 1).")
    total = counts.entries + counts.ledger
    ledger = counts.ledger
    found.append(f"{counted(total, 'entry', 'entries')} = {counts.entries:,} packed + {ledger:,} in the ledger")
    return found


def _balance_table(balance: Sequence[BalanceLine]) -> Table:
    spread = any(round(one.length_spread) for line in balance for one in (line.random, line.sorted, line.strict))
    title = "Load balance: slowest rank / mean" + (" (spread of a step's mean sample length)" if spread else "")
    table = Table(title=title, title_justify="left")
    for name in ("ranks", "packs per step", "steps", "random order", "default: sorted in steps", "balance: strict"):
        table.add_column(name, justify="right")
    for line in balance:
        table.add_row(
            f"{line.ranks:,}",
            f"{line.packs_per_step:,}",
            f"{line.steps:,}",
            *(
                f"{one.slowest:.3f}" + (f" ({one.length_spread:,.0f})" if spread else "")
                for one in (line.random, line.sorted, line.strict)
            ),
        )
    return table


def show_samples(number: int, samples: Sequence[PackedSample], length: int, console: Console) -> None:
    """One pack with its samples."""
    tokens = sum(sample.tokens for sample in samples)
    title = f"Pack {number}: {counted(len(samples), 'sample')}, {tokens:,} of {length:,} tokens ({tokens / length:.1%})"
    table = Table(title=title, title_justify="left")
    for name in ("id", "source", "origin"):
        table.add_column(name, overflow="fold")
    videos = any(sample.videos for sample in samples)
    for name in ("from", "tokens", "labels", "vision", "images", *(["videos"] if videos else []), "patches"):
        table.add_column(name, justify="right")
    for sample in samples:
        table.add_row(
            escape(shown(sample.id, _ID)),
            escape(shown(sample.source, _NAME)),
            escape(shown(sample.origin, _ID)),
            f"{sample.start:,}",
            f"{sample.tokens:,}",
            f"{sample.supervised_tokens:,}",
            f"{sample.vision_tokens:,}",
            f"{sample.images:,}",
            *([f"{sample.videos:,}"] if videos else []),
            f"{sample.patches:,}",
        )
    console.print(table)


def show_places(name: str, places: Sequence[PackPlace], rows: Sequence[int], plan: PackPlan, console: Console) -> None:
    """Where a sample went."""
    name = escape(shown(name, _ID))
    if not places:
        console.print(f"{name} is not packed; the plan's ledger.jsonl has the reason.", soft_wrap=True)
        return
    console.print(f"{name}: {counted(len(rows), 'row')} of the cost table", soft_wrap=True)
    table = Table()
    for column in ("epoch", "pack", "row", "tokens"):
        table.add_column(column, justify="right")
    for place in places:
        part = f"{place.tokens:,}" if place.whole else f"{place.start:,} to {place.start + place.tokens:,}"
        table.add_row(str(place.epoch), f"{place.pack:,}", f"{place.row:,}", part)
    console.print(table)


def show_blocked(plan: PackPlan, console: Console) -> None:
    """How many placements each limit rejected."""
    console.print(_limits_table(plan))
    console.print(_sentences(plan)[0], soft_wrap=True)
    blocked = plan.summary.blocked
    taken = blocked.offers - blocked.refused
    console.print(f"{taken:,} of {counted(blocked.offers, 'probe sample')} would still have fitted.", soft_wrap=True)
