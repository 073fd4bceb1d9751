"""Configs that are arguments of a command: `trl sft --model_name_or_path X`, `swift sft ...`; read, never run."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from packtrain.core.errors import ConfigError
from packtrain.records.yaml_text import read_value

ENDINGS = (".sh", ".txt", ".args")
_VARIABLE = re.compile(r"([A-Z][A-Z0-9_]*)=(.*)", re.DOTALL)
_STARTS = re.compile(r"(.*/)?(sft|pt|\S+\.py)$")  # what the arguments of the training itself follow
_EXPECTED = "the arguments of one command, such as trl sft --model_name_or_path MODEL --dataset_name DATA"


def read_script(path: Path) -> dict[str, object]:
    """Arguments by name, and variables that are set before the command."""
    try:
        words = shlex.split(path.read_text(encoding="utf-8").replace("\\\n", " "), comments=True)
    except OSError as error:
        raise ConfigError(str(path), got=error.strerror, expected=_EXPECTED) from None
    except ValueError as error:
        raise ConfigError(str(path), got=str(error), expected=_EXPECTED) from None
    found: dict[str, object] = {}
    first = next((at for at, word in enumerate(words) if word.startswith("--")), len(words))
    starts = (at + 1 for at, word in enumerate(words) if _STARTS.fullmatch(word) and not _is_option(words[at - 1]))
    begin = next(starts, first)
    for word in words[:first]:
        if named := _VARIABLE.fullmatch(word):
            found[named[1]] = _value(path, named[1], named[2])
    if first < begin:  # arguments of accelerate or torchrun
        found["launcher"] = " ".join(words[first : begin - 1])
    for name, value in _arguments(path, words[begin:]):
        if found.get(name, value) != value:
            raise ConfigError(str(path), got=f"--{name} twice", expected=_EXPECTED)
        found[name] = value
    return found


def _arguments(path: Path, words: list[str]) -> list[tuple[str, Any]]:
    """Each with its value: true where none follows, a list where several do."""
    found: list[tuple[str, Any]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            found.append((name, _value(path, name, text) if equals else True))
        elif not found:
            raise ConfigError(str(path), got=f"{word[:100]!r} before the first argument", expected=_EXPECTED)
        else:
            name, before = found[-1]
            value = _value(path, name, word)
            found[-1] = name, value if before is True else [*(before if isinstance(before, list) else [before]), value]
    if not found:
        raise ConfigError(str(path), got="no argument", expected=_EXPECTED)
    return found


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
