"""The results of benchmarks as tables: one for each question. A row declares which of its values are columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from packtrain.core.numbers import FORMATS, MIB

if TYPE_CHECKING:
    from packtrain.bench.families import FamiliesResult
    from packtrain.bench.loader import LoaderResult, MemoryCourse
    from packtrain.bench.measure import MeasureResult
    from packtrain.bench.pack import PackResult, WorkSet


FAMILY_COLUMNS = {"images": "packed, with images", "text": "packed, text only", "padded": "padded"}


def column(title: str, form: str | Callable[[Any], str] = "{:,}", **options: Any) -> Any:
    """A field of a row that is a column of its table.

    `form` is a format of Python, a name in FORMATS, or a function of the row.
    """
    return field(metadata={"title": title, "format": form}, **options)


def table_of(title: str, rows: Sequence[Any], *, only: Sequence[str] = ()) -> Table:
    """A table of rows of one class, words to the left and numbers to the right; `only` names some of its columns."""
    columns = [one for one in fields(rows[0]) if one.metadata and (not only or one.name in only)]
    table = Table(title=title, title_justify="left")
    for one in columns:
        is_number = isinstance(getattr(rows[0], one.name), int | float | None)
        table.add_column(one.metadata["title"], justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(_cell(row, one.name, one.metadata["format"]) for one in columns))
    return table


def _cell(row: Any, name: str, form: str | Callable[[Any], str]) -> str:
    """Empty where a value that is only formatted is not known."""
    if not isinstance(form, str):
        return form(row)
    value = getattr(row, name)
    if value is None:
        return ""
    return FORMATS[form](value) if form in FORMATS else form.format(value)


# ---- bench loader


def show_loader(result: LoaderResult, console: Console) -> None:
    """Of `packtrain bench loader`."""
    speed, data = result.speed, result.data
    console.print(f"{result.model}, {result.cores} cores, load {result.load:.1f} at the start; one thread per process.")
    title = (
        f"Speed: {speed.samples:,} samples, {speed.images:,} images, {speed.tokens:,} tokens, "
        f"packs of {speed.capacity:,}; medians of {speed.rounds} interleaved epochs"
    )
    console.print(table_of(title, speed.lines))
    console.print(table_of(f"Long datasets, packs of {data[0].capacity:,} tokens", data))
    title = "Time to the first batch of a new process, no workers, data files not in memory"
    console.print(table_of(title, result.start))
    title = f"Memory of {result.memory[0].processes} processes, MiB: mean over the first and over the last steps"
    console.print(table_of(title, _memory_lines(result.memory)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _MemoryLine:
    """One kind of memory of one run, in MiB."""

    kind: str = column("kind", "{}")
    rows: int = column("rows")
    batches: int = column("steps")
    samples: int = column("samples")
    first: float = column("first", "{:,.1f}")
    last: float = column("last", "{:,.1f}")
    growth: float = column("growth", "{:+,.1f}")


_KINDS = {
    "rss": "resident, shared pages in each process",
    "pss": "resident, shared pages once (PSS)",
    "anonymous": "  private to the processes",
    "file": "  file pages, which the system may drop",
    "shared": "  shared memory",
}


def _memory_lines(courses: Sequence[MemoryCourse]) -> list[_MemoryLine]:
    lines = []
    for kind, name in _KINDS.items():
        for one in (one for one in courses if kind in one.first):
            first, last = (end[kind] / MIB for end in (one.first, one.last))
            sizes = {"rows": one.rows, "batches": one.batches, "samples": one.samples}
            lines.append(_MemoryLine(kind=name, **sizes, first=first, last=last, growth=last - first))
    return lines


# ---- bench pack


def show_pack(result: PackResult, console: Console) -> None:
    """Of `packtrain bench pack`."""
    console.print(
        f"{result.set}: {result.samples:,} samples, {result.tokens:,} tokens. "
        f"One core of {result.cores}, load {result.load:.1f} at the start; compilation is not counted."
    )
    numbers = ("capacity", "samples", "bound", "packs", "of_bound", "seconds", "samples_per_second")
    console.print(table_of("Best fit, one resource", result.one_resource, only=(*numbers, "nanoseconds_per_sample")))
    title = f"Strategies at {result.strategies.capacity:,} tokens"
    only = ("strategy", "packs", "of_bound", "seconds", "samples_per_second")
    console.print(table_of(title, result.strategies.rows, only=only))
    others = result.others
    if others.rows:
        console.print(table_of("Other projects' packers, and ours on the same lengths", others.rows))
        for note in others.notes:
            console.print(note)
    for name, why in others.not_run.items():
        console.print(f"not run: {name} ({why})")
    console.print(table_of("Several resources: share of the bound (synthetic mixtures)", result.several))
    for work in result.equal_work.sets:
        limits = ", ".join(f"{name} {limit:,}" for name, limit in work.limits.items())
        packed = f"{work.samples:,} samples in {work.packs:,} packs ({limits})"
        title = f"Load balance for {result.equal_work.model}: {work.set}, {packed}"
        console.print(table_of(title, _order_lines(work)))
    if result.scaling:
        title = f"Growth: best fit at {result.scaling[0].capacity:,} tokens, one process per line"
        console.print(table_of(title, sorted(result.scaling, key=lambda row: (row.what, row.samples))))


@dataclass(frozen=True, kw_only=True, slots=True)
class _OrderLine:
    """One order of packs; how large the steps are is said once."""

    ranks: int | None = column("ranks", default=None)
    packs_per_step: int | None = column("packs a step", default=None)
    steps: int | None = column("steps", default=None)
    order: str = column("order", "{}")
    slowest: float = column("slowest / mean", "{:.4f}")
    length_spread: float = column("spread of length", "{:.1f}")
    samples_spread: float = column("spread of samples", "{:.1f}")


def _order_lines(work: WorkSet) -> list[_OrderLine]:
    lines = []
    for line in work.lines:
        sizes = {"ranks": line.ranks, "packs_per_step": line.packs_per_step, "steps": line.steps}
        for order in ("random", "sorted", "strict"):
            one = getattr(line, order)
            spreads = {"length_spread": one.length_spread, "samples_spread": one.samples_spread}
            lines.append(_OrderLine(**sizes, order=order, slowest=one.slowest, **spreads))
            sizes = {}
    return lines


# ---- bench measure


def show_measure(result: MeasureResult, console: Console) -> None:
    """Of `packtrain bench measure`."""
    title = f"Against the HF processor ({result.model}, {result.processor.processes} processes)"
    console.print(table_of(title, [result.processor]))
    console.print(table_of("Against tokenizer and header reading alone (one process)", result.floor))
    if result.memory:
        console.print(table_of("Memory of all processes (PSS)", result.memory))


# ---- bench train


def show_train(result: Mapping[str, Any], console: Console) -> None:
    """Of `packtrain bench train`."""
    title = (
        f"{result['model']} on {result['device']}: {result['samples']:,} samples of {result['mean_tokens']:,.0f} "
        f"tokens on average, an optimizer step about every {result['step_samples']} samples"
    )
    names = [one.name for one in fields(_TrainLine)]
    console.print(table_of(title, [_TrainLine(**{name: row.get(name) for name in names}) for row in result["rows"]]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrainLine:
    """One way to train; one that did not run has the reason in place of its speed."""

    name: str = column("", "{}")
    error: str | None
    tokens_per_second: float | None = column("tokens /s", lambda row: row.error or f"{row.tokens_per_second:,.0f}")
    to_baseline: float | None = column("x baseline", "{:.2f}")
    to_yardstick: float | None = column("x yardstick", "{:.2f}")
    mfu: float | None = column("MFU", "percent")
    peak_gib: float | None = column("GiB", "{:.1f}")
    peak_without_states_gib: float | None = column("without states", "{:.1f}")
    predicted_gib: float | None = column("predicted", "{:.1f}")
    batch_seconds: float | None = column("s a batch", "{:.3f}")
    padding_share: float | None = column("padding", "percent")


# ---- bench families


def show_families(result: FamiliesResult, console: Console) -> None:
    """Of `packtrain bench families`."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    console.print(table_of(f"Image-text types as tiny models, fp32 on the CPU: {versions}", result.rows))
    for name, title in FAMILY_COLUMNS.items():
        found = ", ".join(f"{word} {count}" for word, count in result.totals(name).items())
        console.print(f"{title}: {found}")
