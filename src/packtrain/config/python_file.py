"""Configs that are dataclasses in a Python file: the file is parsed, never imported or run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from packtrain.core.errors import ConfigError

_MOST_BITS = 1024  # of a number, as in YAML
_DEEPEST = 50
_OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


class RuntimeValue:
    """A value that only running the file would tell."""

    def __init__(self, text: str) -> None:
        self.text = text


def read_python(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The fields of each class by its name, and the line of each."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=path.name)
    except OSError as error:
        raise ConfigError(str(path), got=error.strerror, expected="a Python file") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f"line {error.lineno}: " if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(str(path), got=f"{line}{getattr(error, 'msg', error)}", expected="a Python file") from None
    content: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for one in tree.body:
        if isinstance(one, ast.ClassDef):
            fields = content.setdefault(one.name, {})
            for name, node in _fields(one):
                fields[name] = _read(node, fields)
                lines[f"{one.name}.{name}"] = node.lineno
    if not content:
        raise ConfigError(str(path), got="no class", expected="dataclasses with settings, such as TrainConfig")
    return content, lines


def _fields(one: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for line in one.body:
        if isinstance(line, ast.AnnAssign) and line.value is not None and isinstance(line.target, ast.Name):
            yield line.target.id, line.value
        elif isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
            yield line.targets[0].id, line.value


def _read(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """A literal, arithmetic of numbers, or a field above; anything else is not read."""
    try:
        return _value(node, known, 0)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return RuntimeValue(ast.unparse(node)[:100])


def _value(node: ast.expr, known: Mapping[str, Any], depth: int) -> Any:
    """
    >>> _value(ast.parse("4 * size + 2 ** 3", mode="eval").body, {"size": 10}, 0)
    48
    """
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")

    def inner(one: ast.expr) -> Any:
        return _value(one, known, depth + 1)

    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in known and not isinstance(known[name], RuntimeValue):
            return known[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [inner(one) for one in elements]
        case ast.Dict(keys=keys, values=values) if all(keys):
            return {inner(key): inner(value) for key, value in zip(keys, values, strict=True) if key is not None}
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(inner(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _computed(type(op), _number(inner(left)), _number(inner(right)))
        case ast.Call(func=ast.Name(id="field"), args=[], keywords=[ast.keyword(arg="default", value=default)]):
            return inner(default)
    raise ValueError("no literal")


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("no number")
    return value


def _computed(op: type[ast.operator], left: int | float, right: int | float) -> int | float:
    """A result that no config has is not computed at all."""
    size = left.bit_length() if isinstance(left, int) else 1
    if op is ast.Pow and abs(right) * size > _MOST_BITS:
        raise ValueError("a number with too many digits")
    found = _number(_OPERATORS[op](left, right))
    if isinstance(found, int) and found.bit_length() > _MOST_BITS:
        raise ValueError("a number with too many digits")
    return found
