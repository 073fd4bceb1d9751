"""Every schema says the same thing in its own words, and nothing but RecordError comes out of junk."""

from __future__ import annotations

import base64
import itertools
import json
import sys
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.user_code import from_anywhere
from packtrain.core.values import ROLES, Media, MediaRef, Message, PartLimits, Record, Text, TokenIds
from packtrain.records.schemas import SCHEMAS, SchemaOptions, load_formatting, recognise_schema, to_record
from packtrain.records.schemas.recognise import SCHEMA_COLUMNS
from packtrain.records.schemas.unread import UnreadNames, unread_items
from packtrain.records.source import Entry

DEFAULT = SchemaOptions()


def convert(value: Any, media: dict[str, MediaRef] | None = None, **options: Any) -> Record:
    entry = Entry(origin="data.jsonl:7", value=value, media=media or {})
    options_ = SchemaOptions(**options) if options else DEFAULT
    return to_record(entry, source="mine", options=options_, unread=UnreadNames())


def reason(value: Any, **options: Any) -> str:
    with pytest.raises(RecordError) as caught:
        convert(value, **options)
    assert caught.value.stage in ("schema", "media", "formatting", "loss")
    return caught.value.reason


def shape(record: Record) -> list[tuple[str, list[str]]]:
    """Roles with texts and names of media, for reading."""
    return [
        (m.role, [p.text if isinstance(p, Text) else f"{p.kind}:{p.ref.name}" for p in m.parts])
        for m in record.messages
    ]


def unread_names(value: dict[str, Any], schema: str | None = None) -> list[str]:
    return list(dict(unread_items(value, schema or recognise_schema(value))))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def flagged(*flags: dict[str, Any]) -> dict[str, Any]:
    """An answer of one text part for each of the flags."""
    return {"role": "assistant", "content": [{"type": "text", "text": "x", **flag} for flag in flags]}


# --- tools

FUNCTION = {"name": "weather", "description": "Now.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
WEATHER = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}
CALL_TEXT = json.dumps(WEATHER)
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
USE = {"type": "tool_use", "id": "c1", "name": "weather", "input": WEATHER["arguments"]}
NOT_THE_ASSISTANTS = "tool calls or reasoning of a role that is not the assistant's"
NOT_ONE_VALUE = "a value in chat_template_kwargs is not one text, number or flag"
TWO_KINDS = "two kinds of tool calls or reasoning in one message"
NO_VARIABLE = "a name in chat_template_kwargs is not a variable's"


def called(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **more}


def answer_of(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(parts)}


# --- the same conversation in every schema ------------------------------------------------------------------

words = st.text(alphabet=st.characters(exclude_categories=("Cs",), exclude_characters="<>"), min_size=1, max_size=20)
pictures = st.lists(st.from_regex(r"[a-z]{1,8}\.jpg", fullmatch=True), max_size=3)


@st.composite
def chats(draw: st.DrawFn) -> tuple[list[tuple[str, str]], list[str]]:
    """Exchanges of (question, answer) and the images that stand before the first question."""
    return draw(st.lists(st.tuples(words, words), min_size=1, max_size=3)), draw(pictures)


@given(chats())
@settings(max_examples=100, deadline=None)
def test_one_conversation_is_one_record_in_every_schema(chat: tuple[list[tuple[str, str]], list[str]]) -> None:
    exchanges, images = chat
    turns = [(role, text) for pair in exchanges for role, text in zip(("user", "assistant"), pair, strict=True)]
    typed = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]
    by_reference = [{"type": "image", "image": name} for name in images]
    by_url = [{"type": "image_url", "image_url": {"url": name}} for name in images]
    bare = [{"type": "image"} for _ in images]

    def opened(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [*parts, *typed[0]["content"]]}, *typed[1:]]

    marked = [
        {"from": {"user": "human", "assistant": "gpt"}[role], "value": "<image>" * len(images) * (i == 0) + text}
        for i, (role, text) in enumerate(turns)
    ]
    strings = [{"role": role, "content": text} for role, text in turns]
    forms: dict[str, dict[str, Any]] = {
        "typed": {"messages": opened(by_reference)},
        "url": {"messages": opened(by_url)},
        "bare": {"messages": opened(bare), "images": images},
        "strings": {"messages": strings, "images": images},
        "markers": {"conversations": marked, "images": images},
        "unmarked": {"conversations": strings, "image": images},
        "texts": {"texts": [{"user": q, "assistant": a} for q, a in exchanges], "images": images},
        "history": {
            "instruction": exchanges[-1][0],
            "output": exchanges[-1][1],
            "history": [list(pair) for pair in exchanges[:-1]],
            "images": images,
        },
    }
    if len(exchanges) == 1:
        question, answer = exchanges[0]
        if images:  # without any they are plain text
            forms["prompt"] = {"prompt": question, "completion": answer, "images": images}
        forms["prompt list"] = {"prompt": strings[:1], "completion": strings[1:], "images": images}
        forms["question"] = {"question": question, "answer": answer, "images": images}
        forms["alpaca"] = {"instruction": question, "input": "", "output": answer, "images": images}
    records = {name: convert(value) for name, value in forms.items()}
    first = records["typed"]
    assert [m.role for m in first.messages] == [role for role, _ in turns]
    assert [medium.ref.path for medium in first.media()] == images
    for name, record in records.items():
        assert record == first, name


@given(st.lists(st.sampled_from(["<image>", "<video>", "some text", "\n"]), max_size=8), st.integers(0, 4))
@settings(max_examples=150, deadline=None)
def test_markers_and_images_must_agree(pieces: list[str], images: int) -> None:
    text = "".join(pieces)
    markers = pieces.count("<image>")
    value = {"conversations": user(text), "images": [f"{i}.png" for i in range(images)]}
    if markers == images or markers == 0:
        record = convert(value)
        assert [medium.ref.name for medium in record.media()] == value["images"]
        whole = "".join("<image>" if isinstance(p, Media) else p.text for p in record.messages[0].parts)
        assert whole == ("<image>" * images if markers == 0 else "") + text
    else:
        with pytest.raises(RecordError) as caught:
            convert(value)
        expected = "more image markers than images" if markers > images else "fewer image markers than images"
        assert (caught.value.reason, caught.value.detail) == (expected, f"{markers} for {images}")


# --- junk ----------------------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
field_names = ["role", "content", "from", "value", "type", "text", "image", "image_url", "url", "train", "desc", "poly"]
field_names += ["bbox_2d", "user", "assistant", "bytes", "path", "tool_calls", "function", "name", "arguments", "human"]
field_names += ["tool_use_id", "source", "thinking"]
field_values = st.sampled_from(
    [
        "user",
        "gpt",
        "text",
        "image",
        "<image>",
        "a.jpg",
        "data:,",
        "\ud800",
        "tool_call",
        "tool_use",
        "tool_result",
        "{}",
    ]
)
near_misses = st.recursive(
    json_values | field_values,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(field_names), inner, max_size=4),
    max_leaves=12,
)
column_names = sorted({c for sets in SCHEMA_COLUMNS.values() for columns in sets for c in columns})
column_names += [
    "tools",
    "functions",
    "chat_template_kwargs",
    "images",
    "image",
    "videos",
    "audio",
    "id",
    "system",
    "history",
    "input",
    "width",
]
junk_records = st.dictionaries(st.sampled_from(column_names), near_misses, max_size=5)


