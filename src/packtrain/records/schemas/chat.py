"""Chats -> messages: `messages` with typed parts or strings, ShareGPT/LLaVA `conversations`, nanoVLM `texts`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from packtrain.core.errors import RecordError
from packtrain.core.values import Media, MediaKind, Message, Part, Text, TokenIds
from packtrain.records.schemas.recognise import GROUNDING, INTO_TEXTS, LOSS_FLAGS
from packtrain.records.schemas.references import KINDS, MediaPool, from_base64, make_ref, read_limits
from packtrain.records.schemas.tools import EXTRA_KEYS, checked_text, read_extras, unfold
from packtrain.records.source import RawRecord

ROLE_ALIASES: Mapping[str, str] = {
    **{role: role for role in ("user", "assistant", "system", "tool")},
    **{"human": "user", "developer": "system"},
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model"), "assistant"),
    **dict.fromkeys(("observation", "tool_response", "function", "ipython"), "tool"),
}
# Fields of a message that would change what the model is to learn; leaving them out silently would train another text.
_REFUSED_FIELDS: Mapping[str, str] = {
    "prefix": "prefix in a message is not supported",
    "train_detail": "loss on a part of a message is not supported",
}
# Where a typed part may keep its reference, first match first.
_SHARED_FIELDS = ("bytes", "url", "path", "base64", "value", "source")
PART_FIELDS: Mapping[str, tuple[MediaKind, tuple[str, ...]]] = {
    **{kind: (kind, (kind, f"{kind}_url", *_SHARED_FIELDS)) for kind in KINDS},
    **{f"{kind}_url": (kind, (f"{kind}_url", kind, *_SHARED_FIELDS)) for kind in KINDS},
    "input_audio": ("audio", ("input_audio",)),
}
MESSAGE_KEYS = frozenset((*EXTRA_KEYS, *LOSS_FLAGS, *_REFUSED_FIELDS))  # of a message, beside who says what
_MARKER = re.compile("<(image|video|audio)>")
_LEFT = re.compile("<(?:image|bbox|ref-object)>")  # markers that nothing has filled


class ConvertedRecord(NamedTuple):
    """The result of a schema, before it has an id and an origin."""

    messages: tuple[Message, ...]
    plain: bool = False
    objects: int = 0
    tokens: TokenIds | None = None
    how: str = ""  # what was made of it, where more than one thing could be
    tools: tuple[Any, ...] = ()  # tool definitions that messages contained


def messages_schema(value: RawRecord, pool: MediaPool | None) -> ConvertedRecord:
    """`messages`: typed parts, or strings with markers."""
    return _chat(value["messages"], pool)


def conversations_schema(value: RawRecord, pool: MediaPool | None) -> ConvertedRecord:
    """ShareGPT and LLaVA: `conversations` of from/value."""
    items = value.get("conversations")
    if items is None:
        items = value.get("conversation")
    return _chat(items, pool)


def _chat(items: object, pool: MediaPool | None) -> ConvertedRecord:
    turns, tools = unfold(as_list(items, "messages"))
    return ConvertedRecord(read_messages(turns, pool), tools=tuple(tools))


def texts_schema(value: RawRecord, pool: MediaPool | None) -> ConvertedRecord:
    """nanoVLM: `texts` of {user, assistant}; the images go before the first user text."""
    turns = as_list(value["texts"], "texts")
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise RecordError("schema", "a message is not an object", f"texts: {type(turn).__name__}")
        if turn.get("user") is None or turn.get("assistant") is None:
            raise RecordError("schema", "a turn needs user and assistant", f"keys {list(turn)[:5]!a}")
    return _chat(turns, pool)


def as_list(items: object, name: str) -> list[Any] | tuple[Any, ...]:
    """A list of the record, or the error that it is none."""
    if not isinstance(items, list | tuple):
        raise RecordError("schema", "a column has the wrong type", f"{name}: {type(items).__name__}, not a list")
    return items


def read_messages(items: object, pool: MediaPool | None) -> tuple[Message, ...]:
    """The turns of a conversation with their media put in place."""
    turns = as_list(items, "messages")
    if not turns:
        raise RecordError("schema", "no messages")
    if pool is None:
        return tuple([_read_message(turn, None, None) for turn in turns])
    markers = _meaning_of_markers(turns, pool)
    messages = [_read_message(turn, pool, markers) for turn in turns]
    if not any(pool.asked.values()) and pool.left() and all(_has_string_content(turn) for turn in turns):
        messages = _put_first(messages, pool.take_rest())
    pool.close()
    return tuple(messages)


def _read_message(turn: object, pool: MediaPool | None, markers: Mapping[str, MediaKind] | None) -> Message:
    if not isinstance(turn, dict) and not isinstance(turn, Mapping):
        raise RecordError("schema", "a message is not an object", type(turn).__name__)
    role, content = turn.get("role"), turn.get("content")
    if role is None and content is None:
        role, content = turn.get("from"), turn.get("value")
    if not isinstance(role, str):
        raise RecordError("schema", "a message has no role", f"{_short(role)}")
    canonical = ROLE_ALIASES.get(role) or ROLE_ALIASES.get(role.lower())
    if canonical is None:
        raise RecordError("schema", "unknown role", _short(role))
    plain = len(turn) == 2 and content is not None
    train = True if plain else _read_flags(turn)
    extras = None if plain else read_extras(turn, canonical)
    if isinstance(content, str):
        parts: tuple[Part, ...]
        if markers and "<" in content and pool is not None:
            parts = tuple(_split(content, markers, pool))
            if canonical == "assistant" and (marked := next((p for p in parts if isinstance(p, Media)), None)):
                raise RecordError("schema", f"{marked.kind} marker in an answer", "media there need typed parts")
        else:
            parts = (Text(checked_text(content)),)
    elif isinstance(content, list | tuple):
        parts = tuple(_read_parts(content, pool))
        train = _parts_carry_loss(content) and train
        if train and canonical == "assistant" and parts and extras is None and all(isinstance(p, Media) for p in parts):
            raise RecordError("schema", "an answer of media alone", "media there are never supervised")
    elif content is None:
        if canonical != "assistant" or extras is None:
            raise RecordError("schema", "a message has no content", canonical)
        parts = ()
    else:
        raise RecordError("schema", "content has the wrong type", f"{canonical}: {type(content).__name__}")
    return Message(role=canonical, parts=parts, train=train, extras=extras)


def _read_flags(turn: RawRecord) -> bool:
    """Whether the message may carry loss; refuses fields that cannot be represented."""
    for field, reason in _REFUSED_FIELDS.items():
        if turn.get(field):
            raise RecordError("schema", reason, field)
    return carries_loss(turn, LOSS_FLAGS, "message")


def carries_loss(item: RawRecord, flags: Iterable[str], whose: str) -> bool:
    """Whether flags of a message, a part or a record ask for loss; missing flags do not count."""
    train = True
    for field in flags:
        flag = item.get(field)
        if flag is None:
            continue
        if not isinstance(flag, int | float) or flag not in (0, 1):
            raise RecordError("schema", f"a {whose}'s train flag is not a boolean", f"{field}: {_short(flag)}")
        train = train and bool(flag) is LOSS_FLAGS[field]
    return train


def _parts_carry_loss(content: Iterable[str | RawRecord]) -> bool:
    """Whether a message's text parts carry loss; they must agree, as a message carries loss as a whole."""
    flags = set()
    for part in content:
        if isinstance(part, str):
            flags.add(True)
        elif part.get("type") in (None, "text"):
            if part.get("train_detail"):
                raise RecordError("schema", _REFUSED_FIELDS["train_detail"], "train_detail")
            flags.add(LOSS_FLAGS.keys().isdisjoint(part) or carries_loss(part, LOSS_FLAGS, "part"))
    if len(flags) > 1:
        raise RecordError("schema", _REFUSED_FIELDS["train_detail"], "text parts with different flags in one message")
    return False not in flags


