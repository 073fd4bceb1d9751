"""`packtrain inspect`: a plan, one pack, one sample, one optimizer step, or a batch token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.text import Text

from packtrain.cli.common import Json, print_json
from packtrain.cli.interruptible import interruptible
from packtrain.cli.pack import plan_json, show_blocked, show_plan
from packtrain.cli.terminal import Terminal, output, table
from packtrain.core.errors import ConfigError
from packtrain.core.numbers import counted, format_number, percent, shown

if TYPE_CHECKING:
    from packtrain.app.inspect_plan import InspectedStep, PackedSample, PackPlace
    from packtrain.delivery.batch_contents import BatchMedium, BatchSample, BatchToken, InspectedBatch
    from packtrain.packing.pack_plan import PackPlan

_ID, _NAME, _TOKEN = 120, 60, 200  # characters of names and texts from data that are shown
_AXES = ("position", "time", "height", "width")  # the rows of position_ids
_ESCAPES = {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\", '"': r"\""}
_BOUNDARY = "-" * 4
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


def inspect(
    plan: Annotated[
        Path, typer.Argument(help="A folder written by packtrain pack, or by packtrain train: the plan of that run.")
    ],
    pack: Annotated[int | None, typer.Option("--pack", help="Show this pack with its samples.")] = None,
    sample: Annotated[
        str | None, typer.Option("--sample", help="Show which packs hold the sample with this id.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option("--step", help="For a run: show the packs and samples of this optimizer step, counted from 1."),
    ] = None,
    blocked: Annotated[bool, typer.Option("--blocked", help="Show how many placements each limit rejected.")] = False,
    epoch: Annotated[int | None, typer.Option("--epoch", help="The epoch of --pack. Default: 0.")] = None,
    batch: Annotated[
        bool,
        typer.Option(
            "--batch", help="With --pack or --step: decode packs and show them token by token, as the model gets them."
        ),
    ] = False,
    all_tokens: Annotated[
        bool, typer.Option("--all-tokens", help="With --batch: do not fold runs of vision tokens.")
    ] = False,
    attn_implementation: Annotated[
        str | None,
        typer.Option(
            help="With --batch: sdpa, eager, flex, varlen, flash_attention_2 or flash_attention_3. Default: sdpa; "
            "with --step that of the run."
        ),
    ] = None,
    costs: Annotated[Path | None, typer.Option(help="The cost table, if it was moved after packing.")] = None,
    as_json: Json = False,
) -> None:
    """Inspect a plan (summary, pack, sample, limits), a pack as the model gets it, or a step of a run.

    Example: packtrain inspect plan --pack 0 --batch

    Example: packtrain inspect run --step 120 --batch
    """
    from packtrain.app import inspect_plan as looking
    from packtrain.packing.schedule import balance_table

    if sum((pack is not None, sample is not None, step is not None, blocked)) > 1:
        names = "--pack, --sample, --step, --blocked"
        raise ConfigError("packtrain inspect", got=f"several of {names}", expected="one of them")
    if epoch is not None and pack is None:
        raise ConfigError("--epoch", got=epoch, expected="--pack as well: the pack of that epoch")
    _check_batch_options(pack, step, batch, all_tokens, attn_implementation)
    if step is not None:
        _inspect_step(plan, costs, step, batch, attn_implementation, all_tokens, as_json)
    elif pack is not None and batch:
        _inspect_batch(plan, costs, pack, epoch or 0, attn_implementation or "sdpa", all_tokens, as_json)
    elif pack is not None:
        pack_plan, table = looking.open_plan(plan, costs)
        samples = looking.pack_samples(pack_plan, table, pack, epoch or 0)
        if as_json:
            print_json({"pack": pack, "epoch": epoch or 0, "samples": [asdict(one) for one in samples]})
        else:
            show_samples(pack, samples, pack_plan.config.packing_length, output)
    elif sample is not None:
        pack_plan, table = looking.open_plan(plan, costs)
        places, rows = looking.find_sample(pack_plan, table, sample)
        if as_json:
            print_json({"sample": sample, "rows": rows, "places": [asdict(place) for place in places]})
        else:
            show_places(sample, places, rows, pack_plan, output)
    else:
        pack_plan = looking.load_plan(plan) if costs is None else looking.open_plan(plan, costs)[0]
        balance = () if blocked else balance_table(pack_plan)
        if as_json:
            print_json(asdict(pack_plan.summary.blocked) if blocked else plan_json(pack_plan, balance))
        elif blocked:
            show_blocked(pack_plan, output)
        else:
            show_plan(pack_plan, balance, output)


def _check_batch_options(
    pack: int | None, step: int | None, batch: bool, all_tokens: bool, attn_implementation: str | None
) -> None:
    if batch and pack is None and step is None:
        raise ConfigError("--batch", got="no --pack", expected="--pack or --step as well: what to decode")
    for option, given in (("--all-tokens", all_tokens), ("--attn-implementation", attn_implementation is not None)):
        if given and not batch:
            raise ConfigError(option, got="no --batch", expected="--batch as well: the pack as the model gets it")


def _inspect_step(
    run: Path, costs: Path | None, step: int, batch: bool, attention: str | None, all_tokens: bool, as_json: bool
) -> None:
    from packtrain.app.inspect_batch import step_batches
    from packtrain.app.inspect_plan import inspect_step
    from packtrain.core.cache_root import cache_dir

    inspected, batches = inspect_step(run, step, costs), []
    if batch:
        with interruptible("nothing was changed"):
            cache = cache_dir() / "rows"
            batches = list(step_batches(run, inspected, costs, attn_implementation=attention, cache=cache))
    if as_json:
        print_json(step_json(inspected) | ({"batches": [asdict(one) for one in batches]} if batch else {}))
        return
    show_step(inspected, output)
    for place, one in zip(inspected.packs, batches, strict=False):
        output.print(f"Micro-batch {place.micro_batch}, rank {place.rank}:")
        show_batch(one, output, all_tokens=all_tokens)


def _inspect_batch(
    plan: Path, costs: Path | None, pack: int, epoch: int, attn_implementation: str, all_tokens: bool, as_json: bool
) -> None:
    from packtrain.app.inspect_batch import inspect_batch
    from packtrain.app.inspect_plan import open_plan
    from packtrain.core.cache_root import cache_dir

    pack_plan, table = open_plan(plan, costs)
    with interruptible("nothing was changed"):
        inspected = inspect_batch(
            pack_plan, table, pack, epoch, attn_implementation=attn_implementation, cache=cache_dir() / "rows"
        )
    if as_json:
        print_json(asdict(inspected))
    else:
        show_batch(inspected, output, all_tokens=all_tokens)


def show_samples(number: int, samples: Sequence[PackedSample], length: int, console: Terminal) -> None:
    """One pack with its samples."""
    tokens = sum(sample.tokens for sample in samples)
    fill = f"{tokens:,} of {length:,} tokens ({percent(tokens / length)})"
    title = f"Pack {number}: {counted(len(samples), 'sample')}, {fill}"
    videos = any(sample.videos for sample in samples)
    names = ("id", "source", "origin")
    counts = ("from", "tokens", "labels", "vision", "images", *(["videos"] if videos else []), "patches")
    listed = table(title, (*names, *counts), text=names)
    for sample in samples:
        listed.add_row(
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
    console.print(listed)


def show_places(name: str, places: Sequence[PackPlace], rows: Sequence[int], plan: PackPlan, console: Terminal) -> None:
    """Where a sample went."""
    name = escape(shown(name, _ID))
    if not places:
        console.print(f"{name} is not packed; the plan's ledger.jsonl has the reason.")
        return
    console.print(f"{name}: {counted(len(rows), 'row')} of the cost table")
    listed = table("", ("epoch", "pack", "row", "tokens"))
    for place in places:
        part = f"{place.tokens:,}" if place.whole else f"{place.start:,} to {place.start + place.tokens:,}"
        listed.add_row(str(place.epoch), f"{place.pack:,}", f"{place.row:,}", part)
    console.print(listed)


def step_json(step: InspectedStep) -> dict[str, object]:
    """A step for machines; numbers that are not finite are null."""
    packs = [
        {**asdict(pack), **{name: pack.total(name) for name in ("supervised_tokens", *_COLUMNS)}} for pack in step.packs
    ]
    logged = {name: value if math.isfinite(value) else None for name, value in step.logged.items()}
    return {**asdict(step), "packs": packs, "logged": logged}


def show_step(step: InspectedStep, console: Terminal) -> None:
    """A step for people."""
    samples = sum(len(pack.samples) for pack in step.packs)
    title = f"Step {step.step:,} of {step.steps:,}, epoch {step.epoch}: {counted(len(step.packs), step.unit)}"
    title += f", {counted(samples, 'sample')}, {sum(pack.total('tokens') for pack in step.packs):,} tokens"
    several = len({sample.source for pack in step.packs for sample in pack.samples}) > 1
    videos = any(pack.total("videos") for pack in step.packs)
    columns = {name: name for name in _COLUMNS if videos or name != "videos"}
    columns = {"tokens": "tokens", "labels": "supervised_tokens"} | columns
    names = ("micro-batch", "rank", step.unit, "sample", *columns, *(["source"] if several else []))
    listed = table(title, names, text=("sample", "source"))
    for pack in step.packs:
        contents = (
            f"[bold]{counted(len(pack.samples), 'sample')}, {percent(pack.total('tokens') / step.packing_length)}[/]"
        )
        place = (str(pack.micro_batch), str(pack.rank), str(pack.pack))
        listed.add_row(*place, contents, *(f"{pack.total(name):,}" for name in columns.values()))
        for one in pack.samples:
            numbers = (f"{getattr(one, name):,}" for name in columns.values())
            source = [escape(shown(one.source, 40))] if several else []
            listed.add_row("", "", "", escape(shown(one.id, _ID)), *numbers, *source)
    console.print(listed)
    if not step.logged:
        console.print("metrics.jsonl does not have this step: not trained yet, or not logged.")
        return
    words = [
        f"{name} {format_number(kind, step.logged[key]) if math.isfinite(step.logged[key]) else step.logged[key]}"
        for key, name, kind in _LOGGED
        if key in step.logged
    ]
    console.print("Logged: " + ", ".join(words), markup=False)
    for warning in step.warnings:
        console.print(f"Warning: {shown(warning, 400)}", markup=False)


def show_batch(batch: InspectedBatch, console: Terminal, *, all_tokens: bool = False) -> None:
    """A batch for people; runs of media tokens are one line each unless all tokens are wanted."""
    _head(batch, console)
    for failure in batch.failures:
        name = f"{shown(failure.id, _ID)} ({shown(failure.origin, _ID)})"
        reason = shown(f"{failure.reason}: {failure.detail}", 2 * _ID)
        console.print(f"[bold red]not in the batch:[/] {escape(name)}: {escape(reason)}")
    for line in _token_lines(batch, all_tokens):
        console.print(line)
    if not all_tokens and any(len(run) > 1 for run in _runs(batch.tokens, fold=True)):
        console.print("Runs of media and padding are folded; --all-tokens shows each token.")


def quote(text: str) -> str:
    r"""A text of data as one line that steers no terminal.

    >>> print(quote('say "hi"\n\x1b[31m\u202e'))
    "say \"hi\"\n\x1b[31m\u202e"
    """
    return '"' + "".join(_ESCAPES.get(char) or _printable(char) for char in _shorten(text)) + '"'


def _shorten(text: str) -> str:
    half = _TOKEN // 2
    return text if len(text) <= _TOKEN else f"{text[:half]}…{text[-half:]}"


def _printable(char: str) -> str:
    if char.isprintable():
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _head(batch: InspectedBatch, console: Terminal) -> None:
    patches = "an unknown number of patches" if batch.patches is None else counted(batch.patches, "patch", "patches")
    counts = [
        counted(len(batch.samples), "sample"),
        f"{batch.num_tokens:,} of {batch.packing_length:,} tokens",
        f"{batch.supervised_tokens:,} supervised",
        *([counted(batch.images, "image")] if batch.images else []),
        *([counted(batch.videos, "video")] if batch.videos else []),
        *([patches] if batch.images or batch.videos else []),
        *([f"{batch.padding:,} padding tokens"] if batch.padding else []),
    ]
    title = f"Pack {batch.pack} of epoch {batch.epoch} as {batch.model_type} gets it ({batch.attn_implementation})"
    console.print(f"{escape(title)}: {', '.join(counts)}")
    columns = ("argument", "shape", "type")
    arguments = table("Arguments of the forward pass", columns, text=columns)
    for one in batch.arguments:
        shape = " x ".join(map(str, one.shape)) if one.shape is not None else f"= {one.value}"
        arguments.add_row(one.name, shape, one.dtype)
    console.print(arguments)
    ends = ", ".join(f"{place:,}" for place in batch.boundaries)
    console.print(f"Boundaries, where positions restart: {ends}")


def _runs(tokens: Sequence[BatchToken], *, fold: bool) -> Iterator[list[BatchToken]]:
    """Tokens that are shown in one line."""
    run: list[BatchToken] = []
    for token in tokens:
        same = run and _run_key(run[-1]) == _run_key(token)
        if run and not (fold and same and token.kind != "text"):
            yield run
            run = []
        run.append(token)
    if run:
        yield run


def _run_key(token: BatchToken) -> tuple[int | None, str, int | None, bool]:
    # Media never carry loss; if they did, it must show.
    return token.sample, token.kind, token.medium, token.loss


def _token_lines(batch: InspectedBatch, all_tokens: bool) -> Iterator[Text]:
    """A headline for each sample, and under it one line for each token or run."""
    if not batch.tokens:
        return
    runs = list(_runs(batch.tokens, fold=not all_tokens))
    axes = _AXES[: len(batch.tokens[0].positions)]
    cells = [[_range(run, lambda t: t.at), *(_range(run, _axis(n)) for n in range(len(axes)))] for run in runs]
    titles = ["token", *axes]
    widths = [max(len(title), *(len(row[n]) for row in cells)) for n, title in enumerate(titles)]
    yield Text(
        "  ".join(title.rjust(width) for title, width in zip(titles, widths, strict=True)) + "  loss  text or medium",
        "bold",
    )
    last: int | None = -1
    for run, row in zip(runs, cells, strict=True):
        owner = run[0].sample
        if owner != last:
            yield _headline(batch, owner)
            last = owner
        line = Text("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
        line.append("  loss  " if run[0].loss else "        ", "green")
        yield line.append(_what(batch, run), "" if run[0].kind == "text" else "cyan")


def _axis(number: int) -> Any:
    return lambda token: token.positions[number]


def _range(run: Sequence[BatchToken], value: Any) -> str:
    """The smallest and the largest of a number over a run."""
    values = [value(token) for token in run]
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}-{high}"


def _headline(batch: InspectedBatch, number: int | None) -> Text:
    if number is None:
        return Text(f"{_BOUNDARY} padding: no loss, not attended to", "bold")
    sample = batch.samples[number]
    part = f", from its token {sample.start:,}" if sample.start else ""
    counts = f"{counted(sample.tokens, 'token')}{part}, {sample.supervised_tokens:,} supervised"
    name = shown(sample.id, _ID) + (f" ({shown(sample.origin, _ID)})" if sample.origin != sample.id else "")
    return Text(f"{_BOUNDARY} sample {number}: {name}: {counts}", "bold")


def _what(batch: InspectedBatch, run: Sequence[BatchToken]) -> str:
    """The text of a token, or whose tokens a run is."""
    token = run[0]
    count = f": {len(run):,} tokens" if len(run) > 1 else ""
    if token.sample is None:
        return f"padding{count}"
    if token.kind != "text":
        if token.medium is None:
            return f"one of the {token.kind}s of sample {token.sample}{count}"
        medium = _medium(batch.samples[token.sample], token)
        size = f"{shown(medium.name, _NAME)}, {medium.width}x{medium.height}"
        return f"{token.kind} {token.medium} of sample {token.sample} ({size}){count}"
    if token.text is not None:
        return quote(token.text)
    return f"bytes {token.bytes}, part of a character" if token.bytes else f"id {token.id}, which has no text"


def _medium(sample: BatchSample, token: BatchToken) -> BatchMedium:
    return next(one for one in sample.media if (one.kind, one.number) == (token.kind, token.medium))