@pytest.mark.parametrize("examples", [300, pytest.param(1200, marks=pytest.mark.full)])
def test_junk_never_raises_anything_but_record_error(examples: int) -> None:
    junk = junk_records | st.dictionaries(st.text(max_size=5), json_values, max_size=4) | json_values
    settings(max_examples=examples, deadline=None)(given(junk)(require_record_or_reason))()


def require_record_or_reason(value: Any) -> None:
    outcome = outcome_of(value)
    if isinstance(outcome, RecordError):
        fixed = outcome.reason.replace("base64", "").replace("bbox_2d", "").replace("'s", "")
        assert fixed
        assert not any(c.isdigit() or c in "'\"{[" for c in fixed), "reasons are counted, so they hold no variable data"
    else:
        assert outcome.messages or outcome.tokens is not None, "neither a conversation nor ids"
        assert all(m.role in ROLES for m in outcome.messages)
        str(outcome.messages).encode()
        outcome.id.encode()


def outcome_of(value: Any) -> Record | RecordError:
    try:
        return convert(value)
    except RecordError as error:
        return error


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"messages": []}, "no messages"),
        ({"prompt": [], "completion": "x"}, "no messages"),
        ({"messages": "hello"}, "a column has the wrong type"),
        ({"messages": [5]}, "a message is not an object"),
        ({"messages": user(5)}, "content has the wrong type"),
        ({"messages": [{"role": "user"}]}, "a message has no content"),
        ({"messages": [{"content": "x"}]}, "a message has no role"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role"),
        ({"messages": user([{"type": "hologram"}])}, "unknown part type"),
        ({"messages": user([{"type": "text", "text": 3}])}, "a text part has no text"),
        ({"messages": user([3])}, "a part of a message is not an object"),
        ({"messages": user("x"), "images": {"a": 1}}, "a media reference has the wrong type"),
        ({"messages": user("x"), "images": [5]}, "a media reference has the wrong type"),
        ({"messages": user("x"), "images": [""]}, "a media reference is empty"),
        ({"messages": user("x"), "image": "a.jpg", "images": ["b.jpg"]}, "two columns for the same kind of media"),
        ({"messages": user([{"type": "image"}])}, "more image markers than images"),
        ({"messages": user([{"type": "text", "text": "x"}]), "images": ["a"]}, "fewer image markers than images"),
        (
            {"messages": user([{"type": "video", "video": ["1.png", "2.png"]}])},
            "a video given as a list of frames is not supported",
        ),
        ({"messages": user("x"), "videos": [["1.png", "2.png"]]}, "a video given as a list of frames is not supported"),
        ({"conversations": user("<image>x")}, "more image markers than images"),
        ({"messages": [{"role": "assistant", "content": "x"}], "images": ["a"]}, "media without a user message"),
        ({"messages": user("\ud800")}, "text is not valid Unicode"),
        ({"messages": [{**answer(""), "tool_calls": [{}]}]}, "a tool call has no name"),
        ({"messages": [{**answer(""), "tool_calls": [5]}]}, "a tool call is not an object"),
        (
            {"messages": [{**answer("x"), "tool_calls": True}, {"role": "tool_call", "content": json.dumps(WEATHER)}]},
            "a tool call is not an object",
        ),
        ({"messages": [called({"name": "f", "arguments": "[1]"})]}, "a tool call's arguments are not an object"),
        ({"messages": [called({"name": "f", "arguments": "x=1"})]}, "a tool call's arguments are not JSON"),
        ({"messages": [called({"name": "f", "arguments": {"a": b"1"}})]}, "a tool's values are not JSON"),
        ({"messages": [called({"name": "f", "arguments": {"a": "\ud800"}})]}, "text is not valid Unicode"),
        ({"messages": [{**called(WEATHER), "function_call": WEATHER}]}, TWO_KINDS),
        ({"messages": [{"role": "tool_call", "content": "f(1)"}]}, "a tool call is not JSON"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [WEATHER]}]}, NOT_THE_ASSISTANTS),
        ({"messages": [{"role": "system", "content": "x", "reasoning": "y"}]}, NOT_THE_ASSISTANTS),
        ({"messages": [{**answer("x"), "reasoning": "y", "thinking": "z"}]}, TWO_KINDS),
        ({"messages": [{**answer("x"), "thinking": True}]}, "a field of a message is not text"),
        ({"messages": [answer_of(THOUGHT, {"text": "x"}, THOUGHT)]}, "reasoning after the answer has started"),
        ({"messages": [answer_of(USE, {"text": "x"})]}, "a part after a tool call"),
        ({"messages": [{**answer_of(THOUGHT), "reasoning_content": "z"}]}, TWO_KINDS),
        ({"messages": [{**answer_of(USE), "tool_calls": [WEATHER]}]}, TWO_KINDS),
        ({"messages": [{"role": "tool_call", "content": CALL_TEXT, "tool_calls": [USE]}]}, TWO_KINDS),
        ({"messages": [answer_of({**USE, "weight": 0})]}, "loss on a part of a message is not supported"),
        (
            {"messages": [{**answer("x"), "loss": 0}, {"role": "tool_call", "content": json.dumps(WEATHER)}]},
            "loss on a part of a message is not supported",
        ),
        ({"messages": user("x"), "tools": "[{"}, "tool definitions are not JSON"),
        ({"messages": user("x"), "tools": "[" * 100_000}, "tool definitions are not JSON"),
        ({"messages": user("x"), "tools": '{"a": 1}'}, "tool definitions are not a list"),
        ({"messages": user("x"), "tools": [5]}, "a tool definition is not an object"),
        ({"messages": user([{"type": "tools", "tools": 5}])}, "tool definitions are not a list"),
        ({"messages": user("x"), "tools": [FUNCTION], "functions": [FUNCTION]}, "two columns of tool definitions"),
        ({"text": "x", "chat_template_kwargs": {"a": 1}}, "tools or chat_template_kwargs of plain text"),
        ({"messages": user("x"), "chat_template_kwargs": [1]}, "chat_template_kwargs are not a small object"),
        ({"messages": user("x"), "chat_template_kwargs": {"a": [1]}}, NOT_ONE_VALUE),
        ({"messages": user("x"), "chat_template_kwargs": {"a": "x" * 10_001}}, NOT_ONE_VALUE),
        *(
            ({"messages": user("x"), "chat_template_kwargs": {name: 1}}, NO_VARIABLE)
            for name in ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "_x", "a b", "")
        ),
        ({"messages": [{**answer("x"), "loss_scale": 2}]}, "a message's train flag is not a boolean"),
        ({"messages": [{**answer("x"), "train_detail": [{}]}]}, "loss on a part of a message is not supported"),
        ({"messages": [flagged({"train": False}, {})]}, "loss on a part of a message is not supported"),
        ({"messages": [flagged({"train_detail": [{}]})]}, "loss on a part of a message is not supported"),
        ({"messages": [flagged({"weight": 0.5})]}, "a part's train flag is not a boolean"),
        ({"messages": user("x"), "weight": 0}, "no supervised tokens"),
        ({"messages": user("x"), "weight": 0.5}, "a record's train flag is not a boolean"),
        ({"chosen": user("x"), "rejected": user("y")}, "preference data are not supported"),
        ({"conversations": user("x")[:1], "chosen": {}, "rejected": answer("y")}, "preference data are not supported"),
        ({"messages": user("x"), "rejected_response": "no"}, "preference data are not supported"),
        ({"prompt": "x", "completion": "y", "label": False}, "preference data are not supported"),
        ({"prompt": "x", "completion": "y", "label": "True"}, "preference data are not supported"),
        (
            {"input": {"messages": user("x")[:1]}, "non_preferred_output": [answer("y")]},
            "preference data are not supported",
        ),
        ({"messages": user("x"), "label": True}, "preference data are not supported"),
        ({"prompt": "x"}, "a prompt without a completion"),
        ({"messages": user("<image>x")}, "more image markers than images"),
        ({"prompt": "<image>x", "completion": "y"}, "more image markers than images"),
        ({"instruction": "<image>x", "output": "y", "image": ""}, "more image markers than images"),
        ({"text": "<image>x"}, "more image markers than images"),
        ({"texts": [{"user": "<image>x", "assistant": "y"}]}, "more image markers than images"),
        ({"question": "<image>x", "answer": "y"}, "more image markers than images"),
        ({"messages": user("x"), "system": "<image>"}, "more image markers than images"),
        ({"messages": user("x"), "system": "<image>", "images": ["a"]}, "more image markers than images"),
        ({"messages": user([{"type": "image", "image": "a"}, {"text": "<image>x"}])}, "more image markers than images"),
        ({"messages": [*user("x")[:1], answer_of({"type": "image", "image": "a"})]}, "an answer of media alone"),
        ({"messages": user("x"), "image_path": "a", "img": "b"}, "two columns for the same kind of media"),
        (
            {"messages": user("x"), "objects": {"ref": ["a"], "bbox": [[1, 2, 3, 4]]}},
            "grounding objects are not supported",
        ),
        ({"messages": user("x"), "objects": '{"bbox": [[1, 2, 3, 4]]}'}, "grounding objects are not supported"),
        ({"messages": user("x"), "objects": [{"caption": "a", "bbox": [1]}]}, "grounding objects are not supported"),
        ({"messages": user("<ref-object>"), "images": ["a"]}, "grounding objects are not supported"),
        ({"question": "x", "answer": "y", "options": ["a"]}, "a column that belongs to the question is not read"),
        ({"question": "x", "answer": "y", "context": "z"}, "a column that belongs to the question is not read"),
        ({"messages": [{**answer("x"), "prefix": True}]}, "prefix in a message is not supported"),
        ({"messages": [*user("x"), answer("Write <image>.")], "images": ["a"]}, "image marker in an answer"),
        ({"conversations": [*user("x"), answer("<image>")], "image": "a"}, "image marker in an answer"),
        (
            {"messages": [{"role": "user", "content": "x", "train": "no"}]},
            "a message's train flag is not a boolean",
        ),
        ({"texts": [{"user": "x"}]}, "a turn needs user and assistant"),
        ({"instruction": 1, "output": "x"}, "a column has the wrong type"),
        ({"text": ""}, "empty text"),
        ({"text": "<image> a cat", "image": "a.jpg"}, "markers in plain text are not supported"),
        ({"mesages": user("x")}, "unknown schema"),
        ({"messages": None, "text": None}, "unknown schema"),
        ({}, "unknown schema"),
        ([], "a record is not an object"),
    ],
)
def test_each_mistake_has_its_reason(value: Any, expected: str) -> None:
    assert reason(value) == expected


