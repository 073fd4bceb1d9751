"""Records as other frameworks publish them: read as they mean it, or refused as what they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from packtrain.core.errors import RecordError
from packtrain.core.values import Media, MediaRef, Record
from packtrain.records.schemas import SchemaOptions, to_record
from packtrain.records.schemas.unread import UnreadNames
from packtrain.records.source import Entry


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def chat(question: Any, answer: Any = "b", **columns: Any) -> dict[str, Any]:
    return {"messages": [said("user", question), said("assistant", answer)], **columns}


def shared(question: str, answer: str = "b", **columns: Any) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}], **columns}


def value(kind: str, item: str) -> dict[str, str]:
    return {"type": kind, "value": item}


TEXT = {"type": "text", "text": "a"}
PLAIN = "|a|b"
SHOWN = "|[image 1.jpg]a|b"
# Framework and data -> a record, and what is shown, asked and answered of it: turns behind |, media in [].
READ: dict[str, tuple[dict[str, Any], str]] = {
    "LLaMA-Factory alpaca": ({"instruction": "a", "input": "", "output": "b"}, PLAIN),
    "LLaMA-Factory alpaca, input": ({"instruction": "a", "input": "i", "output": "b"}, "|a\ni|b"),
    "LLaMA-Factory history": (
        {"instruction": "a", "input": "", "output": "b", "system": "s", "history": [["q", "r"]]},
        "|s|q|r|a|b",
    ),
    "LLaMA-Factory mllm_demo": (chat("<image>a", images=["1.jpg"]), SHOWN),
    "LLaMA-Factory mllm_video_demo": (chat("<video>a", videos=["1.mp4"]), "|[video 1.mp4]a|b"),
    "LLaMA-Factory sharegpt": (shared("a", system="s"), "|s|a|b"),
    "LLaMA-Factory v1": (
        chat([value("image_url", "1.jpg"), value("text", "a")], [value("text", "b")]),
        SHOWN,
    ),
    "LLaMA-Factory c4_demo": ({"text": "b"}, "|b"),
    "ms-swift messages": (chat("<image>a", images=["1.jpg"], system="s"), "|s|[image 1.jpg]a|b"),
    "ms-swift sharegpt": ({"conversation": [{"human": "a", "assistant": "b"}], "system": "s"}, "|s|a|b"),
    "ms-swift sharegpt image": (shared("<image>a", images=["1.jpg"]), SHOWN),
    "LLaVA": (shared("<image>\na", image="1.jpg"), "|[image 1.jpg]\na|b"),
    "LLaVA-Video": (shared("<image>\na", video="1.mp4"), "|[video 1.mp4]\na|b"),
    "InternVL": ({**shared("<image>a", image="1.jpg"), "id": 1, "width": 9, "height": 9}, SHOWN),
    "InternVL, several": (shared("<image><image>a", image=["1.jpg", "2.jpg"]), "|[image 1.jpg][image 2.jpg]a|b"),
    "InternVL, text beside images": (shared("a", image=""), PLAIN),
    "Qwen-VL": (chat([{"type": "image", "image": "1.jpg", "max_pixels": 9}, TEXT]), SHOWN),
    "lmms-engine": (chat([{"type": "image_url", "image_url": {"url": "1.jpg"}}, TEXT], id=1), SHOWN),
    "OpenAI": (chat([{"type": "image_url", "image_url": {"url": "1.jpg", "detail": "low"}}, TEXT]), SHOWN),
    "Anthropic": (
        chat([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "SkpKSg=="}}, TEXT]),
        "|[image inline image]a|b",
    ),
    "axolotl url": (chat([{"type": "image", "url": "1.jpg"}, TEXT]), SHOWN),
    "axolotl path": (chat([{"type": "image", "path": "1.jpg"}, TEXT]), SHOWN),
    "axolotl base64": (chat([{"type": "image", "base64": "SkpKSg=="}, TEXT]), "|[image inline image]a|b"),
    "TRL prompt-completion": (
        {"prompt": [said("user", "a")], "completion": [said("assistant", "b")], "images": ["1.jpg"]},
        SHOWN,
    ),
    "TRL strings": ({"prompt": "a", "completion": "b"}, PLAIN),
    "TRL vision": (chat([{"type": "image", "text": None}, {**TEXT, "index": None}], images=[{"bytes": b"J"}]),
                   "|[image inline image]a|b"),
    "the_cauldron": (
        {"images": [{"bytes": b"J", "path": "1.jpg"}], "texts": [{"user": "a", "assistant": "b", "source": "c"}]},
        SHOWN,
    ),
    "nanoVLM, text": ({"images": [], "texts": [{"user": "a", "assistant": "b"}]}, PLAIN),
    "LaTeX_OCR": ({"image": {"bytes": b"J", "path": "1.jpg"}, "text": "b"}, "|[image 1.jpg]|b"),
    "caption": ({"image": "1.jpg", "caption": "b"}, "|[image 1.jpg]|b"),
    "question and answer": ({"question": "a", "answer": "b", "image_path": "1.jpg"}, SHOWN),
    "messages as a text of JSON": ({"messages": json.dumps(chat("a")["messages"])}, PLAIN),
    "a table's empty columns": (chat("a", tools=None, tool_calls=None, images=None), PLAIN),
}  # fmt: skip
# By which --columns, as the error about the record proposes.
MAPPED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "ms-swift query": ({"query": "a", "response": "b"}, {"query": "question", "response": "answer"}, PLAIN),
    "Dolly": (
        {"instruction": "a", "context": "c", "response": "b", "category": "x"},
        {"context": "input", "response": "output"},
        "|a\nc|b",
    ),
    "SQuAD": (
        {"title": "t", "question": "a", "context": "c", "answers": {"text": ["b", "d"], "answer_start": [1, 2]}},
        {"question": "instruction", "context": "input", "answers.text.0": "output"},
        "|a\nc|b",
    ),
    "DocVQA": (
        {"questionId": 1, "question": "a", "answers": ["b", "d"], "image": "1.jpg"},
        {"answers.0": "answer"},
        SHOWN,
    ),
    "ChartQA": ({"image": "1.jpg", "query": "a", "label": ["b"]}, {"query": "question", "label.0": "answer"}, SHOWN),
    "Video-ChatGPT": ({"q": "a", "a": "b", "video": "1.mp4"}, {"q": "question", "a": "answer"}, "|[video 1.mp4]a|b"),
    "Flickr30k": ({"image": "1.jpg", "caption": ["b", "d"]}, {"caption.0": "caption"}, "|[image 1.jpg]|b"),
}
PREFERENCE, GROUNDING = "preference data are not supported", "grounding objects are not supported"
QUESTION, TYPE = "a column that belongs to the question is not read", "a column has the wrong type"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "ms-swift grounding": (
        chat("<image>", "<ref-object><bbox>", images=["1.jpg"], objects={"ref": ["a"], "bbox": [[1, 2, 3, 4]]}),
        GROUNDING,
    ),
    "LLaMA-Factory kto_en_demo": (chat("a", label=False), PREFERENCE),
    "LLaMA-Factory dpo_en_demo": (
        {"conversations": [{"from": "human", "value": "a"}], "chosen": {"value": "b"}, "rejected": {"value": "c"}},
        PREFERENCE,
    ),
    "LLaMA-Factory v1_dpo": ({"chosen_messages": [], "rejected_messages": [said("user", "a")]}, PREFERENCE),
    "ms-swift DPO": (chat("a", rejected_response="c"), PREFERENCE),
    "TRL preference": ({"prompt": "a", "chosen": "b", "rejected": "c"}, PREFERENCE),
    "TRL unpaired": ({"prompt": "a", "completion": "b", "label": True}, PREFERENCE),
    "TRL prompt": ({"prompt": [said("user", "a")]}, "a prompt without a completion"),
    "RLAIF-V": ({"image": "1.jpg", "question": "a", "chosen": "b", "rejected": "c"}, PREFERENCE),
    "OpenAI preference": ({"input": {}, "preferred_output": [], "non_preferred_output": [{}]}, PREFERENCE),
    "OpenAI weight": (chat("a", weight=0.5), "a record's train flag is not a boolean"),
    "axolotl train_detail": (
        {"messages": [said("user", "a"), said("assistant", "b", train_detail=[{"train": False}])]},
        "loss on a part of a message is not supported",
    ),
    "MathVision": ({"question": "a", "options": ["x"], "answer": "b", "image": "1.jpg"}, QUESTION),
    "ScienceQA": ({"question": "a", "choices": ["x"], "answer": 1}, QUESTION),
    "CORD": ({"image": "1.jpg", "ground_truth": "{}"}, "unknown schema"),
    "cppe-5": ({"image": "1.jpg", "objects": {"bbox": [], "category": []}}, TYPE),
    "axolotl segments": ({"segments": [{"label": True, "text": "a"}]}, "unknown schema"),
    "CoordExp .coord.jsonl": (
        {"images": ["1.jpg"], "objects": [{"desc": "a", "bbox_2d": ["<|coord_1|>"] * 4}]},
        "coordinates are not a list of numbers",
    ),
    "ms-swift text-to-image": (chat("a", "<image>", images=["1.jpg"]), "image marker in an answer"),
    "ms-swift frames": (chat("<video>a", videos=[["1.jpg"]]), "a video given as a list of frames is not supported"),
    "ms-swift url": (chat("<image>a", images=["https://host/1.jpg"]), "remote media are not fetched"),
}


def convert(given: dict[str, Any], unread: UnreadNames | None = None, **options: Any) -> Record:
    return to_record(Entry(origin="x", value=given), source="s", options=SchemaOptions(**options), unread=unread)


def written(record: Record) -> str:
    def part(one: Any) -> str:
        return f"[{one.kind} {one.ref.name}]" if isinstance(one, Media) else one.text

    return "".join("|" + "".join(map(part, message.parts)) for message in record.messages)


@pytest.mark.parametrize("name", READ)
def test_read(name: str) -> None:
    given, expected = READ[name]
    unread = UnreadNames()
    assert written(convert(given, unread)) == expected
    assert not unread.drain()
    planted = given | {"mood": "good"}
    assert written(convert(planted, unread)) == expected
    assert list(unread.drain()) == ["mood"]
    with pytest.raises(RecordError, match="unused column or key"):
        convert(planted, UnreadNames(strict=True))


@pytest.mark.parametrize("name", MAPPED)
def test_read_by_the_columns_that_are_proposed(name: str) -> None:
    given, columns, expected = MAPPED[name]
    with pytest.raises(RecordError) as caught:
        convert(given)
    assert caught.value.detail.endswith("--columns " + ",".join("=".join(pair) for pair in columns.items()))
    assert written(convert(given, columns=columns)) == expected


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_what_it_is(name: str) -> None:
    given, reason = REFUSED[name]
    with pytest.raises(RecordError) as caught:
        convert(given)
    assert caught.value.reason == reason


def test_shards() -> None:
    """A sample of WebDataset: its members' texts, and media that no text marks."""
    media = {"jpg": MediaRef(name="1.jpg", data=b"J")}
    for given in ({"text": "b"}, {"caption": "b"}, {"text": "b", "caption": "b", "width": 9, "url": "u", "key": "k"}):
        record = to_record(Entry(origin="x", value=given, media=media), source="s", options=SchemaOptions())
        assert written(record) == "|[image 1.jpg]|b"
