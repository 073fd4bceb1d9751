"""The user's own formatting function: finding it, calling it, and its source text for the fingerprint."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from packtrain.core.errors import ConfigError, RecordError
from packtrain.records.schemas.recognise import ID_COLUMNS, MEDIA_ALIASES, MEDIA_COLUMNS

Formatting = Callable[[dict[str, Any]], Any]


def load_formatting(name: str) -> tuple[Formatting, str]:
    """The function behind "module:function" and the source text of its module, which holds what it may call."""
    where = "data.formatting"
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(where, got=name, expected="module:function", fix="for example my_data:to_messages")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module runs here and can fail in any way
        raise ConfigError(
            where,
            got=f"importing {module_name!r} raised {type(error).__name__}: {error}",
            expected="a module that Python can import",
            fix="install it, or put its folder on PYTHONPATH",
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        found = "no such name" if function is None else f"a {type(function).__name__}"
        raise ConfigError(where, got=f"{function_name!r} in {module_name!r}: {found}", expected="a function", fix="")
    try:
        return function, inspect.getsource(module)
    except (OSError, TypeError) as error:
        raise ConfigError(
            where,
            got=f"{name}: no source text ({error})",
            expected="a function written in Python, so that a change of it is noticed",
            fix="wrap it in a function of your own module",
        ) from error


def apply_formatting(function: Formatting, value: Mapping[str, Any]) -> dict[str, Any]:
    """The record that the user's function makes of a raw one, in the `messages` schema.

    A list of messages keeps the media columns of the raw record; a returned dict stands for itself. The id stays.
    """
    try:
        made = function(dict(value))
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"[:300]
        raise RecordError("formatting", "the formatting function raised", detail) from error
    kept = {name: value[name] for name in ID_COLUMNS if name in value}
    if isinstance(made, list | tuple):
        kept |= {name: value[name] for name in (*MEDIA_COLUMNS, *MEDIA_ALIASES) if name in value}
        return {**kept, "messages": made}
    if isinstance(made, Mapping) and made.get("messages") is not None:
        return {**kept, **made}
    raise RecordError("formatting", "the formatting function returned no messages", type(made).__name__)