def test_an_unknown_column_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(RecordError, match="did you mean 'messages'"):
        convert({"mesages": user("x")})


# --- references ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://host/a.jpg?key=secret", "https://me:pw@host/a.jpg", "s3://host/a.jpg"])
def test_remote_media_are_refused_by_host_alone(url: str) -> None:
    with pytest.raises(RecordError) as caught:
        convert({"messages": user([{"type": "image_url", "image_url": {"url": url}}])})
    assert (caught.value.stage, caught.value.reason) == ("media", "remote media are not fetched")
    assert caught.value.detail.endswith("://host")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "data:image/png;base64," + base64.b64encode(b"PNG!").decode()},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(b"PNG!").decode()}},
        {"type": "image", "base64": base64.b64encode(b"PNG!").decode()},
        {"type": "image", "image": b"PNG!"},
        {"type": "image", "image": {"bytes": b"PNG!", "path": "a.png"}},
        {"image": {"bytes": b"PNG!"}},
    ],
)
def test_bytes_arrive_however_they_are_written(part: dict[str, Any]) -> None:
    assert [medium.ref.data for medium in convert({"messages": user([part])}).media()] == [b"PNG!"]


def test_input_audio_is_base64() -> None:
    part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}}
    (medium,) = convert({"messages": user([part])}).media()
    assert (medium.kind, medium.ref.data) == ("audio", b"RIFF")


@pytest.mark.parametrize("body", ["%%%%", "abc", "YWJj\nYWJj"])
def test_broken_base64_is_refused(body: str) -> None:
    assert reason({"messages": user("x"), "image": f"data:image/png;base64,{body}"}) == "broken base64"


def test_inline_media_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.records.schemas.references.MAX_INLINE_BYTES", 30)
    assert convert({"messages": user("x"), "image": b"1" * 30}).messages
    assert reason({"messages": user("x"), "image": b"1" * 31}) == "inline media too large"
    long = base64.b64encode(b"1" * 60).decode()
    assert reason({"messages": user("x"), "image": f"data:image/png;base64,{long}"}) == "inline media too large"
    assert reason({"messages": user("x"), "image": "data:image/svg+xml,<svg/>"}) == "a data URL is not base64"


def test_a_path_without_bytes_is_a_path() -> None:
    (medium,) = convert({"messages": user("x"), "image": {"bytes": None, "path": "a.png"}}).media()
    assert medium.ref == MediaRef(name="a.png", path="a.png")


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_markers_of_videos_and_sounds_count_only_where_the_record_has_such(column: str) -> None:
    html = "<video> and <audio> are tags"
    assert shape(convert({column: user(html)}))[0] == ("user", [html])
    assert shape(convert({column: user(html), "videos": ["a.mp4"]}))[0] == (
        "user",
        ["video:a.mp4", " and <audio> are tags"],
    )


@pytest.mark.parametrize("columns", [{}, {"images": []}, {"image": ""}, {"image": None}])
def test_for_a_model_of_text_alone_an_image_marker_is_text(columns: dict[str, Any]) -> None:
    value = {"messages": user("<image> is a tag"), **columns}
    entry = Entry(origin="x", value=value)
    record = to_record(entry, source="s", options=DEFAULT, text_only=True)
    assert shape(record)[0] == ("user", ["<image> is a tag"])
    assert reason(value) == "more image markers than images"
    assert not list(convert({**value, "messages": user("x")}).media())


@pytest.mark.parametrize(
    "columns",
    [
        {"image_path": "a.png"},
        {"image_paths": ["a.png"]},
        {"img": {"bytes": None, "path": "a.png"}},
        {"image_file": "a.png", "image": None},
        {"image": "a.png", "image_path": "elsewhere/b.png"},
        {"images": ["a.png"], "img": b"", "image_url": "http://host/a.png"},
    ],
)
def test_media_have_columns_of_many_names(columns: dict[str, Any]) -> None:
    for value in ({"messages": user("<image>x")}, {"question": "<image>x", "answer": "y"}):
        assert shape(convert(value | columns))[0] == ("user", ["image:a.png", "x"])
    (video,) = convert({"messages": user("<video>x"), "video_path": "a.mp4"}).media()
    assert (video.kind, video.ref.name) == ("video", "a.mp4")


