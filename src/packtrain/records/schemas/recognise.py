"""Which schema a record has, told by its columns."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from packtrain.core.errors import RecordError, nearest
from packtrain.core.values import MediaKind
from packtrain.records.source import RawRecord

# The columns that make a schema, in the order in which schemas are tried; each line is one sufficient set.
# `alpaca` is never told by them, only asked for by name.
SCHEMA_COLUMNS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "tokens": (("input_ids",),),
    "messages": (("messages",),),
    "conversations": (("conversations",), ("conversation",)),
    "texts": (("texts",),),
    "prompt_completion": (("prompt", "completion"),),
    "instruction": (("instruction", "output"),),
    "alpaca": (("instruction", "output"),),
    "question_answer": (("question", "answer"),),
    "objects": (("images", "objects"), ("image", "objects")),
    "text": (("text",), ("caption",)),
}
TURNS = ("messages", "conversations", "conversation", "prompt", "completion")  # columns that may hold turns
MEDIA_COLUMNS: Mapping[str, MediaKind] = {
    **{"images": "image", "image": "image"},
    **{"videos": "video", "video": "video"},
    **{"audios": "audio", "audio": "audio"},
}
# Other names of the same, read where the record has no medium of that kind otherwise.
MEDIA_ALIASES: Mapping[str, MediaKind] = {
    **dict.fromkeys(("image_path", "image_paths", "image_file", "image_files", "image_url", "image_urls"), "image"),
    **dict.fromkeys(("img", "imgs", "img_path", "img_paths"), "image"),
    **dict.fromkeys(("video_path", "video_paths", "video_file", "video_files", "video_url", "video_urls"), "video"),
    **dict.fromkeys(("audio_path", "audio_paths", "audio_file", "audio_files", "audio_url", "audio_urls"), "audio"),
}  # type: ignore[dict-item]
ID_COLUMNS = ("id", "sample_id", "uid", "__key__")
# Beside `input_ids`: 1 for each token that carries loss.
LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask")
OTHER_COLUMNS = ("system", "input", "history", "width", "height", "weight", "labels", *LOSS_MASKS, *ID_COLUMNS)
GROUNDING = "grounding objects are not supported"
INTO_TEXTS = "write them into the text, for example with --formatting-func"
OWN_FUNCTION = "convert it to messages with your own function: --formatting-func module:function"
# How others say whether a record, a message, or a part of one, carries loss: the name, and whether 1 says that it does.
# Of a record only where it is a number: `mask` may be a picture, `train` a split.
LOSS_FLAGS: Mapping[str, bool] = {
    **dict.fromkeys(("train", "training", "trainable", "loss", "loss_weight", "loss_scale", "weight"), True),
    "mask": False,
}
_PREFERENCES = "preference data are not supported"
_QUESTION = "a column that belongs to the question is not read"
_PAIRS = ("prompt_completion", "instruction", "alpaca", "question_answer")
# Filled columns that change which text is supervised: why they are refused, and in which schemas (none: in all).
REFUSED_COLUMNS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    **dict.fromkeys(("rejected", "rejected_response", "rejected_messages", "chosen"), (_PREFERENCES, ())),
    "non_preferred_output": (_PREFERENCES, ()),
    **dict.fromkeys(("options", "choices", "context"), (_QUESTION, _PAIRS)),
}
# Names that others give to columns, by the one here that is most alike.
_ALIKE: Mapping[str, tuple[str, ...]] = {
    "messages": ("dialogue", "dialog", "chat", "turns"),
    "question": ("query", "prompt", "instruction", "problem", "input", "user", "article", "document", "dialogue", "q"),
    "answer": (
        *("answers", "response", "output", "completion", "reply", "solution", "target", "assistant", "summary"),
        *("highlights", "label", "a"),
    ),
    "input": ("context",),
    "caption": ("captions",),
    "system": ("system_prompt", "system_message"),
}
_KEEP = "this is supervised fine-tuning: keep the preferred rows, with the answer as completion"
_FLAG = re.compile(r"\s*(true|false|yes|no|[0-9.]+)\s*", re.IGNORECASE)
_LABELLED = ("prompt_completion", "messages", "conversations")  # whose `label` is KTO's, where it is true or false


class ColumnLayout(NamedTuple):
    """Facts that follow from a record's column names alone; cached because most records share them."""

    schemas: tuple[tuple[str, tuple[str, ...]], ...]  # candidates with the columns each would use
    media: tuple[tuple[str, MediaKind], ...]  # aliases last
    id_column: str | None
    flags: tuple[str, ...]  # columns of LOSS_FLAGS
    refused: tuple[str, ...]  # columns that may be a reason to refuse it


def known_columns() -> tuple[str, ...]:
    """Every column name that some schema reads."""
    names = [name for sets in SCHEMA_COLUMNS.values() for columns in sets for name in columns]
    return tuple(dict.fromkeys([*names, *MEDIA_COLUMNS, *OTHER_COLUMNS]))


def column_layout(value: RawRecord) -> ColumnLayout:
    """The layout for a record's set of columns."""
    return _layout(tuple(value))


@functools.lru_cache(maxsize=1024)  # datasets have a handful of shapes; junk must not grow the cache without end
def _layout(names: tuple[str, ...]) -> ColumnLayout:
    return ColumnLayout(
        schemas=tuple(
            (name, columns)
            for name, sets in SCHEMA_COLUMNS.items()
            for columns in sets
            if all(column in names for column in columns)
        ),
        media=tuple((name, kind) for name, kind in {**MEDIA_COLUMNS, **MEDIA_ALIASES}.items() if name in names),
        id_column=next((column for column in ID_COLUMNS if column in names), None),
        flags=tuple(name for name in LOSS_FLAGS if name in names),
        refused=tuple(name for name in (*REFUSED_COLUMNS, "label", "objects") if name in names),
    )