def _split(text: str, markers: Mapping[str, MediaKind], pool: MediaPool) -> Iterable[Part]:
    """Text with markers -> texts and media in order; the text around a marker stays as it is."""
    start = 0
    for match in _MARKER.finditer(text):
        kind = markers.get(match[1])
        if kind is None:
            continue
        if match.start() > start:
            yield Text(checked_text(text[start : match.start()]))
        start = match.end()
        medium = pool.take(kind)
        if medium is not None:
            yield medium
    if start < len(text):
        yield Text(checked_text(text[start:]))


def _read_parts(content: Iterable[object], pool: MediaPool | None) -> Iterable[Part]:
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, Mapping):
            raise RecordError("schema", "a part of a message is not an object", type(part).__name__)
        name = part_type(part)
        if name == "text":
            text = part.get("text")
            text = part.get("value") if text is None else text
            if not isinstance(text, str):
                raise RecordError("schema", "a text part has no text", type(text).__name__)
            yield Text(checked_text(text))
        elif isinstance(name, str) and name in PART_FIELDS:
            medium = _read_media_part(part, name, pool)
            if medium is not None:
                yield medium
        else:
            raise RecordError("schema", "unknown part type", _short(name))


def part_type(part: RawRecord) -> Any:
    """The declared type of a part, else the one that its keys imply."""
    name = part.get("type")
    return next((key for key in ("text", *PART_FIELDS) if part.get(key) is not None), None) if name is None else name


