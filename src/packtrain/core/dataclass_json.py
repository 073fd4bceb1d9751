"""Dataclasses from plain JSON values: the way back from `dataclasses.asdict`, by the types of their fields."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")


def from_json(kind: type[T], value: object, *, ignore: Iterable[str] = ()) -> T:
    """A dataclass from the mapping that `asdict` and JSON have made of it; keys in `ignore` are passed over.

    Nested dataclasses, tuples and mappings of them are restored; other values stay as they are. Raises TypeError or
    ValueError where keys are missing, unknown, or hold something of another shape.

    >>> from dataclasses import asdict
    >>> from packtrain.core.values import Cost, Measured
    >>> measured = Measured(record_id="1", origin="a:1", source="a", cost=Cost(tokens=3, text_tokens=3))
    >>> from_json(Measured, asdict(measured)) == measured
    True
    """
    if not isinstance(value, Mapping):
        raise TypeError(f"a {type(value).__name__} in place of {kind.__name__}")
    hints = _field_types(typing.cast(Any, kind))
    skipped = frozenset(ignore)
    return kind(
        **{
            name: _restore(hints.get(name), item)
            for name, item in value.items()
            if name not in skipped or name in hints
        }
    )


def _restore(hint: Any, value: Any) -> Any:
    """A value as a field of this type has it."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if value is None:
        return None
    if is_dataclass(hint):
        return from_json(typing.cast(type[Any], hint), value)
    if origin in (typing.Union, types.UnionType):
        return _restore(next((one for one in inner if _is_nested(one)), None), value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"a {type(value).__name__} in place of a list")
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return tuple(_restore(one, item) for one, item in zip(kinds, value, strict=True))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise TypeError(f"a {type(value).__name__} in place of an object")
        return {name: _restore(inner[1], item) for name, item in value.items()}
    return value


def _is_nested(hint: Any) -> bool:
    return is_dataclass(hint) or typing.get_origin(hint) is not None


@functools.cache
def _field_types(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
