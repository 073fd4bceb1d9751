"""YAML as people write configs: 1e-5 is a number, a day is text, a key is given once, nothing in the file is run.

Every YAML file of a user is read here. References to references can make a value of any size out of some hundred
bytes: what would have more values than any config, written out, is refused.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from packtrain.core.errors import ConfigError, nearest

# The library follows an older YAML, to which 1e-5 is text: it wants a point before and a sign after the e.
_NUMBER = re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")
_FLOAT = ("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))

_MOST_KEYS = 10_000  # of one mapping
_MOST_BITS = 1024  # of one number
_MOST_VALUES, _DEEPEST = 1_000_000, 100  # of a whole file, with everything that is referred to counted again


class Dumper(yaml.SafeDumper):
    """Writes what is read back here as it was: a text such as 1e5 is quoted, too."""


Dumper.add_implicit_resolver(*_FLOAT)


def load_yaml(text: str) -> Any:
    """Parse a YAML text. ValueError, in one line, if it is not YAML or too large."""
    try:
        content = yaml.load(text, Loader=_loader())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise ValueError(f"{line}{' '.join((error.problem or error.context or 'not YAML').split())}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{type(error).__name__}: {' '.join(str(error).split())}") from None
    _require_bounded(content)
    return content


def read_any(path: Path, expected: str = "a YAML file") -> Any:
    """Load the YAML file, whatever its content."""
    try:
        return load_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        got = error.strerror or str(error)
        raise ConfigError(str(path), got=got, expected=expected, fix=_similar_names(path)) from None
    except ValueError as error:
        raise ConfigError(str(path), got=str(error), expected=expected) from None


def _similar_names(path: Path) -> str:
    """A file of nearly that name, where there is none of it."""
    if path.exists() or not path.parent.is_dir():
        return ""
    return nearest(path.name, sorted(one.name for one in path.parent.glob("*.y*ml")))


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file."""
    return as_sections(path, read_any(path))


def as_sections(path: Path, content: Any) -> dict[Any, Any]:
    """The mapping that a file holds; an empty file is an empty one."""
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(str(path), got=f"a {type(content).__name__}", expected="sections model, data, training")
    return content


def key_lines(path: Path) -> dict[str, int]:
    """The line of every key of a file and of its sections, as `section.key`."""
    lines: dict[str, int] = {}
    top = yaml.compose(path.read_text(encoding="utf-8"), Loader=_loader())
    for key, value in top.value if isinstance(top, yaml.MappingNode) else ():
        lines[str(key.value)] = key.start_mark.line + 1
        for inner, _ in value.value if isinstance(value, yaml.MappingNode) else ():
            lines[f"{key.value}.{inner.value}"] = inner.start_mark.line + 1
    return lines


def read_value(text: str) -> Any:
    """One YAML value, as the command line gives it.

    >>> [read_value(text) for text in ("1e-5", "true", "null", "[a, 2]", "org/name", "2026-01-31")]
    [1e-05, True, None, ['a', 2], 'org/name', '2026-01-31']
    """
    try:
        return load_yaml(text)
    except ValueError:  # it may show the value, which may be a secret
        raise ValueError("not a YAML value") from None


def brief(value: Any) -> str:
    """A value in a message; a long one is cut, one that may have any size is only named."""
    text = repr(value)[:101] if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    return text if len(text) <= 100 else text[:99] + "…"


def _require_bounded(content: Any) -> None:
    """Count all values as they would be written out; one that is inside itself is as deep as can be."""
    pending, count = [(content, 0)], 0
    while pending:
        value, depth = pending.pop()
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
        count += 1 + len(inner)
        if count > _MOST_VALUES or depth > _DEEPEST:
            raise ValueError("too many values: aliases refer to each other")
        pending.extend((one, depth + 1) for one in inner if isinstance(one, dict | list))


def _as_text(loader: yaml.SafeLoader, node: yaml.Node) -> str:
    return str(node.value)


def _whole_number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """Python writes out no number of thousands of digits, so no message could show it."""
    number = int(loader.construct_yaml_int(node))
    if number.bit_length() > _MOST_BITS:
        raise yaml.constructor.ConstructorError(None, None, "a number with too many digits", node.start_mark)
    return number


@cache
def _loader() -> type[yaml.SafeLoader]:
    class Loader(yaml.SafeLoader):
        """Safe, with numbers as everyone writes them; a key that is given twice is refused."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(
                            None, None, f"{key.value} is given twice", key.start_mark
                        )
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            super().flatten_mapping(node)
            if len(node.value) > _MOST_KEYS:  # references to references multiply
                raise yaml.constructor.ConstructorError(None, None, "too many keys", node.start_mark)

    Loader.add_constructor("tag:yaml.org,2002:timestamp", _as_text)
    Loader.add_constructor("tag:yaml.org,2002:int", _whole_number)
    Loader.add_implicit_resolver(*_FLOAT)
    return Loader
