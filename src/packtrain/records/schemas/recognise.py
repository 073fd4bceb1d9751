"""Which schema a record has, told by its columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from packtrain.core.errors import RecordError, nearest
from packtrain.core.values import MediaKind

# The columns that make a schema, in the order in which schemas are tried; each line is one sufficient set.
SCHEMA_COLUMNS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "messages": (("messages",),),
    "conversations": (("conversations",), ("conversation",)),
    "texts": (("texts",),),
    "prompt_completion": (("prompt", "completion"),),
    "instruction": (("instruction", "output"),),
    "question_answer": (("question", "answer"),),
    "objects": (("images", "objects"), ("image", "objects")),
    "text": (("text",), ("caption",)),
}
MEDIA_COLUMNS: Mapping[str, MediaKind] = {
    "images": "image",
    "image": "image",
    "videos": "video",
    "video": "video",
    "audios": "audio",
    "audio": "audio",
}
ID_COLUMNS = ("id", "sample_id", "uid", "__key__")
OTHER_COLUMNS = ("system", "tools", "chat_template_kwargs", "input", "history", "width", "height", *ID_COLUMNS)

_MAX_PLANS = 1024  # datasets have a handful of shapes; junk must not grow the cache without end
_plans: dict[tuple[Any, ...], Plan] = {}


class Plan(NamedTuple):
    """What can be said about a record from its column names alone, kept because most records share them."""

    schemas: tuple[tuple[str, tuple[str, ...]], ...]  # candidates with the columns each would use
    media: tuple[tuple[str, MediaKind], ...]
    id_column: str | None
    extras: bool  # has a column that changes the conversation as a whole (system, tools, chat_template_kwargs)


def known_columns() -> tuple[str, ...]:
    """Every column name that some schema reads."""
    names = [name for sets in SCHEMA_COLUMNS.values() for columns in sets for name in columns]
    return tuple(dict.fromkeys([*names, *MEDIA_COLUMNS, *OTHER_COLUMNS]))


def plan_for(value: Mapping[str, Any]) -> Plan:
    """The plan for a record's set of columns."""
    key = tuple(value)
    plan = _plans.get(key)
    if plan is None:
        plan = _make_plan(value)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _make_plan(value: Mapping[str, Any]) -> Plan:
    return Plan(
        schemas=tuple(
            (name, columns)
            for name, sets in SCHEMA_COLUMNS.items()
            for columns in sets
            if all(column in value for column in columns)
        ),
        media=tuple((column, kind) for column, kind in MEDIA_COLUMNS.items() if column in value),
        id_column=next((column for column in ID_COLUMNS if column in value), None),
        extras=any(name in value for name in ("system", "tools", "chat_template_kwargs")),
    )


def choose_schema(plan: Plan, value: Mapping[str, Any]) -> str:
    """The first candidate whose columns are filled; tables give every record all columns, many of them None."""
    for name, columns in plan.schemas:
        for column in columns:
            if value[column] is None:
                break
        else:
            return name
    raise _unknown(value)


def recognise_schema(value: Mapping[str, Any]) -> str:
    """The name of a record's schema, a key of SCHEMAS.

    >>> recognise_schema({"id": 1, "prompt": "2+2?", "completion": "4"})
    'prompt_completion'
    """
    return choose_schema(plan_for(value), value)


def _unknown(value: Mapping[str, Any]) -> RecordError:
    filled = [str(name) for name, item in value.items() if item is not None]
    hints = [hint for name in filled[:20] if (hint := nearest(name, known_columns())) and name not in known_columns()]
    detail = f"columns {', '.join(filled)[:200]!a}" if filled else "no filled column"
    return RecordError("schema", "unknown schema", detail + (f"; {hints[0]}" if hints else ""))
