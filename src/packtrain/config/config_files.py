"""The files of a config: YAML, dataclasses in Python, the arguments of a command. Nothing in them is run."""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.config.keys import Raw
from packtrain.config.sections import SECTION_ALIASES, SECTIONS
from packtrain.core.errors import ConfigError
from packtrain.records.yaml_text import as_sections, brief, key_lines, read_any, read_value

_MOST_EXTENDS, _MOST_FILES = 16, 256
_DATA_FILES = (".jsonl", ".parquet", ".arrow", ".tar", ".gz", ".zst", ".csv")
_SCRIPTS = (".sh", ".txt", ".args")
_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_STARTS = re.compile(r"(.*/)?(sft|pt|\S+\.py)$")  # what the arguments of the training itself follow
_EXPECTED = "the arguments of one command, such as trl sft --model_name_or_path MODEL --dataset_name DATA"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A config as it was written."""

    name: str
    content: Mapping[Any, Any]
    lines: Callable[[], Mapping[str, int]] = dict  # of keys, as they are written

    def place(self, at: str) -> str:
        """The place of a key, for messages."""
        line = self.lines().get(at)
        return self.name if line is None else f"{self.name}:{line}"


def config_files(path: Path, above: tuple[Path, ...] = ()) -> list[Written]:
    """The file after those that it extends, each of them after its own: what comes later counts."""
    paths = [*above, path]
    if path.resolve() in {one.resolve() for one in above} or len(paths) > _MOST_EXTENDS:
        raise ConfigError(
            f"{paths[0]}: extends",
            got=" -> ".join(map(str, paths)),
            expected=f"no cycle, and at most {_MOST_EXTENDS} levels",
        )
    written = _read(path)
    extends = written.content.get("extends")
    names = extends if isinstance(extends, list) else [extends] if extends is not None else []
    if not all(isinstance(name, str) for name in names):
        expected = "the path of another config, or a list of them"
        raise ConfigError(f"{path}: extends", got=brief(extends), expected=expected)
    parents = [below for name in names for below in config_files(path.parent / name, tuple(paths))]
    if len(parents) > _MOST_FILES:
        raise ConfigError(f"{path}: extends", got=f"{len(parents)} files", expected=f"up to {_MOST_FILES}")
    return [*parents, written]


def _is_component(content: Any) -> bool:
    """Is it a list of components, of which one trains?"""
    if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], Mapping):
        return False
    return content[0].get("type") == "trainer" and isinstance(content[0].get("config"), Mapping | None)


def _read(path: Path) -> Written:
    """A YAML file, or the dataclasses of a Python file, of which classes that are no section are left alone."""
    if path.suffix in _DATA_FILES and path.is_file():
        fix = f"packtrain train --model MODEL --data {path}"
        raise ConfigError(str(path), got="a data file", expected="a YAML file with the run's config", fix=fix)
    if path.suffix in _SCRIPTS and path.is_file():
        return Written(name=path.name, content=read_script(path))
    if path.suffix != ".py":
        content = read_any(path)
        if _is_component(content):  # of lmms-engine
            return Written(name=path.name, content=content[0].get("config") or {})
        return Written(name=path.name, content=as_sections(path, content), lines=lambda: key_lines(path))
    classes, lines = read_python(path)
    sections = {name: fields for name, fields in classes.items() if SECTION_ALIASES.get(name, name) in SECTIONS}
    if not sections:
        expected = "a class for a section: " + ", ".join(name for name in SECTION_ALIASES if name[0].isupper())
        raise ConfigError(str(path), got=f"class {', '.join(classes)[:100]}", expected=expected)
    return Written(name=path.name, content=sections, lines=lambda: lines)


# ---- dataclasses of a Python file


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
                fields[name] = _literal(node, fields)
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


def _literal(node: ast.expr, known: Raw) -> Any:
    """A literal, arithmetic of numbers, or a field above; anything else is not read."""
    try:
        return _evaluate(node, known, 0)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return RuntimeValue(ast.unparse(node)[:100])


def _evaluate(node: ast.expr, known: Raw, depth: int) -> Any:
    """
    >>> _evaluate(ast.parse("4 * size + 2 ** 3", mode="eval").body, {"size": 10}, 0)
    48
    """
    if depth > _DEEPEST:
        raise ValueError("nested too deeply")

    def inner(one: ast.expr) -> Any:
        return _evaluate(one, known, depth + 1)

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
            return _compute(type(op), _number(inner(left)), _number(inner(right)))
        case ast.Call(func=ast.Name(id="field"), args=[], keywords=[ast.keyword(arg="default", value=default)]):
            return inner(default)
    raise ValueError("no literal")


def _number(value: Any) -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("no number")
    return value


def _compute(op: type[ast.operator], left: int | float, right: int | float) -> int | float:
    """A result that no config has is not computed at all."""
    size = left.bit_length() if isinstance(left, int) else 1
    if op is ast.Pow and abs(right) * size > _MOST_BITS:
        raise ValueError("a number with too many digits")
    result = _number(_OPERATORS[op](left, right))
    if isinstance(result, int) and result.bit_length() > _MOST_BITS:
        raise ValueError("a number with too many digits")
    return result


# ---- arguments of a command


def read_script(path: Path) -> dict[str, object]:
    """Arguments by name, and variables that are set before the command."""
    try:
        words = shlex.split(path.read_text(encoding="utf-8").replace("\\\n", " "), comments=True)
    except OSError as error:
        raise ConfigError(str(path), got=error.strerror, expected=_EXPECTED) from None
    except ValueError as error:
        raise ConfigError(str(path), got=str(error), expected=_EXPECTED) from None
    settings: dict[str, object] = {}
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    starts = (at + 1 for at, word in enumerate(words) if _STARTS.fullmatch(word) and not _is_option(words[at - 1]))
    begin = next(starts, first)
    for word in words[:first]:
        if variable := _VARIABLE.fullmatch(word):
            settings[variable[1]] = _value(path, variable[1], variable[2])
    if first < begin:  # arguments of accelerate or torchrun
        settings["launcher"] = " ".join(words[first : begin - 1])
    for name, value in _arguments(path, words[begin:]):
        if settings.get(name, value) != value:
            raise ConfigError(str(path), got=f"--{name} twice", expected=_EXPECTED)
        settings[name] = value
    return settings


def _arguments(path: Path, words: list[str]) -> list[tuple[str, Any]]:
    """Each with its value: true where none follows, a list where several do."""
    pairs: list[tuple[str, Any]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            pairs.append((name, _value(path, name, text) if equals else True))
        elif not pairs:
            raise ConfigError(str(path), got=f"{word[:100]!r} before the first argument", expected=_EXPECTED)
        else:
            name, before = pairs[-1]
            value = _value(path, name, word)
            pairs[-1] = name, value if before is True else [*(before if isinstance(before, list) else [before]), value]
    if not pairs:
        raise ConfigError(str(path), got="no argument", expected=_EXPECTED)
    return pairs


def _is_option(word: str) -> bool:
    """Is it an argument whose value follows?"""
    return word.startswith("--") and "=" not in word


def _value(path: Path, name: str, text: str) -> Any:
    """One value, as YAML has it; what only a shell would know is not guessed."""
    if "$" in text or "`" in text:
        got = f"{name}: {text[:100]}"
        raise ConfigError(str(path), got=got, expected="literal values: the script is not run", fix="write the value")
    try:
        return read_value(text)
    except ValueError:
        return text
