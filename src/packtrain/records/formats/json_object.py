"""One JSON object out of bytes that nobody has checked: every fault is a RecordError, none depends on the caller."""

from __future__ import annotations

import json
import zlib
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.records.source import Entry

LONGEST = 64 << 20  # bytes of one object; more is a broken file rather than a record
DEEPEST = 200  # the interpreter's own limit depends on who calls, so that results would differ between workers

TOO_LONG = "record is too long"
NOT_UTF8 = "text is not UTF-8"
NOT_JSON = "not valid JSON"
NOT_OBJECT = "not a JSON object"
PACKED = "a list of records instead of one"
TOO_DEEP = "JSON is nested too deeply"
LONE_SURROGATE = "text holds half a character"

_OF_TURNS = ("role", "from")
BOM = b"\xef\xbb\xbf"


def parse_object(raw: bytes | str) -> dict[str, object]:
    """The object that `raw` holds; a list of turns is a chat without anything else.

    NaN, Infinity and repeated keys are accepted as Python's json does.
    """
    try:
        text = raw if isinstance(raw, str) else str(raw.removeprefix(BOM), "utf-8")
    except UnicodeDecodeError as error:
        raise RecordError("read", NOT_UTF8, f"byte {error.start + 1} is {raw[error.start]:#04x}") from error  # type: ignore[str-bytes-safe]
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise RecordError("read", TOO_DEEP, f"more than {DEEPEST} levels") from error
    except json.JSONDecodeError as error:
        raise RecordError("read", NOT_JSON, f"{error.msg} at character {error.pos + 1}") from error
    except ValueError as error:  # a whole number of more than 4,300 digits
        raise RecordError("read", NOT_JSON, str(error)) from error
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        if not all(any(key in one for key in _OF_TURNS) for one in value):
            detail = f"{len(value)} of them: write each as its own record; packtrain packs them"
            raise RecordError("read", PACKED, detail)
        value = {"messages": value}
    if not isinstance(value, dict):
        raise RecordError("read", NOT_OBJECT, f"a value of type {type(value).__name__}")
    if text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        raise RecordError("read", TOO_DEEP, f"more than {DEEPEST} levels")
    if "\\ud" in text or "\\uD" in text:
        _refuse_lone_surrogates(value)
    return value


def json_entry(origin: str, at: int, raw: bytes | str | RecordError) -> Entry:
    """The text of an object, or the fault in its place, as an entry."""
    if isinstance(raw, RecordError):
        return Entry(origin=origin, error=raw, at=at)
    check = zlib.crc32(raw.encode() if isinstance(raw, str) else raw)
    try:
        return Entry(origin=origin, value=parse_object(raw), at=at, check=check)
    except RecordError as error:
        return Entry(origin=origin, error=error, at=at, check=check)


def size_of(item: tuple[int, bytes | str | RecordError]) -> int:
    """About how many bytes a place and the text that stands there take."""
    return 0 if isinstance(item[1], RecordError) else len(item[1])


def _depth(value: Any) -> int:
    """How many containers stand inside each other; without recursion, for that is what this guards against."""
    level, depth = [value], 0
    while level:
        depth += 1
        inner: list[Any] = []
        for container in level:
            members = container.values() if isinstance(container, dict) else container
            inner.extend(member for member in members if isinstance(member, dict | list))
        level = inner
    return depth


def _refuse_lone_surrogates(value: dict[str, object]) -> None:
    """JSON can write half a character, which no tokenizer and no file takes: say so here, where it is."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RecordError("read", LONE_SURROGATE, "an unpaired \\ud800-\\udfff escape") from error
