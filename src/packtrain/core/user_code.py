"""A function of the user's own that a config names as module:function, and the source text that it is known by.

A module that is a file is also called by its path, `folder/my_data.py:to_messages`, which works from anywhere.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from packtrain.core.errors import ConfigError

_FILE = ".py"
_NAMED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def names_function(text: str) -> bool:
    """Is this module:function? Nothing is imported.

    >>> names_function("my.data:to_messages"), names_function("best_fit"), names_function("a:")
    (True, False, False)
    """
    return _NAMED.fullmatch(text) is not None


def import_named(name: str, *, where: str) -> ModuleType:
    """A module that a setting names."""
    try:
        return _import(name)
    except Exception as error:  # the user's module runs here and can fail in any way
        raise ConfigError(
            where,
            got=f"importing {name!r} raised {type(error).__name__}: {error}",
            expected="a module that Python can import",
            fix="install it, or put its folder on PYTHONPATH",
        ) from error


def lazy(path: str) -> Any:
    """The value at one of packtrain's own lazy paths, "module:name"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def from_anywhere(name: str, folder: str = ".") -> str:
    """module:function by the path of its module, where that is a file in this folder; else as it is."""
    module, _, function = name.partition(":")
    file = os.path.abspath(os.path.join(folder, module if module.endswith(_FILE) else module + _FILE))
    return f"{file}:{function}" if os.path.isfile(file) else name


def without_folder(name: str) -> str:
    """Its name without the folder of its module.

    >>> without_folder("/home/me/my_data.py:to_messages"), without_folder("my.data:to_messages")
    ('my_data:to_messages', 'my.data:to_messages')
    """
    module, colon, function = name.partition(":")
    return f"{os.path.basename(module).removesuffix(_FILE)}{colon}{function}" if module.endswith(_FILE) else name


def load_function(name: str, *, where: str, example: str) -> tuple[Callable[..., Any], str]:
    """The function at "module:function" and the source text of its module, which holds what it may call."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(where, got=name, expected="module:function", fix=f"for example {example}")
    module = import_named(module_name, where=where)
    function = getattr(module, function_name, None)
    if not callable(function):
        problem = "no such name" if function is None else f"a {type(function).__name__}"
        raise ConfigError(where, got=f"{function_name!r} in {module_name!r}: {problem}", expected="a function", fix="")
    try:
        return function, inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise ConfigError(
            where,
            got=f"{name}: no source code ({error})",
            expected="a Python function, so that changes to it are detected",
            fix="wrap it in a function in your own module",
        ) from error


def _import(name: str) -> ModuleType:
    """A module by its name, or by its file, whose folder may hold modules that it imports."""
    if not name.endswith(_FILE):
        return importlib.import_module(name)
    folder, file = os.path.split(os.path.abspath(name))
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.import_module(file.removesuffix(_FILE))
    if module.__file__ is None or not os.path.samefile(module.__file__, os.path.join(folder, file)):
        raise ImportError(f"another module has this name: {module.__file__}")
    return module
