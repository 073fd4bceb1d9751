"""The results of benchmarks as tables: one for each question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from packtrain.bench.loader import LoaderResult, MemoryCourse
    from packtrain.bench.measure import MeasureResult
    from packtrain.bench.pack import PackResult, WorkSet

Columns = Sequence[tuple[str, str]]  # a title, and the format of a row

_KINDS = {
    "rss": "resident, shared pages in each process",
    "pss": "resident, shared pages once (PSS)",
    "anonymous": "  private to the processes",
    "file": "  file pages, which the system may drop",
    "shared": "  shared memory",
}


def table_of(title: str, columns: Columns, rows: Iterable[object], *, words: int = 0) -> Table:
    """The first columns are words and the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, (name, _) in enumerate(columns):
        table.add_column(name, justify="left" if number < words else "right")
    for row in rows:
        table.add_row(*(_cell(form, row) for _, form in columns))
    return table


def _cell(form: str, row: object) -> str:
    """Empty where the row does not have one of the values."""
    try:
        return form.format(row)
    except (AttributeError, TypeError):  # it is not there, or None
        return ""


# ---- bench loader


def show_loader(result: LoaderResult, console: Console) -> None:
    """Of `packtrain bench loader`."""
    speed, data = result.speed, result.data
    console.print(f"{result.model}, {result.cores} cores, load {result.load:.1f} at the start; one thread per process.")
    title = (
        f"Speed: {speed.samples:,} samples, {speed.images:,} images, {speed.tokens:,} tokens, "
        f"packs of {speed.capacity:,}; medians of {speed.rounds} interleaved epochs"
    )
    console.print(table_of(title, _SPEED, speed.lines, words=1))
    console.print(table_of(f"Long datasets, packs of {data[0].capacity:,} tokens", _DATA, data))
    title = "Time to the first batch of a new process, no workers, data files not in memory"
    console.print(table_of(title, _START, result.start, words=1))
    console.print(_memory(result.memory))


_SPEED: Columns = (
    ("", "{.way}"),
    ("workers", "{.workers}"),
    ("batches", "{.batches:,}"),
    ("padding", "{.padding:.1%}"),
    ("samples /s", "{.samples_per_second:,.1f}"),
    ("images /s", "{.images_per_second:,.1f}"),
    ("batches /s", "{.batches_per_second:,.2f}"),
    ("x plain", "{.ratio:.2f}"),
    ("range", "{0.ratio_lowest:.2f}-{0.ratio_highest:.2f}"),
)
_DATA: Columns = (
    ("rows", "{.rows:,}"),
    ("packs", "{.packs:,}"),
    ("fill", "{.fill:.4f}"),
    ("from costs to packs, s", "{.prepare_seconds:.1f}"),
    ("data MB", "{.data_mb:,.0f}"),
    ("costs, plan and rows, MB", "{.made_mb:,.0f}"),
)
_START: Columns = (
    ("", "{.way}"),
    ("rows", "{.rows:,}"),
    ("epoch done", "{.share:.0%}"),
    ("seconds", "{.seconds:.2f}"),
    ("import", "{.import_seconds:.2f}"),
    ("open", "{.open_seconds:.2f}"),
    ("state", "{.state_seconds:.3f}"),
    ("first batch", "{.batch_seconds:.3f}"),
)
_MEMORY: Columns = (
    ("kind", "{.kind}"),
    ("rows", "{.of.rows:,}"),
    ("steps", "{.of.batches:,}"),
    ("samples", "{.of.samples:,}"),
    ("first", "{.first:,.1f}"),
    ("last", "{.last:,.1f}"),
    ("growth", "{.growth:+,.1f}"),
)