def test_a_medium_in_the_shard_is_the_one_that_a_path_tells_of() -> None:
    attached = {"jpg": MediaRef(name="1.jpg", data=b"J")}
    record = convert({"text": "a cat", "image_path": "some/where.jpg"}, attached)
    assert shape(record) == [("user", ["image:1.jpg"]), ("assistant", ["a cat"])]


def test_llava_video_data_mark_videos_as_images() -> None:
    record = convert({"conversations": user("<image>\nWhat happens?"), "video": "a.mp4"})
    assert shape(record)[0] == ("user", ["video:a.mp4", "\nWhat happens?"])


# --- tar shards ----------------------------------------------------------------------------------------------


def test_attached_media_with_text_are_captioned() -> None:
    attached = {"jpg": MediaRef(name="0001.jpg", data=b"J"), "1.png": MediaRef(name="0001.1.png", data=b"P")}
    record = convert({"text": "a cat"}, attached)
    assert shape(record) == [("user", ["image:0001.jpg", "image:0001.1.png"]), ("assistant", ["a cat"])]
    assert not record.plain
    assert convert({"caption": "a cat"}, attached) == record


@pytest.mark.parametrize("written", ["0001.b.png", "deep/folder/0001.b.png", "b.png", "http://host/0001.b.png"])
def test_attached_media_are_found_by_name(written: str) -> None:
    attached = {
        "a.png": MediaRef(name="0001.a.png", data=b"A"),
        "b.png": MediaRef(name="0001.b.png", data=b"B"),
    }
    value = {"messages": user([{"type": "image", "image": written}, {"type": "image"}])}
    assert [medium.ref.data for medium in convert(value, attached).media()] == [b"B", b"A"]


@pytest.mark.timeout(60)  # looking through all of them for each would take hours
@pytest.mark.parametrize("named", [False, True])
def test_very_many_attached_media_of_one_record(named: bool) -> None:
    number = 60_000
    attached = {f"{n}.png": MediaRef(name=f"s.{n}.png", data=b"%d" % n) for n in range(number)}
    value: dict[str, Any] = {"messages": user("<image>" * number)}
    if named:
        value["images"] = [f"s.{n}.png" for n in reversed(range(number))]
    order = range(number - 1, -1, -1) if named else range(number)
    assert [medium.ref.data for medium in convert(value, attached).media()] == [b"%d" % n for n in order]


def test_attached_media_are_found_by_extension_and_order() -> None:
    attached = {"jpg": MediaRef(name="1.jpg", data=b"J"), "png": MediaRef(name="1.png", data=b"P")}
    value = {"conversations": user("<image><image>"), "images": ["x/original.png", "y/original.gif"]}
    assert [medium.ref.data for medium in convert(value, attached).media()] == [b"P", b"J"]
    assert [medium.ref.data for medium in convert({"conversations": user("hm")}, attached).media()] == [b"J", b"P"]
    with pytest.raises(RecordError, match="fewer image markers than images"):
        convert({"conversations": user("<image>")}, attached)
    with pytest.raises(RecordError, match="more image markers than images"):
        convert({"conversations": user("<image>" * 3)}, attached)


def test_each_attached_medium_answers_one_unknown_name() -> None:
    attached = {"0.png": MediaRef(name="1.0.png", data=b"A"), "1.png": MediaRef(name="1.1.png", data=b"B")}
    value = {"conversations": user("<image><image>"), "images": ["x/first.png", "x/second.png"]}
    assert [medium.ref.data for medium in convert(value, attached).media()] == [b"A", b"B"]
    value = {"messages": user([{"type": "image", "image": "first.gif"}, {"type": "image", "image": "second.gif"}])}
    assert [medium.ref.data for medium in convert(value, attached).media()] == [b"A", b"B"]


# --- details of chats ----------------------------------------------------------------------------------------


def test_empty_texts_stay_for_the_template() -> None:
    assert convert({"messages": user("")}).messages[0].parts == (Text(""),)
    parts = [{"type": "text", "text": ""}, "x", {"type": "text", "text": ""}]
    assert convert({"messages": user(parts)}).messages[0].parts == (Text(""), Text("x"), Text(""))


LOSS = {"train": True, "training": 1, "trainable": True, "loss": 1.0, "loss_weight": 1, "loss_scale": 1.0, "weight": 1}


@pytest.mark.parametrize("field", [*LOSS.items(), ("mask", False), ("mask", None), ("prefix", False)])
def test_fields_that_ask_for_nothing_are_taken(field: tuple[str, Any]) -> None:
    flags = dict([field])
    assert convert({"messages": [{**answer("x"), **flags}]}).messages[0].train
    assert convert({"messages": [flagged(flags, {})]}).messages[0].train
    assert convert({"messages": user("x"), "weight": 1, "mask": b"a picture"}).messages[1].train


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_a_chat_may_be_a_text_of_json(column: str) -> None:
    assert convert({column: json.dumps(user("x"))}) == convert({column: user("x")})
    assert convert({column: user("x"), "images": '["a.png"]'}) == convert({column: user("x"), "images": ["a.png"]})
    assert reason({column: '{"role": "user"}'}) == reason({column: "[" * 100_000}) == "a column has the wrong type"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"messages": user("x"), "id": 1, "image": "a", "source": "s", "width": 3, "weight": 1, "system": "s"}, []),
        ({"messages": user("x"), "text": "y", "score": 0, "rating": None, "tags": []}, ["text", "score"]),
        ({"messages": [{**answer("x"), "name": "Ann", "train": True, "tool_calls": None}]}, ["messages[].name"]),
        (
            {"messages": [{"role": "tool", "content": "x", "name": "Ann", "tool_call_id": "1", "is_error": 1}]},
            ["messages[].is_error"],
        ),
        ({"text": "x", "tools": "[]", "functions": None}, ["tools"]),
        (
            {"messages": [answer_of(THOUGHT, {"text": "x", "id": 1, "name": "a"}, {**USE, "caller": "x"})]},
            ["messages[].content[].name", "messages[].content[].caller"],
        ),
        ({"messages": [flagged({"fps": 2, "image": None, "train": 1})]}, ["messages[].content[].fps"]),
        ({"messages": user([{"type": "image", "image": "a", "max_pixels": 9, "fps": None}])}, []),
        ({"texts": [{"user": "x", "assistant": "y", "source": "s", "mood": 1}] * 2}, ["texts[].mood"]),
        ({"instruction": "x", "input": "y", "output": "z", "history": []}, []),
        ({"question": "x", "answer": "y", "input": "z"}, ["input"]),
        ({"text": "x", "system": "y"}, ["system"]),
        ({"prompt": [{**answer("x"), "mood": 1}], "completion": "y"}, ["prompt[].mood"]),
    ],
)
def test_what_nothing_reads_is_named(value: dict[str, Any], expected: list[str]) -> None:
    assert unread_names(value) == expected
    entry = Entry(origin="x", value={**value, "id": "first"})
    seen = UnreadNames()
    for _ in range(2):
        to_record(entry, source="s", options=DEFAULT, unread=seen)
    assert seen.drain() == {name: [2, "first"] for name in expected}
    assert not seen.drain()
    if expected:
        with pytest.raises(RecordError, match="unused column or key"):
            to_record(entry, source="s", options=DEFAULT, unread=UnreadNames(strict=True))


