"""Names of a package that are imported when they are first used, each of them said once.

A package's `__init__` imports its public names under `if TYPE_CHECKING`, where type checkers and editors find them, and
hands itself to `lazy_names`, which reads the same lines:

    if TYPE_CHECKING:
        from packtrain.measuring.table import CostTable as CostTable

    __getattr__, __dir__, __all__ = lazy_names(__name__)
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package, for the names that it imports for type checkers."""
    places = _modules_by_name(_source(package))

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(places[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(places), sorted(places)


def _source(package: str) -> str:
    spec = sys.modules[package].__spec__ or find_spec(package)
    text = spec.loader.get_source(package) if spec is not None else None  # type: ignore[union-attr]
    assert text is not None, f"{package} is installed without its source"
    return str(text)


def _modules_by_name(source: str) -> dict[str, str]:
    """Name -> module, from the imports under `if TYPE_CHECKING`."""
    modules = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom), "only names are imported there"
                modules.update({alias.name: str(line.module) for alias in line.names})
    return modules