def _memory(courses: Sequence[MemoryCourse]) -> Table:
    lines = []
    for kind, name in _KINDS.items():
        for one in (one for one in courses if kind in one.first):
            first, last = (end[kind] / 2**20 for end in (one.first, one.last))
            lines.append(SimpleNamespace(of=one, kind=name, first=first, last=last, growth=last - first))
    title = f"Memory of {courses[0].processes} processes, MiB: mean over the first and over the last steps"
    return table_of(title, _MEMORY, lines, words=1)


# ---- bench pack


def show_pack(result: PackResult, console: Console) -> None:
    """Of `packtrain bench pack`."""
    console.print(
        f"{result.set}: {result.samples:,} samples, {result.tokens:,} tokens. "
        f"One core of {result.cores}, load {result.load:.1f} at the start; compilation is not counted."
    )
    console.print(table_of("Best fit, one resource", _ONE_RESOURCE, result.one_resource))
    title = f"Strategies at {result.strategies.capacity:,} tokens"
    console.print(table_of(title, _STRATEGIES, result.strategies.rows, words=1))
    others = result.others
    if others.rows:
        console.print(table_of("Other projects' packers, and ours on the same lengths", _OTHERS, others.rows, words=1))
        for note in others.notes:
            console.print(note)
    for name, why in others.not_run.items():
        console.print(f"not run: {name} ({why})")
    title = "Several resources: share of the bound (synthetic mixtures)"
    console.print(table_of(title, _SEVERAL, result.several, words=2))
    for work in result.equal_work.sets:
        console.print(_equal_work(result.equal_work.model, work))
    if result.scaling:
        title = f"Growth: best fit at {result.scaling[0].capacity:,} tokens, one process per line"
        rows = sorted(result.scaling, key=lambda row: (row.what, row.samples))
        console.print(table_of(title, _SCALING, rows, words=1))


_PACKED: Columns = (("packs", "{.packs:,}"), ("of bound", "{.of_bound:.4f}"))
_ONE_RESOURCE: Columns = (
    ("capacity", "{.capacity:,}"),
    ("samples that fit", "{.samples:,}"),
    ("bound", "{.bound:,}"),
    *_PACKED,
    ("seconds", "{.seconds:.4f}"),
    ("samples /s", "{.samples_per_second:,.0f}"),
    ("ns a sample", "{.nanoseconds_per_sample:,.0f}"),
)
_STRATEGIES: Columns = (
    ("strategy", "{.strategy}"),
    *_PACKED,
    ("seconds", "{.seconds:.4f}"),
    ("samples /s", "{.samples_per_second:,.0f}"),
)
_OTHERS: Columns = (
    ("packer", "{0.packer} ({0.version})"),
    ("capacity", "{.capacity:,}"),
    ("samples", "{.samples:,}"),
    ("bound", "{.bound:,}"),
    ("packs", "{.packs:,}"),
    ("ours", "{.our_packs:,}"),
    ("seconds", "{.seconds:.4f}"),
    ("ours", "{.our_seconds:.4f}"),
    ("packs x", "{.times_our_packs:.4f}"),
    ("seconds x", "{.times_our_seconds:,.1f}"),
)
_SEVERAL: Columns = (
    ("mixture", "{.mixture}"),
    ("tokens / vision tokens / images", "{0.limits[0]:,} / {0.limits[1]:,} / {0.limits[2]:,}"),
    ("fast", "{.fast:.4f}"),
    ("best", "{.best:.4f}"),
    ("first fit, random order", "{.first_fit_random:.4f}"),
    ("first fit, decreasing", "{.first_fit_decreasing:.4f}"),
    ("best fit, decreasing", "{.best_fit_decreasing:.4f}"),
    ("fast, s per million", "{.fast_seconds_per_million:.1f}"),
    ("best, s per million", "{.best_seconds_per_million:.1f}"),
)
_SCALING: Columns = (
    ("what", "{.what_is_packed}"),
    ("samples", "{.samples:,}"),
    ("at once", "{.window:,}"),
    *_PACKED,
    ("seconds", "{.seconds:,.2f}"),
    ("ns a sample", "{.nanoseconds_per_sample:,.0f}"),
    ("peak GiB", "{.peak_gib:.2f}"),
    ("extra bytes per sample", "{.extra_bytes_per_sample_of_a_window:,.0f}"),
)
_EQUAL_WORK: Columns = (
    ("ranks", "{.step.ranks:,}"),  # how large the steps are is said once
    ("packs a step", "{.step.packs_per_step:,}"),
    ("steps", "{.step.steps:,}"),
    ("order", "{.order}"),
    ("slowest / mean", "{.of.slowest:.4f}"),
    ("spread of length", "{.of.length_spread:.1f}"),
    ("spread of samples", "{.of.samples_spread:.1f}"),
)


