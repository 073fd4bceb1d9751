"""What of a record nothing reads: columns, keys of messages and keys of their parts; counted by name.

What looks like a medium, or like saying where loss is taken, is not left unread: such a record is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.values import Media, MediaKind, Message
from packtrain.records.schemas.chat import MESSAGE_KEYS, PART_FIELDS, ROLE_ALIASES, part_type
from packtrain.records.schemas.recognise import (
    ID_COLUMNS,
    LOSS_FLAGS,
    LOSS_MASKS,
    MEDIA_ALIASES,
    MEDIA_COLUMNS,
    REFUSED_COLUMNS,
    SCHEMA_COLUMNS,
    is_flag,
)
from packtrain.records.schemas.references import LIMIT_KEYS, with_article
from packtrain.records.schemas.tools import ANSWER_KEYS, BLOCK_KEYS, BLOCKS, KWARGS_COLUMN, TOOL_COLUMNS
from packtrain.records.source import MEDIA_ENDINGS, RawRecord

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
        *("labels", "attention_mask", "position_ids", "token_type_ids", "special_tokens_mask", "length"),
        *LOSS_MASKS,
    ),
}
_TURNS: Mapping[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "conversations": ("conversations", "conversation"),
    "texts": ("texts",),
    "prompt_completion": ("prompt", "completion"),
}
_SAID = MESSAGE_KEYS | IRRELEVANT
_ASKED = frozenset(("type", "cache_control", "train_detail", *LOSS_FLAGS)) | IRRELEVANT
# What is read of a message by the names it has for its role and its content, and of a part by its type.
_KEYS: Mapping[str, frozenset[str]] = {
    "role": _SAID | {"role", "content"},
    "from": _SAID | {"from", "value"},
    "tool": _SAID | {"role", "content", "from", "value", *ANSWER_KEYS},
    "exchange": _SAID | {"user", "human", "assistant"},
    "text": _ASKED | {"text", "value"},
    "block": BLOCK_KEYS | IRRELEVANT,
    **{name: _ASKED | LIMIT_KEYS | frozenset(fields) for name, (_, fields) in PART_FIELDS.items()},
}
_LOSS_WORDS = frozenset(("loss", "train", "training", "trainable", "mask", "masked", "weight", "weights", "supervised"))
_MEDIA_WORDS: Mapping[MediaKind, frozenset[str]] = {
    "image": frozenset(("image", "images", "img", "imgs", "picture", "pictures", "pic", "pics", "photo", "photos")),
    "video": frozenset(("video", "videos", "clip", "clips", "frame", "frames")),
    "audio": frozenset(("audio", "audios", "sound", "sounds", "speech")),
}
# With one of these a name is that of something about a medium, or about training.
_ABOUT = frozenset(
    (
        *("id", "ids", "num", "number", "count", "tokens", "type", "kind", "format", "source", "size", "width"),
        *("height", "hash", "md", "sha", "caption", "captions", "description", "title", "text", "alt", "label"),
        *("labels", "category", "split", "set", "step", "steps", "time", "date", "license", "prompt", "question"),
        *("score", "ratio", "area"),
    )
)
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_ENDING = re.compile(r"\.(\w{2,5})(?:[?#].*)?", re.DOTALL)
_INNER = ("bytes", "path", "url", "base64", "data")  # of an object that holds a medium
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
            raise RecordError("schema", "an unused column or key", ", ".join(shown)[:300])
        for name in shown:
            if name in self._found:
                self._found[name][0] += 1
            elif len(self._found) < _MOST_NAMES:
                self._found[name] = [1, record_id]

    def drain(self) -> dict[str, list[Any]]:
        """Number of records and the first one's id by name, of all since the last call."""
        counts, self._found = self._found, {}
        return counts


def unread_items(value: RawRecord, schema: str) -> list[tuple[str, object]]:
    """The filled columns and keys of a record that its schema does not read, with what they hold.

    >>> unread_items({"id": 1, "messages": [{"role": "user", "content": "x", "mood": "good"}], "rating": 5}, "messages")
    [('rating', 5), ('messages[].mood', 'good')]
    """
    unread = [
        (str(name), value[name])
        for name in _unread_columns(tuple(value), schema)
        if _has_value(value[name]) and not (name in LOSS_FLAGS and is_flag(value[name]))
    ]
    columns = [name for name in _TURNS.get(schema, ()) if value.get(name) is not None]
    for column in columns if schema == "prompt_completion" else columns[:1]:
        if isinstance(turns := value[column], list | tuple):
            unread += _unread_in_turns(turns, column)
    unread += [(name, value[name]) for name in columns[1:] if schema != "prompt_completion"]
    return unread