def _read_media_part(part: RawRecord, name: str, pool: MediaPool | None) -> Media | None:
    kind, fields = PART_FIELDS[name]
    limits = read_limits(part, kind)
    for field in fields:
        item = part.get(field)
        if item is None:
            continue
        if field == "base64" and isinstance(item, str) and not item.startswith("data:"):
            return Media(kind, from_base64(item, name=f"inline {kind}"), limits)
        return Media(kind, pool.resolve(kind, item) if pool is not None else make_ref(kind, item), limits)
    if pool is None:
        raise RecordError("schema", f"more {kind} markers than {kind}s", f"a {kind} part without a reference")
    medium = pool.take(kind)
    return medium if medium is None or limits is None else replace(medium, limits=limits)


def _meaning_of_markers(turns: Iterable[object], pool: MediaPool) -> Mapping[str, MediaKind]:
    """The markers that mean media: `<image>`, and those of kinds that the record has, since `<video>` is HTML, too.

    Video datasets in LLaVA's format often write `<image>` where the video goes.
    """
    markers: dict[str, MediaKind] = {kind: kind for kind in pool.given}
    if "image" not in markers:
        markers["image"] = "image"
        if "video" in markers and not any("<video>" in text for text in _strings(turns)):
            markers["image"] = "video"
    return markers


def _strings(turns: Iterable[object]) -> Iterable[str]:
    for turn in turns:
        if isinstance(turn, Mapping):
            for content in (turn.get("content"), turn.get("value")):
                if isinstance(content, str):
                    yield content


def refuse_markers(messages: Sequence[Message]) -> None:
    """No text may ask for what is not there: a picture in a column that nothing reads, or places of objects."""
    for message in messages:
        for part in message.parts:
            if isinstance(part, Text) and "<" in part.text and (left := _LEFT.findall(part.text)):
                if left[0] != "<image>":
                    raise RecordError("schema", GROUNDING, f"{left[0]} in a text: {INTO_TEXTS}")
                beside = sum(isinstance(one, Media) for other in messages for one in other.parts)
                more = ", which are separate parts" if beside else ""
                raise RecordError(
                    "schema", "more image markers than images", f"{left.count('<image>') + beside} for {beside}{more}"
                )


def _has_string_content(turn: RawRecord) -> bool:
    return isinstance(turn.get("content"), str) or isinstance(turn.get("value"), str)


def _put_first(messages: list[Message], media: list[Media]) -> list[Message]:
    """Media without markers go before the first user text, as in LLaVA and nanoVLM."""
    for position, message in enumerate(messages):
        if message.role == "user":
            first = replace(message, parts=(*media, *message.parts))
            return [*messages[:position], first, *messages[position + 1 :]]
    raise RecordError("schema", "media without a user message", f"{len(media)} media")


def _short(value: object) -> str:
    return ascii(value)[:60]