def _equal_work(model: str, work: WorkSet) -> Table:
    limits = ", ".join(f"{name} {limit:,}" for name, limit in work.limits.items())
    packed = f"{work.samples:,} samples in {work.packs:,} packs ({limits})"
    rows = [
        SimpleNamespace(step=None if number else line, order=order, of=getattr(line, order))
        for line in work.lines
        for number, order in enumerate(("random", "sorted", "strict"))
    ]
    return table_of(f"Load balance for {model}: {work.set}, {packed}", _EQUAL_WORK, rows)


# ---- bench measure


def show_measure(result: MeasureResult, console: Console) -> None:
    """Of `packtrain bench measure`."""
    title = f"Against the HF processor ({result.model}, {result.processor.processes} processes)"
    console.print(table_of(title, _RACE, [result.processor]))
    console.print(table_of("Against tokenizer and header reading alone (one process)", _FLOOR, result.floor))
    if result.memory:
        console.print(table_of("Memory of all processes (PSS)", _PEAK, result.memory))


_RACE: Columns = (
    ("records", "{.records:,}"),
    ("mean tokens", "{.tokens_mean:,.0f}"),
    ("ours /s", "{.ours_per_second:,.0f}"),
    ("processor /s", "{.processor_per_second:,.1f}"),
    ("ratio", "{.ratio:,.1f}"),
)
_FLOOR: Columns = (
    ("words of the answer", "{.answer_words:,}"),
    ("mean tokens", "{.tokens_mean:,.0f}"),
    ("ours us", "{.ours_microseconds:,.0f}"),
    ("floor us", "{.floor_microseconds:,.0f}"),
    ("ratio", "{.ratio:.2f}"),
)
_PEAK: Columns = (
    ("records", "{.records:,}"),
    ("peak MiB", "{.peak_mib:,.0f}"),
    ("seconds", "{.seconds:,.1f}"),
    ("records /s", "{.records_per_second:,.0f}"),
)


# ---- bench train


def show_train(result: Mapping[str, Any], console: Console) -> None:
    """Of `packtrain bench train`; a row that did not run has the reason in place of its speed."""
    title = (
        f"{result['model']} on {result['device']}: {result['samples']:,} samples of {result['mean_tokens']:,.0f} "
        f"tokens on average, an optimizer step about every {result['step_samples']} samples"
    )
    rows = [
        SimpleNamespace(**row, speed=row["error"] if "error" in row else f"{row['tokens_per_second']:,.0f}")
        for row in result["rows"]
    ]
    console.print(table_of(title, _TRAIN, rows, words=1))


_TRAIN: Columns = (
    ("", "{.name}"),
    ("tokens /s", "{.speed}"),
    ("x baseline", "{.to_baseline:.2f}"),
    ("x yardstick", "{.to_yardstick:.2f}"),
    ("MFU", "{.mfu:.1%}"),
    ("GiB", "{.peak_gib:.1f}"),
    ("without states", "{.peak_without_states_gib:.1f}"),
    ("predicted", "{.predicted_gib:.1f}"),
    ("s a batch", "{.batch_seconds:.3f}"),
    ("padding", "{.padding_share:.1%}"),
)
