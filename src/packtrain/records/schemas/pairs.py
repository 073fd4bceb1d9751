"""Questions with answers and running text -> messages: prompt/completion, instructions, question/answer, `text`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.values import Message, Text
from packtrain.records.schemas.chat import ConvertedRecord, as_list, read_messages
from packtrain.records.schemas.recognise import OWN_FUNCTION, looks_like
from packtrain.records.schemas.references import MediaPool
from packtrain.records.schemas.tools import checked_text, unfolded

_APPROPRIATELY = "Write a response that appropriately completes the request."


def prompt_completion_schema(value: Mapping[str, object], pool: MediaPool | None) -> ConvertedRecord:
    """`prompt` and `completion`, which carries loss: strings are plain text; beside media, or as lists, turns."""
    if pool is None and isinstance(value["prompt"], str) and isinstance(value["completion"], str):
        return _continued(value["prompt"], value["completion"])
    prompt = _turns(value["prompt"], "prompt", "user")
    completion = _turns(value["completion"], "completion", "assistant")
    if not prompt or not completion:
        raise RecordError("schema", "no messages", "empty prompt or completion")
    (asked, tools), (answered, more) = unfolded(prompt), unfolded(completion)
    messages = read_messages([*asked, *answered], pool)
    return ConvertedRecord(
        tuple(
            replace(message, train=False) if position < len(asked) and message.role == "assistant" else message
            for position, message in enumerate(messages)
        ),
        tools=(*tools, *more),
    )


def _continued(prompt: str, completion: str, how: str = "plain text") -> ConvertedRecord:
    """A text and how it goes on, which pass through no chat template."""
    pairs = (("user", prompt), ("assistant", completion))
    return ConvertedRecord(
        tuple([Message(role=role, parts=(Text(checked_text(text)),)) for role, text in pairs]), plain=True, how=how
    )


def _turns(item: object, name: str, role: str) -> list[Any]:
    if isinstance(item, str):
        return [{"role": role, "content": item}]
    return list(as_list(item, name))


def instruction_schema(value: Mapping[str, Any], pool: MediaPool | None) -> ConvertedRecord:
    """Alpaca: `instruction`, optional `input` below it, `output`; optional `history` of earlier pairs."""
    question = _string(value, "instruction")
    given = _string(value, "input") if value.get("input") is not None else ""
    if given:
        question = f"{question}\n{given}" if question else given
    turns: list[dict[str, str]] = []
    for pair in as_list(value.get("history") or [], "history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RecordError("schema", "history is not a list of pairs", type(pair).__name__)
        turns += _exchange(*(_string({"history": text}, "history") for text in pair))
    messages = read_messages([*turns, *_exchange(question, _string(value, "output"))], pool)
    return ConvertedRecord(messages, how="input one line below instruction" if given else "")


def alpaca_schema(value: Mapping[str, object], pool: MediaPool | None) -> ConvertedRecord:
    """The same columns in the prompt that Alpaca was trained with: plain text, no chat template."""
    if pool is not None or value.get("history"):
        raise RecordError("schema", "media or history in Alpaca's prompt", "schema instruction takes them")
    given = _string(value, "input") if value.get("input") is not None else ""
    sections = {"Instruction": _string(value, "instruction"), "Input": given}
    paired = ", paired with an input that provides further context" if sections["Input"] else ""
    lead = f"Below is an instruction that describes a task{paired}. {_APPROPRIATELY}"
    written = "".join(f"\n\n### {name}:\n{text}" for name, text in sections.items() if text or name == "Instruction")
    return _continued(f"{lead}{written}\n\n### Response:\n", _string(value, "output"), "### Instruction")


def question_answer_schema(value: Mapping[str, object], pool: MediaPool | None) -> ConvertedRecord:
    """`question` and `answer`."""
    return ConvertedRecord(read_messages(_exchange(_string(value, "question"), _string(value, "answer")), pool))


def text_schema(value: Mapping[str, object], pool: MediaPool | None) -> ConvertedRecord:
    """`text` or `caption`: running text; beside media it is their caption, asked for by the media alone."""
    column = "caption" if value.get("text") is None else "text"
    text = checked_text(_string(value, column))
    if not text:
        raise RecordError("schema", "empty text")
    answer = Message(role="assistant", parts=(Text(text),))
    if pool is None or not pool.left():
        return ConvertedRecord((answer,), plain=True, how="plain text")
    if any(f"<{kind}>" in text for kind in pool.given):
        raise RecordError("schema", "markers in plain text are not supported", "use messages for interleaved media")
    return ConvertedRecord((Message(role="user", parts=tuple(pool.take_rest())), answer))


def _exchange(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _string(value: Mapping[str, Any], name: str) -> str:
    item = value.get(name)
    if not isinstance(item, str):
        detail = f"{name}: {type(item).__name__}, not text; {looks_like(value) or OWN_FUNCTION}"
        raise RecordError("schema", "a column has the wrong type", detail)
    return item