IMAGE_LIKE, LOSS_LIKE = "looks like an image", "looks like loss control"


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        *(({name: "deep/1.jpg"}, IMAGE_LIKE) for name in ("picture", "image_file_name", "file_name", "jpg")),
        ({"photos": ["folder/1", "folder/2"]}, IMAGE_LIKE),
        ({"picture": {"bytes": b"J", "path": None}}, IMAGE_LIKE),
        ({"image_base64": "J" * 300}, IMAGE_LIKE),
        ({"file": "data:image/png;base64,AAAA"}, IMAGE_LIKE),
        ({"clip_name": "1.mp4"}, "looks like a video"),
        ({"recording": "1.wav"}, "looks like an audio"),
        *(({name: 0}, LOSS_LIKE) for name in ("loss_mask", "sample_weight", "train_on_input", "is_masked")),
        ({"lossWeights": [0, 1.5]}, LOSS_LIKE),
        ({"sample_weight": "0.5"}, LOSS_LIKE),
    ],
)
def test_what_looks_like_media_or_loss_control_is_refused(beside: dict[str, Any], expected: str) -> None:
    asked, said = user("x")
    for value in (
        {"messages": [asked, said], **beside},
        {"conversations": [asked, {**said, **beside}]},
        {"messages": user([{"type": "text", "text": "x", **beside}])},
    ):
        assert expected in reason(value)
    (name,) = beside
    assert convert({"messages": [asked, said], **beside}, columns={name: "uid"})
    if expected != LOSS_LIKE:  # beside a medium of its kind, or for a model of text, it is but another name
        value = {"messages": user("x"), **beside, "image": "a.png", "video": "a.mp4", "audio": "a.wav"}
        assert list(beside) == unread_names(value)
        assert convert(value)
        assert to_record(Entry(origin="x", value={"text": "x", **beside}), source="s", options=DEFAULT, text_only=True)


@pytest.mark.parametrize(
    "beside",
    [
        {"image_caption": "a cat", "image_format": "JPEG", "num_images": 1, "path": "src/main.ts"},
        {"num_loss_tokens": 5, "train_split": 1, "train": "a split", "mask": b"a picture", "loss_type": "ce"},
    ],
)
def test_what_only_tells_of_media_or_training_is_unread(beside: dict[str, Any]) -> None:
    value = {"messages": user("x"), **beside}
    assert convert(value)
    assert unread_names(value) == list(beside)


@pytest.mark.parametrize("flag", [*((name, type(one)(0)) for name, one in LOSS.items()), ("mask", True)])
def test_a_record_can_ask_for_no_loss(flag: tuple[str, Any]) -> None:
    assert reason({"messages": user("x"), **dict([flag])}) == "no supervised tokens"
    assert reason({"messages": user("x"), flag[0]: 0.5}) == "a record's train flag is not a boolean"
    assert convert({"messages": user("x"), flag[0]: not flag[1]}).messages[1].train


def test_two_things_said_in_one_place_are_named() -> None:
    first, second = {**user("x")[0], "value": "another"}, {"from": "gpt", "value": "y", "text": "z"}
    assert unread_names({"messages": [first, second]}) == ["messages[].value", "messages[].text"]
    parts = [{"type": "image", "image": "a", "text": "caption"}, {"type": "text", "text": "x", "image": None}]
    assert unread_names({"messages": user(parts)}) == ["messages[].content[].text"]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (("query", "response"), "query=question,response=answer"),
        (("prompt", "response"), "prompt=question,response=answer"),
        (("INSTRUCTION", "RESPONSE", "SOURCE"), "INSTRUCTION=question,RESPONSE=answer"),
        (("input", "output"), "input=question,output=answer"),
        (("system_prompt", "question", "response"), "response=answer,system_prompt=system"),
        (("instruction", "context", "response"), "context=input,response=output"),
        (("article", "highlights", "id"), "article=question,highlights=answer"),
        (("dialogue", "summary"), "dialogue=question,summary=answer"),
        (("question", "context", "answer"), "question=instruction,context=input,answer=output"),
        ({"dialog": user("y"), "id": "1"}, "dialog=messages"),
        ({"questionId": "1", "question": "x", "answers": ["y", "z"], "image": "a"}, "answers.0=answer"),  # DocVQA
        (
            {"title": "t", "context": "c", "question": "x", "answers": {"text": ["y"], "answer_start": [3]}},  # SQuAD
            "question=instruction,context=input,answers.text.0=output",
        ),
        ({"image": "a", "caption": ["one", "two"]}, "caption.0=caption"),  # Flickr30k
    ],
)
def test_unknown_columns_are_answered_with_what_they_look_like(columns: Any, expected: str) -> None:
    value = columns if isinstance(columns, dict) else dict.fromkeys(columns, "x")
    with pytest.raises(RecordError) as caught:
        convert(value)
    assert caught.value.detail.endswith(f"looks like: --columns {expected}")
    assert convert(value, columns=dict(pair.split("=") for pair in expected.split(","))).messages


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("image", {"min_pixels": 9, "max_pixels": 90.0, "fps": None}, PartLimits(min_pixels=9, max_pixels=90)),
        ("image", {"resized_height": 5, "resized_width": 6}, PartLimits(resized_height=5, resized_width=6)),
        ("video", {"nframes": 4, "max_pixels": 9}, PartLimits(num_frames=4, max_pixels=9)),
        ("video", {"fps": 0.5, "max_frames": 4}, PartLimits(fps=0.5, max_frames=4)),
        ("image", {"max_pixels": None}, None),
        ("image", {"fps": 2}, "an unknown limit in a part"),
        ("video", {"total_pixels": 2}, "an unknown limit in a part"),
        ("video", {"resized_height": 5, "resized_width": 6}, "an unknown limit in a part"),
        ("image", {"max_pixels": "9"}, "a limit in a part is not a usable number"),
        ("image", {"max_pixels": True}, "a limit in a part is not a usable number"),
        ("image", {"max_pixels": 0}, "a limit in a part is not a usable number"),
        ("image", {"max_pixels": 9.5}, "a limit in a part is not a usable number"),
        ("video", {"nframes": 4, "num_frames": 5}, "a limit in a part is not a usable number"),
        ("image", {"resized_height": 5}, "limits in a part contradict each other"),
        ("image", {"resized_height": 5, "resized_width": 6, "max_pixels": 9}, "limits in a part contradict each other"),
        ("video", {"fps": 1, "num_frames": 5}, "limits in a part contradict each other"),
    ],
)
def test_limits_of_one_medium(kind: str, given: dict[str, Any], expected: PartLimits | str | None) -> None:
    named = {"messages": user([{"type": kind, kind: "a", **given}])}
    shown = user([{"type": kind}])
    bare = {"messages": user([{"type": kind, **given}]), kind: "a"}
    for value in (named, bare, {"messages": shown, kind: {"path": "a", **given}}):
        if isinstance(expected, str):
            assert reason(value) == expected
        else:
            (medium,) = convert(value).media()
            assert medium.limits == expected
            assert expected is None or PartLimits.of(expected.text()) == expected