def refuse_lookalikes(unread: Iterable[tuple[str, object]], messages: Sequence[Message] | None) -> None:
    """Refuse a record of which something unread looks like loss control, or like a medium of a kind that `messages` do
    not show; None for a model that takes no media."""
    for name, item in unread:
        words = {word.lower() for word in _WORD.findall(name.rpartition(".")[2])}
        if words & _LOSS_WORDS and not words & _ABOUT and is_flag(item):
            detail = f"{name}: {ascii(item)[:40]}; known are {', '.join(LOSS_FLAGS)}{_rename_hint(name, 'weight')}"
            raise RecordError("schema", "a column or key that looks like loss control is not read", detail)
        kind = _medium_in(item, words) if messages is not None else None
        if kind and messages is not None and not any(kind == shown.kind for shown in _media(messages)):
            reason = f"a column or key that looks like {with_article(kind)} is not read"
            raise RecordError("schema", reason, name + _rename_hint(name, kind))


def _rename_hint(name: str, ours: str) -> str:
    """Hint how to rename a column; keys of messages cannot be renamed."""
    return "" if "[]" in name else f"; looks like: --columns {name}={ours}, or {name}=uid if it is something else"


def _media(messages: Sequence[Message]) -> Iterator[Media]:
    return (part for message in messages for part in message.parts if isinstance(part, Media))


def _medium_in(item: object, words: set[str]) -> MediaKind | None:
    """The kind of medium that something seems to be, by itself or by the words of its name."""
    if isinstance(item, list | tuple):
        item = next((one for one in item if one is not None), None)
    guess = next((kind for kind, hints in _MEDIA_WORDS.items() if words & hints and not words & _ABOUT), None)
    if isinstance(item, Mapping):
        data = item.get("bytes") is not None and "path" in item  # as the datasets package keeps images
        item, guess = next((item[key] for key in _INNER if item.get(key)), None), guess or ("image" if data else None)
    if isinstance(item, bytes | bytearray | memoryview):
        return guess
    if not isinstance(item, str) or len(item) < 3:
        return None
    if item.startswith("data:"):
        return next((kind for kind in _MEDIA_WORDS if item.startswith(f"data:{kind}/")), None)
    ending = _ENDING.fullmatch(item[item.rfind(".") :]) if "\n" not in item else None
    kind = MEDIA_ENDINGS.get(ending[1].lower()) if ending and ending[1] != "ts" else None  # also that of TypeScript
    return kind or (guess if not re.search(r"\s", item) and ("/" in item or len(item) > 200) else None)


def _unread_in_turns(turns: Iterable[RawRecord], column: str) -> Iterator[tuple[str, object]]:
    for turn in turns:
        if len(turn) > 2:
            yield from _unread_keys(turn, _kind(turn), f"{column}[]")
        content = turn.get("content") or turn.get("value")
        if isinstance(content, list | tuple):
            for part in content:
                if isinstance(part, Mapping):
                    kind = part_type(part)
                    yield from _unread_keys(part, "block" if kind in BLOCKS else kind, f"{column}[].content[]")


def _unread_keys(item: RawRecord, kind: str, where: str) -> Iterator[tuple[str, object]]:
    return ((f"{where}.{key}", item[key]) for key in _unknown(tuple(item), kind) if _has_value(item[key]))


def _kind(turn: RawRecord) -> str:
    role = turn.get("role") or turn.get("from")
    if role is None:
        return "exchange"
    if ROLE_ALIASES.get(str(role).lower()) == "tool":
        return "tool"
    return "from" if turn.get("role") is None and turn.get("content") is None else "role"


def _has_value(item: object) -> bool:
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
    read = {*own, *templated, *_ALSO.get(schema, ()), *MEDIA_COLUMNS, *MEDIA_ALIASES, *refused}
    return tuple(name for name in columns if name not in read and name not in IRRELEVANT)
