"""The results of benchmarks as tables: one for each question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from string import Formatter
from typing import Any

from rich.console import Console
from rich.table import Table

_WHAT = {"alone": "lengths to packs", "plan": "costs to a plan"}
_KINDS = {
    "rss": "resident, shared pages in each process",
    "pss": "resident, shared pages once (PSS)",
    "anonymous": "  private to the processes",
    "file": "  file pages, which the system may drop",
    "shared": "  shared memory",
}


def table_of(
    title: str, columns: Sequence[tuple[str, str]], rows: Iterable[Mapping[str, Any]], *, words: int = 0
) -> Table:
    """Columns are a title and the format of a row's values; the first ones are words and the others numbers."""
    table = Table(title=title, title_justify="left")
    for number, (name, _) in enumerate(columns):
        table.add_column(name, justify="left" if number < words else "right")
    for row in rows:
        table.add_row(*(_cell(form, row) for _, form in columns))
    return table


def _cell(form: str, row: Mapping[str, Any]) -> str:
    """Empty where the row does not have one of the values."""
    names = [name for _, name, *_ in Formatter().parse(form) if name]
    return form.format_map(row) if all(row.get(name) is not None for name in names) else ""


# ---- bench loader


def show_loader(result: Mapping[str, Any], console: Console) -> None:
    """Of `packtrain bench loader`."""
    console.print(
        f"{result['model']}, {result['cores']} cores, load {result['load']:.1f} at the start; one thread per process."
    )
    for table in (_speed(result["speed"]), _data(result["data"]), _start(result["start"]), _memory(result["memory"])):
        console.print(table)


def _speed(speed: Mapping[str, Any]) -> Table:
    title = (
        f"Speed: {speed['samples']:,} samples, {speed['images']:,} images, {speed['tokens']:,} tokens, "
        f"packs of {speed['capacity']:,}; medians of {speed['rounds']} interleaved epochs"
    )
    columns = (
        ("", "{way}"),
        ("workers", "{workers}"),
        ("batches", "{batches:,}"),
        ("padding", "{padding:.1%}"),
        ("samples /s", "{samples_per_second:,.1f}"),
        ("images /s", "{images_per_second:,.1f}"),
        ("batches /s", "{batches_per_second:,.2f}"),
        ("x plain", "{ratio:.2f}"),
        ("range", "{ratio_lowest:.2f}-{ratio_highest:.2f}"),
    )
    return table_of(title, columns, speed["lines"], words=1)


def _data(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        ("rows", "{rows:,}"),
        ("packs", "{packs:,}"),
        ("fill", "{fill:.4f}"),
        ("from costs to packs, s", "{prepare_seconds:.1f}"),
        ("data MB", "{data:,.0f}"),
        ("costs, plan and rows, MB", "{made:,.0f}"),
    )
    sized = ({**row, "data": row["data_bytes"] / 1e6, "made": row["made_bytes"] / 1e6} for row in rows)
    return table_of(f"Long datasets, packs of {rows[0]['capacity']:,} tokens", columns, sized)


def _start(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        ("", "{way}"),
        ("rows", "{rows:,}"),
        ("epoch done", "{share:.0%}"),
        ("seconds", "{seconds:.2f}"),
        ("import", "{import_seconds:.2f}"),
        ("open", "{open_seconds:.2f}"),
        ("state", "{state_seconds:.3f}"),
        ("first batch", "{batch_seconds:.3f}"),
    )
    title = "Time to the first batch of a new process, no workers, data files not in memory"
    return table_of(title, columns, rows, words=1)