@pytest.mark.parametrize(
    "value",
    [
        {"image": "a", "ground_truth": "{}"},  # CORD
        {"question": "x", "choices": ["a", "b"], "answer": 1},  # ScienceQA
        {"question": "x", "answer": 1},
        {"image": "a", "objects": {"bbox": [[1, 2, 3, 4]], "category": [5]}},  # cppe-5
        {"segments": [{"text": "x", "label": True}]},  # axolotl
        {"question": ["x", "y"], "answer": ["z", "w"]},  # a table, column by column
    ],
)
def test_what_has_no_schema_is_told_a_way_out(value: dict[str, Any]) -> None:
    with pytest.raises(RecordError) as caught:
        convert(value)
    assert "--formatting-func module:function" in caught.value.detail
    assert "did you mean 'question'" not in caught.value.detail


def test_a_class_may_be_trained_as_it_is_written() -> None:
    attached = {"jpg": MediaRef(name="a.jpg", data=b"x")}
    with pytest.raises(RecordError, match="looks like: --columns cls=text,"):
        convert({"cls": "3"}, attached)
    assert shape(convert({"cls": "3"}, attached, columns={"cls": "text"}))[1] == ("assistant", ["3"])


def test_roles_have_many_names() -> None:
    names = ["System", "human", "gpt", "chatgpt", "observation", "user", "assistant", "tool"]
    record = convert({"conversations": [{"from": name, "value": "x"} for name in names]})
    expected = ["system", "user", "assistant", "assistant", "tool", "user", "assistant", "tool"]
    assert [m.role for m in record.messages] == expected


@pytest.mark.parametrize("flag", [*((name, type(one)(0)) for name, one in LOSS.items()), ("mask", True), ("mask", 1)])
def test_a_message_can_ask_for_no_loss(flag: tuple[str, Any]) -> None:
    flags = dict([flag])
    picture = {"type": "image", "image": "a.png"}  # which has no say
    parts = flagged(flags, flags)
    turns = [{**answer("x"), **flags}, {**parts, "content": [picture, *parts["content"]]}, {**answer("y"), "weight": 1}]
    assert [m.train for m in convert({"messages": turns}).messages] == [False, False, True]


def test_only_the_completion_carries_loss() -> None:
    record = convert({"prompt": [*user("a"), {"role": "user", "content": "b"}], "completion": "c"})
    assert [(m.role, m.train) for m in record.messages if m.role == "assistant"] == [
        ("assistant", False),
        ("assistant", True),
    ]


def test_alpaca_puts_the_input_below_the_instruction() -> None:
    record = convert({"instruction": "Add.", "input": "1 2", "output": "3", "system": "Be terse."})
    assert shape(record) == [("system", ["Be terse."]), ("user", ["Add.\n1 2"]), ("assistant", ["3"])]
    assert reason({"messages": [{"role": "system", "content": "x"}], "system": "y"}) == "two system messages"


def test_a_prompt_and_its_completion_as_strings_are_plain_text() -> None:
    record = convert({"prompt": "The sky is", "completion": " blue."})
    assert record.plain
    assert shape(record) == [("user", ["The sky is"]), ("assistant", [" blue."])]
    for turns in ({"prompt": user("x")[:1]}, {"completion": user("x")[1:]}, {"image": "a.png"}):
        assert not convert({"prompt": "The sky is", "completion": " blue.", **turns}).plain
    assert reason({"prompt": "a", "completion": "b", "system": "c"}) == "a system column beside plain text"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "describes a task. Write"),
        ({"input": ""}, "describes a task. Write"),
        ({"input": "1 2"}, "describes a task, paired with an input that provides further context. Write"),
    ],
)
def test_alpacas_own_prompt_is_had_by_its_name(given: dict[str, Any], expected: str) -> None:
    schemas: Counter[str] = Counter()
    entry = Entry(origin="x", value={"instruction": "Add.", "output": "3", **given})
    record = to_record(entry, source="s", options=SchemaOptions(schema="alpaca"), schemas=schemas)
    (asked,), (told,) = (texts for _, texts in shape(record))
    lead, *sections = asked.split("\n\n### ")
    assert lead.startswith(f"Below is an instruction that {expected} a response")
    assert sections == ["Instruction:\nAdd.", *(["Input:\n1 2"] if given.get("input") else []), "Response:\n"]
    assert (told, record.plain, dict(schemas)) == ("3", True, {"alpaca (### Instruction)": 1})
    assert reason({**entry.value, "image": "a.png"}, schema="alpaca") == "media or history in Alpaca's prompt"  # type: ignore[dict-item]


IDS = {"input_ids": [5, 6, 7, 8]}


@pytest.mark.parametrize(
    ("columns", "supervised"),
    [
        ({}, ((0, 4),)),
        ({"labels": [-100, 6, -100, 8], "attention_mask": [1] * 4, "length": 4}, ((1, 2), (3, 4))),
        ({"completion_mask": [0, 0, 1, 1], "assistant_masks": [1, 1, 1, 0]}, ((2, 3),)),
        ({"loss_mask": [False, True, True, False], "position_ids": [0, 1, 2, 3], "seq_lengths": [4]}, ((1, 3),)),
        ({"labels": None, "token_type_ids": [0] * 4, "messages": user("another")}, ((0, 4),)),
    ],
)
def test_tokens_are_taken_as_they_are(columns: dict[str, Any], supervised: tuple[tuple[int, int], ...]) -> None:
    record = convert({**IDS, **columns})
    assert record.tokens == TokenIds(ids=(5, 6, 7, 8), supervised=supervised)
    assert not record.messages


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"labels": [6, 7, 8, -100]}, "a label is neither its token nor -100"),
        ({"labels": [5, 6, 7]}, "columns of different lengths"),
        ({"loss_mask": [1] * 5}, "columns of different lengths"),
        ({"loss_mask": [0, 1, 2, 1]}, "a loss mask is neither 0 nor 1"),
        ({"attention_mask": [1, 1, 1, 0]}, "attention_mask is not 1 for every token"),
        ({"attention_mask": [1, 1]}, "attention_mask is not 1 for every token"),
        ({"position_ids": [0, 1, 0, 1]}, "samples that are packed already"),
        ({"seq_lengths": [2, 2]}, "samples that are packed already"),
        ({"mask": [0, 0, 1, 1]}, "an unknown column with one number per token"),
        ({"token_type_ids": [0, 1, 0, 0]}, "an unknown column with one number per token"),
        ({"images": ["a.png"]}, "media beside input_ids"),
        ({"image_grid_thw": [[1, 2, 2]]}, "media beside input_ids"),
        ({"input_ids": []}, "no tokens"),
        ({"input_ids": [5, True]}, "a column has the wrong type"),
        ({"input_ids": [[5, 6]]}, "a column has the wrong type"),
        ({"input_ids": [5.0]}, "a column has the wrong type"),
        ({"input_ids": "5 6"}, "a column has the wrong type"),
        ({"input_ids": [5, -6]}, "an id outside the vocabulary"),
        ({"input_ids": [2**31]}, "an id outside the vocabulary"),
    ],
)
def test_tokens_that_mean_something_else_are_refused(columns: dict[str, Any], expected: str) -> None:
    assert reason({**IDS, **columns}) == expected


