"""What of a record nothing reads: columns, keys of messages and keys of their parts; counted by name."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.records.schemas.chat import MESSAGE_KEYS, PART_KEYS, ROLE_ALIASES, TOOL_KEYS
from packtrain.records.schemas.limits import LIMIT_KEYS
from packtrain.records.schemas.recognise import (
    ID_COLUMNS,
    LOSS_MASKS,
    MEDIA_ALIASES,
    MEDIA_COLUMNS,
    REFUSED_COLUMNS,
    ROW_FLAGS,
    SCHEMA_COLUMNS,
)
from packtrain.records.schemas.tools import BLOCK_KEYS, BLOCKS, KWARGS_COLUMN, TOOL_COLUMNS

# What is about a record and not of it: leaving it out changes nothing.
IRRELEVANT = frozenset(
    (
        *ID_COLUMNS,
        *("_id", "idx", "index", "__index_level_0__", "uuid", "key", "question_id", "image_id", "video_id"),
        *("message_id", "conversation_id", "source", "data_source", "dataset", "dataset_name", "origin", "split"),
        *("subset", "url", "__url__", "__local_path__", "license", "language", "lang", "meta", "metadata", "width"),
        *("height", "original_width", "original_height", "sha256", "md5", "hash", "timestamp", "date", "created"),
        *("created_at", "dump", "token_count", "num_tokens", "num_turns", "status", "error_message", "exif"),
        "parallel_tool_calls",
    )
)
_ALSO: Mapping[str, tuple[str, ...]] = {
    "instruction": ("input", "history"),
    "alpaca": ("input", "history"),
    "objects": ("width", "height"),
    "tokens": (
        "labels",
        "attention_mask",
        "position_ids",
        "token_type_ids",
        "special_tokens_mask",
        "length",
        *LOSS_MASKS,
    ),
}
_TURNS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations", "conversation"),
    "texts": ("texts",),
    "prompt_completion": ("prompt", "completion"),
}
_KEYS = {
    "message": MESSAGE_KEYS | IRRELEVANT,
    "tool": TOOL_KEYS | IRRELEVANT,
    "exchange": MESSAGE_KEYS | IRRELEVANT | {"user", "human", "assistant"},
    "part": PART_KEYS | IRRELEVANT,
    "medium": PART_KEYS | IRRELEVANT | LIMIT_KEYS,
    "block": BLOCK_KEYS | IRRELEVANT,
}
_MOST_NAMES = 100  # names that are counted; junk must not grow them without end
_LONGEST = 100  # characters of a name


class UnreadNames:
    """Counts the records that have something under a name that nothing reads, and keeps the id of the first."""

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict
        self._found: dict[str, list[Any]] = {}

    def take(self, names: Iterable[str], record_id: str) -> None:
        """Names of one record, each once. Refuses the record where it is strict."""
        shown = [name.encode("utf-8", "backslashreplace").decode()[:_LONGEST] for name in names]
        if shown and self._strict:
            raise RecordError("schema", "a column or key that nothing reads", ", ".join(shown)[:300])
        for name in shown:
            if name in self._found:
                self._found[name][0] += 1
            elif len(self._found) < _MOST_NAMES:
                self._found[name] = [1, record_id]

    def handed_over(self) -> dict[str, list[Any]]:
        """Number of records and the first one's id by name, of all since the last call."""
        found, self._found = self._found, {}
        return found


def unread_of(value: Mapping[str, object], schema: str) -> list[str]:
    """The filled columns and keys of a record that its schema does not read.

    >>> unread_of({"id": 1, "messages": [{"role": "user", "content": "x", "mood": "good"}], "rating": 5}, "messages")
    ['rating', 'messages[].mood']
    """
    names = [str(name) for name in _unread_columns(tuple(value), schema) if _filled(value[name])]
    for column in _TURNS.get(schema, ()):
        turns = value.get(column)
        if isinstance(turns, list | tuple):
            names += dict.fromkeys(_of_turns(turns, column))
    return names


def _of_turns(turns: Iterable[Mapping[str, object]], column: str) -> Iterator[str]:
    for turn in turns:
        if len(turn) > 2:
            yield from (f"{column}[].{key}" for key in _unknown(tuple(turn), _kind(turn)) if _filled(turn[key]))
        content = turn.get("content") or turn.get("value")
        if isinstance(content, list | tuple):
            for part in content:
                if isinstance(part, Mapping):
                    kind = part.get("type", "text" if "text" in part else None)
                    unknown = _unknown(
                        tuple(part), "block" if kind in BLOCKS else "part" if kind == "text" else "medium"
                    )
                    yield from (f"{column}[].content[].{key}" for key in unknown if _filled(part[key]))


def _kind(turn: Mapping[str, object]) -> str:
    role = turn.get("role") or turn.get("from")
    if role is None:
        return "exchange"
    return "tool" if ROLE_ALIASES.get(str(role).lower()) == "tool" else "message"


def _filled(item: object) -> bool:
    """Tables give every record all columns and keys."""
    return item is not None and not (isinstance(item, str | bytes | list | tuple | dict) and not item)


@functools.lru_cache(maxsize=1024)
def _unknown(keys: tuple[str, ...], kind: str) -> tuple[str, ...]:
    return tuple(key for key in keys if key not in _KEYS[kind])


@functools.lru_cache(maxsize=1024)
def _unread_columns(columns: tuple[str, ...], schema: str) -> tuple[str, ...]:
    refused = (name for name, (_, schemas) in REFUSED_COLUMNS.items() if schema in schemas or not schemas)
    own = (name for names in SCHEMA_COLUMNS[schema] for name in names)
    templated = () if schema in ("text", "tokens") else ("system", *TOOL_COLUMNS, KWARGS_COLUMN)
    read = {*own, *templated, *_ALSO.get(schema, ()), *MEDIA_COLUMNS, *MEDIA_ALIASES, *ROW_FLAGS, *refused}
    return tuple(name for name in columns if name not in read and name not in IRRELEVANT)