def _memory(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (
        ("kind", "{kind}"),
        ("rows", "{rows:,}"),
        ("steps", "{batches:,}"),
        ("samples", "{samples:,}"),
        ("first", "{first:,.1f}"),
        ("last", "{last:,.1f}"),
        ("growth", "{growth:+,.1f}"),
    )
    lines = []
    for kind, shown in _KINDS.items():
        for row in (row for row in rows if kind in row["first"]):
            first, last = (row[end][kind] / 2**20 for end in ("first", "last"))
            lines.append({**row, "kind": shown, "first": first, "last": last, "growth": last - first})
    title = f"Memory of {rows[0]['processes']} processes, MiB: mean over the first and over the last steps"
    return table_of(title, columns, lines, words=1)


# ---- bench pack


def show_pack(result: Mapping[str, Any], console: Console) -> None:
    """Of `packtrain bench pack`."""
    console.print(
        f"{result['set']}: {result['samples']:,} samples, {result['tokens']:,} tokens. "
        f"One core of {result['cores']}, load {result['load']:.1f} at the start; compilation is not counted."
    )
    console.print(table_of("Best fit, one resource", _ONE_RESOURCE, result["one_resource"]))
    strategies = result["strategies"]
    title = f"Strategies at {strategies['capacity']:,} tokens"
    console.print(table_of(title, _STRATEGIES, strategies["rows"], words=1))
    others = result["others"]
    if others["rows"]:
        title = "Other projects' packers, and ours on the same lengths"
        console.print(table_of(title, _OTHERS, others["rows"], words=1))
        for note in others["notes"]:
            console.print(note)
    for name, why in others["not_run"].items():
        console.print(f"not run: {name} ({why})")
    rows = [{**row, "limits": " / ".join(f"{limit:,}" for limit in row["limits"])} for row in result["several"]]
    console.print(table_of("Several resources: share of the bound (synthetic mixtures)", _SEVERAL, rows, words=2))
    for work in result["equal_work"]["sets"]:
        console.print(_equal_work(result["equal_work"]["model"], work))
    if result["scaling"]:
        title = f"Growth: best fit at {result['scaling'][0]['capacity']:,} tokens, one process per line"
        rows = sorted(result["scaling"], key=lambda row: (row["what"], row["samples"]))
        console.print(table_of(title, _SCALING, [{**row, "what": _WHAT[row["what"]]} for row in rows], words=1))


_PACKED = (("packs", "{packs:,}"), ("of bound", "{of_bound:.4f}"))
_ONE_RESOURCE = (
    ("capacity", "{capacity:,}"),
    ("samples that fit", "{samples:,}"),
    ("bound", "{bound:,}"),
    *_PACKED,
    ("seconds", "{seconds:.4f}"),
    ("samples /s", "{samples_per_second:,.0f}"),
    ("ns a sample", "{nanoseconds_per_sample:,.0f}"),
)
_STRATEGIES = (
    ("strategy", "{strategy}"),
    *_PACKED,
    ("seconds", "{seconds:.4f}"),
    ("samples /s", "{samples_per_second:,.0f}"),
)
_OTHERS = (
    ("packer", "{packer} ({version})"),
    ("capacity", "{capacity:,}"),
    ("samples", "{samples:,}"),
    ("bound", "{bound:,}"),
    ("packs", "{packs:,}"),
    ("ours", "{our_packs:,}"),
    ("seconds", "{seconds:.4f}"),
    ("ours", "{our_seconds:.4f}"),
    ("packs x", "{times_our_packs:.4f}"),
    ("seconds x", "{times_our_seconds:,.1f}"),
)
_SEVERAL = (
    ("mixture", "{mixture}"),
    ("tokens / vision tokens / images", "{limits}"),
    ("fast", "{fast:.4f}"),
    ("best", "{best:.4f}"),
    ("first fit, random order", "{first_fit_random:.4f}"),
    ("first fit, decreasing", "{first_fit_decreasing:.4f}"),
    ("best fit, decreasing", "{best_fit_decreasing:.4f}"),
    ("fast, s per million", "{fast_seconds_per_million:.1f}"),
    ("best, s per million", "{best_seconds_per_million:.1f}"),
)
_SCALING = (
    ("what", "{what}"),
    ("samples", "{samples:,}"),
    ("at once", "{window:,}"),
    *_PACKED,
    ("seconds", "{seconds:,.2f}"),
    ("ns a sample", "{nanoseconds_per_sample:,.0f}"),
    ("peak GiB", "{peak_gib:.2f}"),
    ("extra bytes per sample", "{extra_bytes_per_sample_of_a_window:,.0f}"),
)


def _equal_work(model: str, work: Mapping[str, Any]) -> Table:
    limits = ", ".join(f"{name} {limit:,}" for name, limit in work["limits"].items())
    packed = f"{work['samples']:,} samples in {work['packs']:,} packs ({limits})"
    rows = []
    for line in work["lines"]:
        sizes = {name: line[name] for name in ("ranks", "packs_per_step", "steps")}
        for order in ("random", "sorted", "strict"):
            rows.append({**line[order], **sizes, "order": order})
            sizes = {}  # how large the steps are is said once
    return table_of(f"Load balance for {model}: {work['set']}, {packed}", _EQUAL_WORK, rows)


_EQUAL_WORK = (
    ("ranks", "{ranks:,}"),
    ("packs a step", "{packs_per_step:,}"),
    ("steps", "{steps:,}"),
    ("order", "{order}"),
    ("slowest / mean", "{slowest:.4f}"),
    ("spread of length", "{length_spread:.1f}"),
    ("spread of samples", "{samples_spread:.1f}"),
)


# ---- bench measure


def show_measure(result: Mapping[str, Any], console: Console) -> None:
    """Of `packtrain bench measure`."""
    race = result["processor"]
    title = f"Against the HF processor ({result['model']}, {race['processes']} processes)"
    console.print(table_of(title, _RACE, [race]))
    console.print(table_of("Against tokenizer and header reading alone (one process)", _FLOOR, result["floor"]))
    if result["memory"]:
        console.print(table_of("Memory of all processes (PSS)", _PEAK, result["memory"]))


_RACE = (
    ("records", "{records:,}"),
    ("mean tokens", "{tokens_mean:,.0f}"),
    ("ours /s", "{ours_per_second:,.0f}"),
    ("processor /s", "{processor_per_second:,.1f}"),
    ("ratio", "{ratio:,.1f}"),
)
_FLOOR = (
    ("words of the answer", "{answer_words:,}"),
    ("mean tokens", "{tokens_mean:,.0f}"),
    ("ours us", "{ours_microseconds:,.0f}"),
    ("floor us", "{floor_microseconds:,.0f}"),
    ("ratio", "{ratio:.2f}"),
)
_PEAK = (
    ("records", "{records:,}"),
    ("peak MiB", "{peak_mib:,.0f}"),
    ("seconds", "{seconds:,.1f}"),
    ("records /s", "{records_per_second:,.0f}"),
)


# ---- bench train


def show_train(result: Mapping[str, Any], console: Console) -> None:
    """Of `packtrain bench train`; a row that did not run has the reason in place of its speed."""
    title = (
        f"{result['model']} on {result['device']}: {result['samples']:,} samples of {result['mean_tokens']:,.0f} "
        f"tokens on average, an optimizer step about every {result['step_samples']} samples"
    )
    rows = [
        {**row, "speed": row["error"] if "error" in row else f"{row['tokens_per_second']:,.0f}"}
        for row in result["rows"]
    ]
    console.print(table_of(title, _TRAIN, rows, words=1))


_TRAIN = (
    ("", "{name}"),
    ("tokens /s", "{speed}"),
    ("x baseline", "{to_baseline:.2f}"),
    ("x yardstick", "{to_yardstick:.2f}"),
    ("MFU", "{mfu:.1%}"),
    ("GiB", "{peak_gib:.1f}"),
    ("without states", "{peak_without_states_gib:.1f}"),
    ("predicted", "{predicted_gib:.1f}"),
    ("s a batch", "{batch_seconds:.3f}"),
    ("padding", "{padding_share:.1%}"),
)
