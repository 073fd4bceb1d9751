"""Dataclasses from plain JSON values: the way back from `dataclasses.asdict`, by the types of their fields."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")
_UNKNOWN = object()
_LARGEST = 1 << 53  # up to which JSON numbers are exact everywhere
_NAN = ("NaN", "nan")
_NOT_FINITE = frozenset((*_NAN, "inf", "-inf", "Infinity", "-Infinity"))  # as JSON has them


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


def lenient_from_json(kind: type[T], value: object) -> T:
    """A dataclass from JSON that may be broken or of another version; never an error.

    What is missing or of another type is the field's default, or else empty: 0, NaN, "", nothing. Other keys are passed
    over. Integers are counts: those below 0 are unknown, too.

    >>> from packtrain.core.values import Cost
    >>> cost = lenient_from_json(Cost, {"tokens": 3, "images": "two", "colour": "red"})
    >>> cost == Cost(tokens=3, text_tokens=0)
    True
    """
    given = value if isinstance(value, Mapping) else {}
    hints, values = _field_types(typing.cast(Any, kind)), {}
    for one in fields(typing.cast(Any, kind)):
        known = _known(hints[one.name], given[one.name]) if one.name in given else _UNKNOWN
        if known is not _UNKNOWN:
            values[one.name] = known
        elif one.default is MISSING and one.default_factory is MISSING:
            values[one.name] = _empty(hints[one.name])
    return kind(**values)


def as_float(value: object) -> float:
    """A number of JSON, where those that are not finite are words; NaN where it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        large = math.inf if value > 0 else -math.inf
        return large if abs(value) >= 1e300 else float(value)
    return float(value) if isinstance(value, str) and value in _NOT_FINITE else math.nan


def as_count(value: object) -> int | None:
    """A count of JSON; None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST else None


def _known(hint: Any, value: Any) -> Any:
    """A value as a field of this type has it, or _UNKNOWN."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (hint is type(None) and value is None):
        return value
    if origin in (typing.Union, types.UnionType):
        return next((known for one in inner if (known := _known(one, value)) is not _UNKNOWN), _UNKNOWN)
    if is_dataclass(hint):
        return lenient_from_json(typing.cast(type[Any], hint), value) if isinstance(value, Mapping) else _UNKNOWN
    if origin is tuple:
        return _known_items(inner, value) if isinstance(value, list | tuple) else _UNKNOWN
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            return _UNKNOWN
        items = {name: _known(inner[1], item) for name, item in value.items()}
        return {name: item for name, item in items.items() if item is not _UNKNOWN}
    if hint is int:
        return _UNKNOWN if (count := as_count(value)) is None else count
    if hint is float:
        number = as_float(value)
        return number if isinstance(value, float) or not math.isnan(number) or value in _NAN else _UNKNOWN
    return value if isinstance(hint, type) and isinstance(value, hint) else _UNKNOWN


def _known_items(kinds: tuple[Any, ...], value: Sequence[Any]) -> Any:
    """Those of a tuple that has any number of them; else all or none."""
    if kinds[1:] == (...,):
        return tuple(item for one in value if (item := _known(kinds[0], one)) is not _UNKNOWN)
    items = tuple(map(_known, kinds, value))
    return items if len(kinds) == len(value) and _UNKNOWN not in items else _UNKNOWN


def _empty(hint: Any) -> Any:
    """Nothing, in a field of this type."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return None
    if is_dataclass(hint):
        return lenient_from_json(typing.cast(type[Any], hint), {})
    if origin is tuple:
        kinds = typing.get_args(hint)
        return () if kinds[1:] == (...,) else tuple(map(_empty, kinds))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {}
    return math.nan if hint is float else hint()


def _is_nested(hint: Any) -> bool:
    return is_dataclass(hint) or typing.get_origin(hint) is not None


@functools.cache
def _field_types(kind: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