def test_plain_text_is_one_message_that_carries_loss() -> None:
    record = convert({"text": "Once upon a time"})
    assert record.plain
    assert record.messages == (Message(role="assistant", parts=(Text("Once upon a time"),)),)


def test_empty_columns_of_a_table_do_not_count() -> None:
    value = {"messages": None, "conversations": None, "text": "hello", "images": None, "id": None}
    assert recognise_schema(value) == "text"
    assert convert(value).plain


def test_recognition_follows_the_order_of_the_table() -> None:
    assert tuple(SCHEMAS) == tuple(SCHEMA_COLUMNS)
    order = [columns for sets in SCHEMA_COLUMNS.values() for columns in sets[:1]]
    for (i, first), (j, second) in itertools.combinations(enumerate(order), 2):
        name = recognise_schema(dict.fromkeys((*second, *first), "x"))
        expected = list(SCHEMA_COLUMNS)[min(i, j)]
        assert name == ("instruction" if expected == "alpaca" else expected), "that one is only asked for by name"


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"id": "a"}, "a"),
        ({"id": 0}, "0"),
        ({"sample_id": "s", "uid": "u"}, "s"),
        ({"__key__": "k"}, "k"),
        ({"id": True}, "data.jsonl:7"),
        ({"id": 1.5}, "data.jsonl:7"),
        ({"id": ""}, "data.jsonl:7"),
        ({"id": "\ud800"}, "\\ud800"),
        ({}, "data.jsonl:7"),
    ],
)
def test_ids(columns: dict[str, Any], expected: str) -> None:
    record = convert({**columns, "text": "x"})
    assert (record.id, record.origin, record.source) == (expected, "data.jsonl:7", "mine")


def test_an_entrys_own_error_is_raised() -> None:
    error = RecordError("read", "broken line")
    with pytest.raises(RecordError) as caught:
        to_record(Entry(origin="x", error=error), source="s", options=DEFAULT)
    assert caught.value is error


# --- tools, as they are published -----------------------------------------------------------------------------

OPENAI = [
    {"role": "user", "content": "q"},
    called({"type": "function", "function": {"name": "weather", "arguments": json.dumps(WEATHER["arguments"])}}),
    {"role": "tool", "content": "sunny"},
    answer("done"),
]


