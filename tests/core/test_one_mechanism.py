"""Formats of numbers and locks of files are in `core`, and only there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import packtrain

SRC = Path(packtrain.__file__).parent
NUMBERS, ARTIFACTS = "core/numbers.py", "core/artifacts.py"
# Powers of 1,024 that are a gigabyte or more, and times of it.
UNITS = {1 << 30, 1 << 40}
BITS = {30, 40}
# Computing with GIB is meant here: a column, a key or an axis whose unit is GiB, or bytes from a number of GiB.
IN_GIB = {
    "app/calibrate.py",
    "bench/scaling.py",
    "bench/train_loop.py",
    "cli/calibrate.py",
    "cli/plan.py",
    "config/data_section.py",
    "delivery/encode/decode.py",
    "predicting/gpus.py",
    "predicting/memory.py",
    "records/remote_files.py",
    "reports/run_charts.py",
    "reports/study_page.py",
}


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SRC.rglob("*.py")):
        yield path.relative_to(SRC).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def percent_formats(tree: ast.AST) -> Iterator[int]:
    """Lines with a format such as `:.1%`, in an f-string or for `str.format`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            if ast.unparse(node.format_spec).rstrip("'\"").endswith("%"):
                yield node.lineno
        elif isinstance(node, ast.Constant) and re.search(r"\{\w*:[^{}]*%\}", str(node.value)):
            yield node.lineno


def units_by_hand(tree: ast.AST) -> Iterator[int]:
    """Lines with `2**30`, `1 << 30` or `1024**3`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow | ast.LShift | ast.Mult):
            try:
                value = eval(compile(ast.Expression(node), "", "eval"), {"__builtins__": {}})
            except NameError:
                continue
            unit = isinstance(value, int) and value in UNITS
            if unit or (isinstance(node.right, ast.Constant) and node.right.value in BITS):
                yield node.lineno


def test_the_patterns_are_seen() -> None:
    assert sorted(percent_formats(ast.parse('f"{x:.1%}"\nf"{x:,.0f} %"\n"{:.2%}"'))) == [1, 3]
    assert sorted(units_by_hand(ast.parse("x / 2**30\n8 << 30\n1024**3\n2**20\nx * 3"))) == [1, 2, 3]


def test_numbers_are_formatted_in_one_place() -> None:
    found, using = [], set()
    for name, tree in trees():
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        using |= {name} if "GIB" in names and name != NUMBERS else set()
        if name != NUMBERS:
            found += [f"{name}:{line}: use core.numbers.percent" for line in percent_formats(tree)]
            found += [f"{name}:{line}: use GIB, memory or gib of core.numbers" for line in units_by_hand(tree)]
    assert not found, "\n".join(found)
    assert using == IN_GIB, "a size in a sentence is written by core.numbers.gib or memory"


def test_files_are_locked_in_one_place() -> None:
    importers = {
        name
        for name, tree in trees()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Import) and any(alias.name == "fcntl" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == "fcntl")
    }
    assert importers == {ARTIFACTS}
