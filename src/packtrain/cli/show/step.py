"""How one optimizer step of a run looks in a terminal."""

from __future__ import annotations

import math
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from packtrain.app.inspect_plan import StepSeen
from packtrain.core.numbers import counted, formatted, percent, shown

_ID = 80  # characters of a sample's name that are shown
_COLUMNS = ("tokens", "images", "videos", "patches")
_LOGGED = (
    ("loss", "loss", "loss"),
    ("grad_norm", "gradient norm", "loss"),
    ("step_seconds", "seconds", "decimal"),
    ("tokens_per_second", "real tokens/s", "large"),
    ("padding_share", "padding", "percent"),
    ("data_wait_share", "waiting for data", "percent"),
    ("memory_bytes", "peak memory", "gib"),
    ("mfu", "MFU", "percent"),
)


def step_json(seen: StepSeen) -> dict[str, object]:
    """A step for machines; numbers that are not finite are null."""
    packs = [
        {**asdict(pack), **{name: getattr(pack, name) for name in ("supervised_tokens", *_COLUMNS)}}
        for pack in seen.packs
    ]
    logged = {name: value if math.isfinite(value) else None for name, value in seen.logged.items()}
    return {**asdict(seen), "packs": packs, "logged": logged}


def show_step(seen: StepSeen, console: Console) -> None:
    """A step for people."""
    samples = sum(len(pack.samples) for pack in seen.packs)
    title = f"Step {seen.step:,} of {seen.steps:,}, epoch {seen.epoch}: {counted(len(seen.packs), seen.unit)}"
    title += f", {counted(samples, 'sample')}, {sum(pack.tokens for pack in seen.packs):,} tokens"
    several = len({sample.source for pack in seen.packs for sample in pack.samples}) > 1
    videos = any(pack.videos for pack in seen.packs)
    columns = {name: name for name in _COLUMNS if videos or name != "videos"}
    columns = {"tokens": "tokens", "labels": "supervised_tokens"} | columns
    table = Table(title=title, title_justify="left")
    for name in ("micro-batch", "rank", seen.unit, "sample", *columns, *(["source"] if several else [])):
        table.add_column(name, justify="left" if name in ("sample", "source") else "right", overflow="fold")
    for pack in seen.packs:
        said = f"[bold]{counted(len(pack.samples), 'sample')}, {percent(pack.tokens / seen.packing_length)}[/]"
        place = (str(pack.micro_batch), str(pack.rank), str(pack.pack))
        table.add_row(*place, said, *(f"{getattr(pack, name):,}" for name in columns.values()))
        for one in pack.samples:
            numbers = (f"{getattr(one, name):,}" for name in columns.values())
            source = [escape(shown(one.source, 40))] if several else []
            table.add_row("", "", "", escape(shown(one.id, _ID)), *numbers, *source)
    console.print(table)
    if not seen.logged:
        console.print("metrics.jsonl does not have this step: not trained yet, or not logged.")
        return
    words = [
        f"{name} {formatted(kind, seen.logged[key]) if math.isfinite(seen.logged[key]) else seen.logged[key]}"
        for key, name, kind in _LOGGED
        if key in seen.logged
    ]
    console.print("Logged: " + ", ".join(words), soft_wrap=True, markup=False)
    for warning in seen.warnings:
        console.print(f"Warning: {shown(warning, 400)}", soft_wrap=True, markup=False)