def refuse_columns(layout: ColumnLayout, value: RawRecord, schema: str | None) -> None:
    """Refuse what would be read as something else; `schema` is None before one is chosen."""
    for column in layout.refused:
        item = value[column]
        if column == "label":
            if str(item) in ("True", "False", "true", "false") and schema in _LABELLED:
                raise RecordError("schema", _PREFERENCES, f"column label is {item}, as in KTO; {_KEEP}")
        elif column == "objects":
            if schema not in (None, "objects") and _is_grounding(item):
                raise RecordError("schema", GROUNDING, "objects of ref and bbox: " + INTO_TEXTS)
        elif item:
            reason, schemas = REFUSED_COLUMNS[column]
            if schema in schemas or not schemas:
                ways = {_PREFERENCES: _KEEP, _QUESTION: looks_like(value) or f"{OWN_FUNCTION}, with it in the question"}
                raise RecordError("schema", reason, f"column {column}; {ways[reason]}")


def _is_grounding(item: Any) -> bool:
    """Places of objects, as ms-swift keeps them: {ref, bbox}, earlier a list of {caption, bbox}; also as JSON."""
    if isinstance(item, str):
        return '"bbox"' in item or '"ref"' in item
    items = item if isinstance(item, list | tuple) else (item,)
    return any(isinstance(one, Mapping) and ("ref" in one or "bbox" in one) for one in items)


def is_flag(item: Any) -> bool:
    """Could it say whether, or how much, something is supervised: a number, yes or no, a list or a text of such?"""
    if isinstance(item, list | tuple):
        return bool(item) and all(isinstance(one, int | float) for one in item)
    return isinstance(item, int | float) or (isinstance(item, str) and _FLAG.fullmatch(item) is not None)


def choose_schema(layout: ColumnLayout, value: RawRecord) -> str:
    """The first candidate whose columns are filled; tables give every record all columns, many of them None."""
    for name, columns in layout.schemas:
        for column in columns:
            if value[column] is None:
                break
        else:
            return name
    if isinstance(value.get("prompt"), str | list) and value["prompt"] and not looks_like(value):
        raise RecordError("schema", "a prompt without a completion", "no tokens would carry loss")
    raise _unknown(value)


def recognise_schema(value: RawRecord) -> str:
    """The name of a record's schema, a key of SCHEMAS.

    >>> recognise_schema({"id": 1, "prompt": "2+2?", "completion": "4"})
    'prompt_completion'
    """
    return choose_schema(column_layout(value), value)


def _unknown(value: RawRecord) -> RecordError:
    filled = [str(name) for name, item in value.items() if item is not None]
    known = [name for name in known_columns() if name not in filled]
    hints = [hint for name in filled[:20] if name not in known_columns() and (hint := nearest(name, known))]
    detail = f"columns {', '.join(filled)[:200]!a}" if filled else "no filled column"
    hint = looks_like(value) or "; ".join([*hints[:1], OWN_FUNCTION])
    return RecordError("schema", "unknown schema", "; ".join(filter(None, (detail, hint))))


def looks_like(value: RawRecord) -> str:
    """Suggest which renamed columns, or places in them, would make it match a schema.

    >>> looks_like({"query": "2+2?", "Response": "4"})
    'looks like: --columns query=question,Response=answer'
    >>> looks_like({"question": "Who?", "context": "...", "answers": {"text": ["She.", "her"]}})
    'looks like: --columns question=instruction,context=input,answers.text.0=output'
    """
    texts = {name.lower(): place for name in value if isinstance(name, str) and (place := _text_in(name, value[name]))}
    chats = {name.lower(): name for name, item in value.items() if isinstance(item, list) and isinstance(name, str)}
    plain = {name: place for name, place in texts.items() if not place.endswith(".0")}  # columns of a whole table, else
    places = {
        ours: names[like]
        for ours, alike in _ALIKE.items()
        for names in [{"messages": chats, "answer": texts, "caption": texts}.get(ours, plain)]
        if (like := next((name for name in (ours, *alike) if name in names), None)) is not None
    }
    if "cls" in texts and not texts.keys() & {"text", "caption"}:
        return f"looks like: --columns {texts['cls']}=text, which trains on the class name as written"
    asked = "options" not in value and "choices" not in value
    if "messages" in places:
        wanted = {"messages": "messages", "system": "system"}
    elif "question" in places and "answer" in places and asked:
        wanted = {"question": "question", "answer": "answer", "system": "system"}
        if places.get("input", places["question"]) != places["question"]:
            wanted = {"question": "instruction", "input": "input", "answer": "output", "system": "system"}
    else:
        wanted = {"caption": "caption"}
    pairs = [f"{places[kind]}={ours}" for kind, ours in wanted.items() if places.get(kind, ours) != ours]
    return f"looks like: --columns {','.join(pairs)}" if pairs else ""


def _text_in(name: str, item: Any) -> str:
    """The place of a column's text: itself, the first of a list, or `text` of an object."""
    if isinstance(item, Mapping):
        return _text_in(f"{name}.text", item.get("text"))
    if isinstance(item, list | tuple):
        return f"{name}.0" if item and all(isinstance(one, str) for one in item) else ""
    return name if isinstance(item, str) else ""
