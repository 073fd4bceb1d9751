"""Entry -> Record: recognises the schema of a raw record and turns it into messages."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packtrain.core.errors import ConfigError, RecordError, nearest
from packtrain.core.user_code import load_function
from packtrain.core.values import Message, Record, Text
from packtrain.records.schemas.chat import (
    ConvertedRecord,
    carries_loss,
    conversations_schema,
    messages_schema,
    refuse_markers,
    texts_schema,
)
from packtrain.records.schemas.flat import (
    alpaca_schema,
    instruction_schema,
    prompt_completion_schema,
    question_answer_schema,
    text_schema,
    tokens_schema,
)
from packtrain.records.schemas.objects import NORM_SCALES, compile_template, objects_schema
from packtrain.records.schemas.recognise import (
    ID_COLUMNS,
    MEDIA_ALIASES,
    MEDIA_COLUMNS,
    SCHEMA_COLUMNS,
    TURNS,
    ColumnLayout,
    choose_schema,
    column_layout,
    is_flag,
    known_columns,
    recognise_schema,
    refuse_columns,
)
from packtrain.records.schemas.references import MediaPool, gather
from packtrain.records.schemas.tools import KWARGS_COLUMN, TOOL_COLUMNS, checked_text, read_variables, without_nulls
from packtrain.records.schemas.unread import UnreadNames, refuse_lookalikes, unread_items
from packtrain.records.source import Entry, RawRecord

ORDERINGS = ("sorted", "random", "as_is")
EMIT_NORMS = ("none", *NORM_SCALES)
_SCHEMA_NAMES = "ShareGPT is conversations, Alpaca is instruction; leave it out to detect it from the columns"


@dataclass(frozen=True, kw_only=True, slots=True)
class SchemaOptions:
    """The settings of one dataset's conversion. `columns` maps a column's name in the data to the name used here."""

    schema: str | None = None  # None: told by the columns
    object_ordering: str = "sorted"
    emit_norm: str = "none"
    object_template: str | None = None  # jinja2 over `objects`
    object_prompt: str | None = None  # what the user message asks about the image; "" for the image alone
    coord_tokens: bool = False
    formatting_func: str | None = None  # module:function
    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.schema is not None:
            _require_choice("data.schema", self.schema, tuple(SCHEMA_COLUMNS), _SCHEMA_NAMES)
        _require_choice("data.object_ordering", self.object_ordering, ORDERINGS, "")
        _require_choice("data.emit_norm", self.emit_norm, EMIT_NORMS, "")
        if self.coord_tokens:
            raise ConfigError(
                "data.coord_tokens",
                got=self.coord_tokens,
                expected="false: special coordinate tokens are experimental, and not supported",
                fix="set it to false, as its own recommended config does, and choose emit_norm: norm1000",
            )
        if self.object_template is not None:
            compile_template(self.object_template)
        if self.formatting_func is not None and not all(self.formatting_func.partition(":")):
            raise ConfigError("data.formatting_func", got=self.formatting_func, expected="module:function", fix="")
        for theirs, ours in self.columns.items():
            if ours not in known_columns():
                raise ConfigError(
                    f"data.columns.{theirs}",
                    got=ours,
                    expected="the name of a column that a schema reads; written as {name in the data: name here}",
                    fix=nearest(ours, known_columns()) or "one of " + ", ".join(known_columns()),
                )


def _require_choice(where: str, got: object, allowed: tuple[str, ...], fix: str) -> None:
    if got not in allowed:
        fix = nearest(str(got), allowed) or fix
        raise ConfigError(where, got=got, expected="one of " + ", ".join(allowed), fix=fix)


Formatting = Callable[[dict[str, object]], Any]


def load_formatting(name: str) -> tuple[Formatting, str]:
    """The function named "module:function" and its source text."""
    return load_function(name, where="data.formatting_func", example="my_data:to_messages")


def apply_formatting(function: Formatting, value: RawRecord) -> dict[str, object]:
    """The record that the user's function makes of a raw one, in the `messages` schema.

    A list of messages keeps the media columns of the raw record; a returned dict is taken as it is. The id stays.
    """
    try:
        result = function(dict(value))
    except Exception as error:
        detail = f"{type(error).__name__}: {error}"[:300]
        raise RecordError("formatting", "the formatting function raised", detail) from error
    fields = {name: value[name] for name in ID_COLUMNS if name in value}
    if isinstance(result, list | tuple):
        fields |= {name: value[name] for name in (*MEDIA_COLUMNS, *MEDIA_ALIASES) if name in value}
        return {**fields, "messages": result}
    if isinstance(result, Mapping) and result.get("messages") is not None:
        return {**fields, **result}
    raise RecordError("formatting", "the formatting function returned no messages", type(result).__name__)


__all__ = ["SCHEMAS", "SchemaOptions", "load_formatting", "recognise_schema", "to_record"]

_VARIABLES = frozenset((*TOOL_COLUMNS, KWARGS_COLUMN))
SchemaConverter = Callable[[RawRecord, MediaPool | None, SchemaOptions, str], ConvertedRecord]


def _simple(schema: Callable[[RawRecord, MediaPool | None], ConvertedRecord]) -> SchemaConverter:
    return lambda value, pool, options, record_id: schema(value, pool)


SCHEMAS: Mapping[str, SchemaConverter] = {
    "tokens": _simple(tokens_schema),
    "messages": _simple(messages_schema),
    "conversations": _simple(conversations_schema),
    "texts": _simple(texts_schema),
    "prompt_completion": _simple(prompt_completion_schema),
    "instruction": _simple(instruction_schema),
    "alpaca": _simple(alpaca_schema),
    "question_answer": _simple(question_answer_schema),
    "objects": objects_schema,
    "text": _simple(text_schema),
}


def to_record(
    entry: Entry,
    *,
    source: str,
    options: SchemaOptions,
    formatting: Formatting | None = None,
    text_only: bool = False,
    unread: UnreadNames | None = None,
    schemas: Counter[str] | None = None,
) -> Record:
    """The record of one entry; for a model of text alone `<image>` is a text.

    What it has that nothing reads is counted in `unread`, and what it was read as in `schemas`.

    Raises RecordError, and nothing else, for an entry that cannot be understood.
    """
    value = entry.value
    if value is None:
        raise entry.error or RecordError("schema", "no value")
    if not isinstance(value, Mapping):
        raise RecordError("schema", "a record is not an object", type(value).__name__)
    if options.columns:
        value = _rename_columns(value, options.columns)
    if formatting is not None:
        value = apply_formatting(formatting, value)
    value = _parse_lists(value)
    if entry.padded:
        value = without_nulls(value, TURNS)
    layout = column_layout(value)
    if layout.refused:
        refuse_columns(layout, value, None)
    if formatting is not None:
        name = "messages"
    elif options.schema is not None:
        name = options.schema
        _require(name, value)
    else:
        name = choose_schema(layout, value)
    if layout.refused:
        refuse_columns(layout, value, name)
    record_id = _record_id(layout, value, entry.origin)
    pool = gather(value, layout.media, entry.media) if layout.media or entry.media else None
    draft = SCHEMAS[name](value, pool, options, record_id)
    messages = draft.messages
    if "system" in value and name not in ("text", "tokens"):
        messages = _with_system(value, messages, plain=draft.plain)
    unread_columns = unread_items(value, name)
    if unread_columns:
        refuse_lookalikes(unread_columns, None if text_only else messages)
    if not text_only:
        refuse_markers(messages)
    if layout.flags and not carries_loss(value, [flag for flag in layout.flags if is_flag(value[flag])], "record"):
        raise RecordError("loss", "no supervised tokens", "a flag of the whole record")
    if unread_columns and unread is not None:
        unread.take(dict.fromkeys(name for name, _ in unread_columns), record_id)
    if schemas is not None:
        schemas[f"{name} ({draft.how})" if draft.how else name] += 1
    variables = None
    if draft.tools or not _VARIABLES.isdisjoint(value):
        variables = read_variables(value, draft.tools)
        if variables is not None and (draft.plain or draft.tokens is not None):
            raise RecordError("schema", "tools or chat_template_kwargs of plain text", "it has no chat template")
    return Record(
        id=record_id,
        origin=entry.origin,
        source=source,
        messages=messages,
        plain=draft.plain,
        objects=draft.objects,
        tokens=draft.tokens,
        variables=variables,
    )


def _parse_lists(value: RawRecord) -> RawRecord:
    """The record with its chat and its media as lists, where a table keeps them as texts of JSON."""
    for column in ("messages", "conversations", "images", "videos", "audios"):
        item = value.get(column)
        if isinstance(item, str) and item.lstrip().startswith("["):
            try:
                items = json.loads(item)
            except (ValueError, RecursionError):  # the schema says that it is no list
                continue
            if isinstance(items, list):
                value = {**value, column: items}
    return value


def _record_id(layout: ColumnLayout, value: RawRecord, origin: str) -> str:
    """The data's own id where it is a text or an integer, else where the record was found."""
    if layout.id_column is None:
        return origin
    data_id = value[layout.id_column]
    if isinstance(data_id, str) and data_id:
        # ids are written to tables, which take no lone surrogates
        return data_id if data_id.isascii() else data_id.encode("utf-8", "backslashreplace").decode()
    if isinstance(data_id, int) and not isinstance(data_id, bool):
        return str(data_id)
    return origin


