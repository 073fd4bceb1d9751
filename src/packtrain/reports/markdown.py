"""comparison_table.md and memory_estimates.md: tables to paste into an issue or a paper."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from packtrain.reports.compared import COMPARED, SIMULATED, limits_text, padded_name, words
from packtrain.reports.content import Content
from packtrain.reports.numbers import count, formatted, gib, memory, percent, shown

_SPECIAL = "\\`*_[]<|~&$"


def comparison_text(content: Content) -> str:
    """Padding versus packing, and the packings that were tried."""
    best = content["recommendation"]["simulation"]
    packed, padded = content["simulations"][best], content["padded"]
    rows = []
    for row in COMPARED:
        cells = [_field(row.kind, run, row.padded) for run in padded]
        rows.append([row.name, *cells, _field(row.kind, packed, row.packed)])
    head = ["One epoch", *(padded_name(run["order"], run["batch_size"], run["kernels"]).lower() for run in padded)]
    head.append(f"packed, {count(packed['packing_length'])}")
    titles = ["length", "further limits", *(column.title.lower() for column in SIMULATED)]
    tried = [
        [
            count(one["packing_length"]),
            _safe(limits_text(one["limits"]) or "none"),
            *(_field(column.kind, one, column.name) for column in SIMULATED),
        ]
        for one in content["simulations"]
    ]
    tried[best][0] = f"**{tried[best][0]}**"
    return _document(
        "# Padding versus packing",
        _safe(content["recommendation"]["verdict"]),
        _about(content),
        _table("l" + "r" * (len(head) - 1), head, rows),
        "## All packings",
        "The recommended length is bold. Time, speed and memory are predicted.",
        _table("ll" + "r" * len(SIMULATED), titles, tried),
    )


def memory_text(content: Content) -> str:
    """Where the memory of the worst pack goes, what would change it, and what the machine needs."""
    report = content["memory"]
    estimate = report["estimate"]
    parts = [[_safe(part["name"]), gib(part["bytes"]), _safe(part["why"])] for part in estimate["parts"]]
    parts.append(
        ["**together**", f"**{gib(estimate['total'])}**", f"{formatted('percent', estimate['share'])} of the GPU"]
    )
    savings = [
        [
            _safe(one["option"]),
            _safe(one["change"]),
            gib(one["bytes"]),
            gib(one["total_after"]),
            "yes" if one["total_after"] <= report["gpu_bytes"] else "no",
            _safe(one["cost"]),
        ]
        for one in report["savings"]
    ]
    return _document(
        "# Memory of one GPU",
        f"The worst pack is number {count(report['worst_pack'])}. With it one GPU holds {gib(estimate['total'])} of "
        f"the {gib(report['gpu_bytes'])} that {_safe(report['gpu'])} has, during {_safe(estimate['moment'])}.",
        _about(content),
        _table("lrl", ["part", "memory", "because"], parts),
        "## The worst case in words" if report["sentences"] else "",
        "\n".join(f"- {_safe(text)}" for text in report["sentences"]),
        "## What would change it" if savings else "",
        _table("llrrll", ["option", "change", "saves", "total after", "fits", "costs"], savings) if savings else "",
        "## What the machine needs",
        _host(report["host"]),
    )


def _about(content: Content) -> str:
    about, dataset = content["about"], content["dataset"]
    return (
        f"{count(dataset['samples'])} samples, {count(dataset['tokens'])} tokens; {_safe(about['model'])}, "
        f"{count(about['parameters'])} parameters; {count(about['gpus'])} × {_safe(about['gpu'])}; "
        f"{percent(content['headline']['fill'])} filled."
    )


def _host(host: Content) -> str:
    rows = [
        [words(name), _safe(part["name"]), memory(part["bytes"]), _safe(part["why"])]
        for name, section in host.items()
        for part in section["parts"]
    ]
    return _table("llrl", ["where", "for", "size", "because"], rows) if rows else ""


def _field(kind: str, values: Content, name: str | None) -> str:
    if name is None:
        return formatted("count", None)
    if kind == "fits":
        return "yes" if values[name] else "no"
    return formatted(kind, values[name])


def _table(sides: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
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
