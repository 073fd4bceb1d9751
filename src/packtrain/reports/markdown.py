"""summary.md, comparison_table.md and memory_estimates.md: the study to read, and its tables to paste elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from packtrain.core.numbers import count, format_number, gib, memory, percent, shown
from packtrain.reports.recommended import ChecklistItem
from packtrain.reports.study_content import (
    SIMULATED,
    STATISTICS,
    Content,
    compared_tables,
    described_columns,
    other_limits,
    padded_name,
    words,
)

_NOTICEABLE = 0.005  # of all memory: options that change less are not listed
_SPECIAL = "\\`*_[]<|~&$"
_METHOD = (
    "Every length is really packed, sample by sample, and compared with the lower bound that no packing can beat.",
    "Memory is estimated for a pack with the most of everything, and fits when a tenth of the GPU stays free.",
    "Padded batches are formed as a trainer forms them; the best of them has the kernels that packs have.",
    "Of the packings that fit, drop less than 0.5 % of the samples and keep the batch size within 10 % (within 25 % "
    "where no config says it and that is much faster), the fastest is chosen; one that is up to 5 % slower and keeps "
    "more samples is preferred.",
)


def summary_text(content: Content, tasks: Sequence[ChecklistItem]) -> str:
    """The whole study as one document."""
    about, advice = content["about"], content["recommendation"]
    return _document(
        f"# Packing {_safe(about['model'])} on {count(about['gpus'])} × {_safe(about['gpu'])}",
        f"**{_safe(advice['warning'])}**" if advice["warning"] else "",
        _safe(advice["verdict"]),
        "## The data",
        _about(content),
        _statistics(content),
        _list(content["dataset"]["observations"]),
        "## Packing lengths tried",
        _simulations(content),
        "## Padding versus packing",
        _comparison(content),
        "## Method",
        _list(_METHOD),
        _safe(advice["rule_of_thumb"]),
        "## Recommended settings",
        _reasons(content),
        _list(advice["advice"]),
        _alternatives(content),
        "## Memory per GPU",
        _memory(content),
        _comfortable(content),
        "## If it goes wrong" if advice["trouble"] else "",
        "\n".join(f"- **{_safe(one['sign'])}**: {_safe(one['action'])}" for one in advice["trouble"]),
        "## Next steps",
        "\n".join(f"- [ ] {task.name}:\n  `{shown(task.command, 600).replace('`', '')}`" for task in tasks),
        "## Assumptions" if content["notes"] else "",
        _list(content["notes"]),
    )


def comparison_text(content: Content) -> str:
    """Padding versus packing, and the packings that were tried."""
    return _document(
        "# Padding versus packing",
        _safe(content["recommendation"]["verdict"]),
        _about(content),
        _comparison(content),
        "## All packings",
        _simulations(content),
    )


def memory_text(content: Content) -> str:
    """Where the memory of the worst pack goes, what would change it, and what the machine needs."""
    report = content["memory"]
    return _document(
        "# Memory per GPU",
        _about(content),
        _memory(content),
        "## The worst case" if report["sentences"] else "",
        _list(report["sentences"]),
        "## One layer of the vision encoder" if report["vision_layer"] else "",
        _vision(report),
        "## What would change it" if report["savings"] else "",
        _savings(report),
        _comfortable(content),
        "## What the machine needs",
        _host(report["host"]),
    )


# ---- parts


def _about(content: Content) -> str:
    about, dataset = content["about"], content["dataset"]
    return (
        f"{count(dataset['samples'])} samples, {count(dataset['tokens'])} tokens; {_safe(about['model'])}, "
        f"{count(about['parameters'])} parameters; {count(about['gpus'])} × {_safe(about['gpu'])}; "
        f"{percent(content['headline']['fill'])} filled."
    )


def _statistics(content: Content) -> str:
    statistics = content["dataset"]["statistics"]
    rows = [
        [
            words(name),
            *(format_number("large" if of == "total" else "decimal", statistics[name][of]) for of in STATISTICS),
        ]
        for name in described_columns(statistics)
    ]
    return markdown_table("l" + "r" * len(STATISTICS), ["per sample", *(words(of).lower() for of in STATISTICS)], rows)


def _simulations(content: Content) -> str:
    best = content["recommendation"]["simulation"]
    titles = ["length", "further limits", *(column.title.lower() for column in SIMULATED)]
    rows = []
    for one in content["simulations"]:
        cells = [_field(column.kind, one, column.name) for column in SIMULATED]
        shares = [f" ({percent(one[column.share])})" if column.share else "" for column in SIMULATED]
        limits = _safe(other_limits(one["limits"]) or "none")
        rows.append([count(one["packing_length"]), limits, *map(str.__add__, cells, shares)])
    rows[best][0] = f"**{rows[best][0]}**"
    bold = "The recommended length" if content["recommendation"]["packing"] else "The best packing"
    text = f"{bold} is bold. Time, speed and memory are predicted."
    return _document(text, markdown_table("ll" + "r" * len(SIMULATED), titles, rows)).rstrip()


def _comparison(content: Content) -> str:
    packed, padded = content["simulations"][content["recommendation"]["simulation"]], content["padded"]
    head = ["", *(padded_name(run["order"], run["batch_size"], run["kernels"]).lower() for run in padded)]
    head.append(f"packed, {count(packed['packing_length'])}")
    rows = []
    for title, group in compared_tables(content["about"]["epochs"]):
        rows.append([f"**{title}**", *("" for _ in head[1:])])
        for row in group:
            cells = [_field(row.kind, run, row.padded) for run in padded]
            rows.append([row.name, *cells, _field(row.kind, packed, row.packed)])
    return markdown_table("l" + "r" * (len(head) - 1), head, rows)


def _reasons(content: Content) -> str:
    reasons = content["recommendation"]["reasons"]
    has_baseline = any(one["baseline"] for one in reasons)
    names = ("parameter", *(("baseline",) if has_baseline else ()), "packing", "reason")
    head = ["setting", *(["was"] if has_baseline else []), "recommended", "because"]
    rows = [[_safe(one[name]) for name in names] for one in reasons]
    return markdown_table("l" * len(head), head, rows) if rows else ""


def _alternatives(content: Content) -> str:
    return _list(f"More {one['name']}: {one['reason']}" for one in content["recommendation"]["alternatives"])


def _memory(content: Content) -> str:
    report = content["memory"]
    estimate, beside = report["estimate"], report["beside"]
    text = (
        f"One GPU holds at most {gib(estimate['total'])} during {_safe(estimate['moment'])}: a pack with the most of "
        f"everything. Pack {count(report['worst_pack'])}, the heaviest, needs {gib(report['worst_bytes'])}. "
        f"{_safe(report['gpu'])} has {gib(report['gpu_bytes'])}, of which a plan may use {gib(report['usable_bytes'])}."
    )
    head = ["part", content["headline"]["mark"], *(_safe(other["name"]) for other in beside), "because"]
    others = [{part["name"]: part["bytes"] for part in other["estimate"]["parts"]} for other in beside]
    rows = [
        [
            _safe(part["name"]),
            gib(part["bytes"]),
            *(gib(sizes.get(part["name"], 0)) for sizes in others),
            _safe(part["why"]),
        ]
        for part in estimate["parts"]
    ]
    totals = [f"**{gib(other['estimate']['total'])}**{'' if other['fits'] else ' (does not fit)'}" for other in beside]
    share = f"{format_number('percent', estimate['share'])} of the GPU"
    rows.append(["**together**", f"**{gib(estimate['total'])}**", *totals, share])
    return _document(text, markdown_table("lr" + "r" * len(beside) + "l", head, rows)).rstrip()


def _vision(report: Content) -> str:
    layers = count(report["vision_layers"])
    rows = [
        [_safe(name), gib(size), gib(report["vision_total"][name])] for name, size in report["vision_layer"].items()
    ]
    return (
        markdown_table("lrr", ["kept for the backward pass", "one layer", f"all {layers} layers"], rows) if rows else ""
    )


def _savings(report: Content) -> str:
    rows = [
        [
            _safe(one["option"]),
            _safe(one["change"]),
            gib(one["bytes"]),
            gib(one["total_after"]),
            "yes" if one["total_after"] <= report["usable_bytes"] else "no",
            format_number("duration", one["seconds"]),
            count(one["lost"]),
            _safe(one["cost"]),
        ]
        for one in report["savings"]
        if abs(one["bytes"]) >= _NOTICEABLE * report["estimate"]["total"]
    ]
    head = ["option", "change", "saves", "total after", "fits", "epoch", "samples lost", "costs"]
    return markdown_table("llrrlrrl", head, rows) if rows else ""


def _comfortable(content: Content) -> str:
    report = content["memory"]
    margin = report["comfortable"]
    if margin is None:
        return ""
    share = percent(margin["memory_bytes"] / report["gpu_bytes"])
    return (
        f"With a comfortable margin: {_safe(', '.join(margin['changes']))}: {gib(margin['memory_bytes'])} ({share} of "
        f"the GPU), {format_number('duration', margin['seconds'])} an epoch, {count(margin['lost'])} samples lost."
    )


def _host(host: Content) -> str:
    rows = [
        [words(name), _safe(part["name"]), memory(part["bytes"]), _safe(part["why"])]
        for name, section in host.items()
        for part in section["parts"]
    ]
    return markdown_table("llrl", ["where", "for", "size", "because"], rows) if rows else ""


def _field(kind: str, values: Content, name: str | None) -> str:
    if name is None:
        return format_number("count", None)
    if kind == "fits":
        return "yes" if values[name] else "no"
    return format_number(kind, values[name])


def _list(texts: Iterable[str]) -> str:
    return "\n".join(f"- {_safe(text)}" for text in texts)


def markdown_table(sides: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are aligned left or right, a letter for each."""
    rule = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *rows))


def _document(*blocks: str) -> str:
    return "\n\n".join(block for block in blocks if block) + "\n"


def _safe(text: object) -> str:
    """Text that Markdown shows as it is, on one line."""
    line = shown(text, 600)
    start = "\\" if line[:1] in ("#", ">", "+", "-", "=") else ""  # at the start of a line these would be more
    return start + "".join(f"\\{char}" if char in _SPECIAL else char for char in line)