def _rename_columns(value: RawRecord, columns: Mapping[str, str]) -> dict[str, object]:
    """The record under the names used here; a renamed column wins over one that already has the name.

    >>> _rename_columns({"id": 7, "answers": {"text": ["one", "two"]}}, {"answers.text.0": "answer"})
    {'id': 7, 'answer': 'one'}
    """
    renamed, replaced = {}, set()
    for theirs, ours in columns.items():
        name, *inner = [theirs] if theirs in value else theirs.split(".")
        item: object = value.get(name)
        for key in inner:
            item = _lookup(item, key)
        if name in value and (item is not None or not inner):
            renamed[ours] = item
            replaced.add(name)
    return {name: item for name, item in value.items() if name not in replaced} | renamed


def _lookup(item: object, key: str) -> object:
    """The value of an object's key, or of a list's index; None if there is none."""
    if isinstance(item, Mapping):
        return item.get(key)
    if isinstance(item, list | tuple) and key.isdecimal() and int(key) < len(item):
        return item[int(key)]
    return None


def _require(name: str, value: RawRecord) -> None:
    for columns in SCHEMA_COLUMNS[name]:
        if all(value.get(column) is not None for column in columns):
            return
    needed = " or ".join(" + ".join(columns) for columns in SCHEMA_COLUMNS[name])
    raise RecordError("schema", "the schema's columns are missing", f"{name} needs {needed}")


def _with_system(value: RawRecord, messages: tuple[Message, ...], *, plain: bool) -> tuple[Message, ...]:
    """A `system` column is put before a conversation that does not begin with a system message of its own."""
    system = value["system"]
    if system is None or system == "":
        return messages
    if not isinstance(system, str):
        raise RecordError("schema", "a column has the wrong type", f"system: {type(system).__name__}, not text")
    if plain:
        raise RecordError("schema", "a system column beside plain text", "write it into the prompt, or use messages")
    if messages[0].role == "system":
        raise RecordError("schema", "two system messages", "the column and the first message")
    return (Message(role="system", parts=(Text(checked_text(system)),)), *messages)