def numbered(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with an id of the call."""
    call = {"id": "c1", **turns[1]["tool_calls"][0]}
    return [turns[0], {**turns[1], "tool_calls": [call]}, {**turns[2], "tool_call_id": "c1"}, turns[3]]


def typed_value(kind: str, value: str) -> list[dict[str, Any]]:
    return [{"type": kind, "value": value}]


# name -> the columns of a record, and the messages of OpenAI that say the same
PUBLISHED: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "arguments as an object": (
        {"messages": [OPENAI[0], called({"function": WEATHER}), *OPENAI[2:]], "tools": [TOOL]},
        OPENAI,
    ),
    "no content": (
        {
            "messages": [OPENAI[0], {key: OPENAI[1][key] for key in ("role", "tool_calls")}, *OPENAI[2:]],
            "tools": json.dumps([TOOL]),
        },
        OPENAI,
    ),
    "ms-swift": (
        {
            "messages": [
                OPENAI[0],
                {"role": "tool_call", "content": CALL_TEXT},
                {"role": "tool_response", "content": "sunny"},
                answer("done"),
            ],
            "tools": json.dumps([TOOL]),
        },
        OPENAI,
    ),
    "LLaMA-Factory, glaive": (
        {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": CALL_TEXT},
                {"from": "observation", "value": "sunny"},
                {"from": "gpt", "value": "done"},
            ],
            "tools": json.dumps([FUNCTION]),
        },
        OPENAI,
    ),
    "LLaMA-Factory v1": (
        {
            "messages": [
                {"role": "system", "content": typed_value("tools", json.dumps([FUNCTION]))},
                {"role": "user", "content": typed_value("text", "q"), "loss_weight": 0.0},
                {"role": "assistant", "content": typed_value("tool_call", CALL_TEXT), "loss_weight": 1.0},
                {"role": "tool", "content": typed_value("text", "sunny"), "loss_weight": 0.0},
                {"role": "assistant", "content": typed_value("text", "done"), "loss_weight": 1.0},
            ]
        },
        [{**turn, "train": number % 2 == 1} for number, turn in enumerate(OPENAI)],
    ),
    "OpenAI's functions": (
        {
            "messages": [
                OPENAI[0],
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {**WEATHER, "arguments": '{"city": "Paris", "days": 2}'},
                },
                {"role": "function", "name": "weather", "content": "sunny"},
                answer("done"),
            ],
            "functions": [FUNCTION],
        },
        [*OPENAI[:2], {**OPENAI[2], "name": "weather"}, OPENAI[3]],
    ),
    "Anthropic": (
        {
            "messages": [
                OPENAI[0],
                answer_of(THOUGHT, {"type": "text", "text": "Let me see."}, USE),
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "sunny"}]},
                answer_of({"type": "text", "text": "done"}),
            ],
            "tools": [{"input_schema" if key == "parameters" else key: item for key, item in FUNCTION.items()}],
        },
        [
            OPENAI[0],
            {**numbered(OPENAI)[1], "content": "Let me see.", "reasoning_content": "hm"},
            *numbered(OPENAI)[2:],
        ],
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_tools_are_the_same_however_they_are_written(name: str) -> None:
    value, same = PUBLISHED[name]
    unread = UnreadNames(strict=True)
    record = to_record(Entry(origin="data.jsonl:7", value=value), source="mine", options=DEFAULT, unread=unread)
    assert record == convert({"messages": same, "tools": [TOOL]})
    call = record.messages[1].extras
    assert call is not None
    assert [json.loads(one.arguments) for one in call.tool_calls] == [WEATHER["arguments"]]
    assert record.variables is not None
    assert json.loads(record.variables.tools) == [TOOL]


def test_answers_and_calls_side_by_side() -> None:
    """ms-swift writes a turn for each; in the conversation that templates know they are one."""
    turn = {"role": "tool_call", "content": CALL_TEXT}
    result = {"role": "tool_response", "content": "sunny"}
    record = convert(
        {"messages": [{"role": "user", "content": "q"}, answer("Wait."), turn, turn, result, result, turn]}
    )
    assert [(m.role, len(m.extras.tool_calls) if m.extras else 0) for m in record.messages] == [
        *(("user", 0), ("assistant", 2), ("tool", 0), ("tool", 0), ("assistant", 1))
    ]
    assert shape(record)[1] == ("assistant", ["Wait."])


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_many_names(key: str) -> None:
    record = convert({"messages": [*user("x"), {**answer("y"), key: "hm"}]})
    assert record.messages[2].extras is not None
    assert record.messages[2].extras.reasoning == "hm"
    assert (
        convert({"messages": [*user("x"), answer_of({"type": key.split("_")[0], "value": "hm"}, {"text": "y"})]})
        == record
    )
    assert convert({"messages": [*user("x"), {**answer("y"), key: ""}]}) == convert(
        {"messages": [*user("x"), answer("y")]}
    )


def test_images_in_tool_answers_and_from_anthropic() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(b"PNG!").decode()}
    blocks = [{"type": "text", "text": "see"}, {"type": "image", "source": source}]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": blocks}
    turns = [user("q")[0], answer_of(USE), {"role": "user", "content": [result, {"type": "text", "text": "And?"}]}]
    record = convert({"messages": [*turns, answer("x")]})
    assert [m.role for m in record.messages] == ["user", "assistant", "tool", "user", "assistant"]
    assert [(p.kind, p.ref.data) for p in record.messages[2].parts if isinstance(p, Media)] == [("image", b"PNG!")]
    marked = [*OPENAI[:2], {"role": "tool", "content": "<image>"}, OPENAI[3]]
    assert [medium.ref.name for medium in convert({"messages": marked, "images": ["a.png"]}).media()] == ["a.png"]
    url = {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}}
    assert reason({"messages": user([url])}) == "remote media are not fetched"


@pytest.mark.parametrize("padded", [False, True])
def test_a_table_has_the_arguments_of_other_rows(padded: bool) -> None:
    """Which a JSON line has only where it says so itself."""
    call = {"function": {"name": "weather", "arguments": {"city": "Paris", "query": None, "list": [None]}}}
    value = {"messages": [user("q")[0], called(call)], "chat_template_kwargs": {"a": False, "b": None}}
    record = to_record(Entry(origin="x", value=value, padded=padded), source="s", options=DEFAULT)
    assert record.messages[1].extras is not None
    assert record.variables is not None
    asked = {"city": "Paris", "list": [None]} if padded else {"city": "Paris", "query": None, "list": [None]}
    assert json.loads(record.messages[1].extras.tool_calls[0].arguments) == asked
    assert record.variables.kwargs == ((("a", False),) if padded else (("a", False), ("b", None)))


def test_exchanges_are_turns() -> None:
    turns = [{"human": "a", "assistant": "b"}, {"human": "c", "assistant": "d"}]
    same = [*user("a")[:1], answer("b"), *user("c")[:1], answer("d")]
    assert convert({"conversation": turns, "system": "s"}) == convert({"messages": same, "system": "s"})
    texts = [{"user": turn["human"], "assistant": turn["assistant"]} for turn in turns]
    assert convert({"texts": texts, "system": "s"}) == convert({"messages": same, "system": "s"})
    assert unread_names({"conversation": [{**turns[0], "mood": 1, "loss": 0}]}) == ["conversation[].mood"]
    assert not convert({"conversation": [{**turns[0], "loss": 0}]}).messages[1].train


# --- back to typed messages ------------------------------------------------------------------------------------


def typed(record: Record, *, string_content: bool) -> list[dict[str, Any]]:
    """Messages as chat templates take them; those of text alone with one string, where asked for."""
    found = []
    for message in record.messages:
        content: Any = [
            {"type": "text", "text": part.text} if isinstance(part, Text) else {"type": part.kind}
            for part in message.parts
        ]
        if string_content and all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
        found.append({"role": message.role, "content": content})
    return found


@given(chats())
@settings(max_examples=50, deadline=None)
def test_typed_messages_read_back_as_the_same_record(chat: tuple[list[tuple[str, str]], list[str]]) -> None:
    exchanges, images = chat
    record = convert({"texts": [{"user": q, "assistant": a} for q, a in exchanges], "images": images})
    for string_content in (False, True):
        assert convert({"messages": typed(record, string_content=string_content), "images": images}) == record


# --- settings ----------------------------------------------------------------------------------------------------


def test_columns_are_renamed_and_schemas_forced() -> None:
    value = {"query": "2+2?", "reply": "4", "text": "ignored"}
    renamed = convert(value, columns={"query": "prompt", "reply": "completion"})
    assert shape(renamed) == [("user", ["2+2?"]), ("assistant", ["4"])]
    assert convert(value | {"prompt": "p", "completion": "c"}, schema="text").plain
    assert reason({"text": "x"}, schema="messages") == "the schema's columns are missing"


@pytest.mark.parametrize(
    "wrong",
    [
        {"schema": "mesages"},
        {"object_ordering": "sortd"},
        {"emit_norm": "norm10"},
        {"coord_tokens": True},
        {"formatting_func": "my_function"},
        {"object_template": "{% for %}"},
        {"columns": {"prompt": "query"}},
    ],
)
def test_wrong_settings_are_refused_at_birth(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))) as caught:
        SchemaOptions(**wrong)
    assert caught.value.expected


# --- the user's formatting function ---------------------------------------------------------------------------

FORMATTING = """
def listed(record):
    record["question"] = "changed"
    return [{"role": "user", "content": record["q"]}, {"role": "assistant", "content": "!"}]

def as_dict(record):
    return {"messages": listed(record), "images": ["other.jpg"]}

def fails(record):
    return record["missing"]

def wrong(record):
    return "text"

NUMBER = 5
"""


@pytest.fixture
def formatting_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_formatting_for_test.py").write_text(FORMATTING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_formatting_for_test", raising=False)  # of a folder that is gone


def formatted(name: str, value: dict[str, Any]) -> Record:
    function, _ = load_formatting(f"my_formatting_for_test:{name}")
    return to_record(Entry(origin="o", value=value), source="s", options=DEFAULT, formatting=function)


@pytest.mark.usefixtures("formatting_module")
def test_a_formatting_function_makes_messages() -> None:
    value = {"q": "why?", "images": ["a.jpg"], "id": 3}
    assert shape(formatted("listed", value)) == [("user", ["image:a.jpg", "why?"]), ("assistant", ["!"])]
    assert formatted("listed", value).id == "3"
    assert [medium.ref.name for medium in formatted("as_dict", value).media()] == ["other.jpg"]
    assert "question" not in value, "the raw record is not the function's to change"
    _, source = load_formatting("my_formatting_for_test:listed")
    assert "def listed(record):" in source
    assert "def fails(record):" in source, "what the function calls may stand anywhere in its module"


def test_a_formatting_function_by_the_file_of_its_module(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "of_a_file_for_test.py").write_text(FORMATTING)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "of_a_file_for_test", raising=False)
    name = f"{tmp_path / 'one' / 'of_a_file_for_test.py'}:listed"
    assert from_anywhere("of_a_file_for_test:listed", str(tmp_path / "one")) == from_anywhere(name) == name
    assert from_anywhere("of_a_file_for_test:listed") == "of_a_file_for_test:listed", "which is not here"
    assert load_formatting(name)[0]({"q": "why?"})
    with pytest.raises(ConfigError, match="another module has this name"):
        load_formatting(name.replace("/one/", "/two/"))
    with pytest.raises(ConfigError, match="No module named"):
        load_formatting(f"{tmp_path / 'gone_for_test.py'}:listed")


@pytest.mark.usefixtures("formatting_module")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fails", ("the formatting function raised", "KeyError: 'missing'")),
        ("wrong", ("the formatting function returned no messages", "str")),
    ],
)
def test_a_failing_formatting_function_is_one_ledger_line(name: str, expected: tuple[str, str]) -> None:
    with pytest.raises(RecordError) as caught:
        formatted(name, {"q": 1})
    assert (caught.value.stage, caught.value.reason, caught.value.detail) == ("formatting", *expected)


@pytest.mark.usefixtures("formatting_module")
@pytest.mark.parametrize(
    "name",
    ["no_such_module_at_all:f", "my_formatting_for_test:nothing", "my_formatting_for_test:NUMBER", "builtins:len", "x"],
)
def test_a_formatting_function_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.formatting_func"):
        load_formatting(name)
