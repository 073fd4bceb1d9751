"""The user's own formatting function: finding it, calling it, and its source text for the fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.user_code import load_function
from packtrain.records.schemas.recognise import ID_COLUMNS, MEDIA_ALIASES, MEDIA_COLUMNS

Formatting = Callable[[dict[str, object]], Any]


def load_formatting(name: str) -> tuple[Formatting, str]:
    """The function behind "module:function" and its source text."""
    return load_function(name, where="data.formatting_func", example="my_data:to_messages")


def apply_formatting(function: Formatting, value: Mapping[str, object]) -> dict[str, object]:
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
