"""YAML as people write configs: 1e-5 is a number, a day is text, a key stands once, nothing in the file is run."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from packtrain.core.errors import ConfigError

# The library follows an older YAML, to which 1e-5 is text: it wants a point before and a sign after the e.
_NUMBER = re.compile(r"[-+]?(\d[\d_]*)(\.[\d_]*)?[eE][-+]?\d+$")

_MOST_KEYS = 10_000  # of one mapping


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML file; an empty file is an empty one."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_loader())
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(str(path), got=f"{type(error).__name__}: {error}", expected="a YAML file") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(str(path), got=f"a {type(content).__name__}", expected="sections model, data, training")
    return content


def read_value(text: str) -> Any:
    """One YAML value, as the command line gives it.

    >>> [read_value(text) for text in ("1e-5", "true", "null", "[a, 2]", "org/name", "2026-01-31")]
    [1e-05, True, None, ['a', 2], 'org/name', '2026-01-31']
    """
    try:
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"no YAML value ({type(error).__name__})") from None


def _as_text(loader: yaml.SafeLoader, node: yaml.Node) -> str:
    return str(node.value)


@cache
def _loader() -> type[yaml.SafeLoader]:
    class Loader(yaml.SafeLoader):
        """Safe, with numbers as everyone writes them; a key that stands twice is refused."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                    if key.value in seen:
                        raise yaml.constructor.ConstructorError(None, None, f"{key.value} stands twice", key.start_mark)
                    seen.add(key.value)
            return super().construct_mapping(node, deep)

        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            super().flatten_mapping(node)
            if len(node.value) > _MOST_KEYS:  # references to references multiply
                raise yaml.constructor.ConstructorError(None, None, "more keys than a config has", node.start_mark)

    Loader.add_constructor("tag:yaml.org,2002:timestamp", _as_text)
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+0123456789"))
    return Loader
