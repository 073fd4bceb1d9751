"""Questions with answers and running text -> messages: prompt/completion, instructions, question/answer, `text`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.values import Message, Text
from packtrain.records.schemas.chat import Draft, as_list, read_messages
from packtrain.records.schemas.references import MediaPool
from packtrain.records.schemas.tools import checked, unfolded


def prompt_completion_schema(value: Mapping[str, Any], pool: MediaPool | None) -> Draft:
    """`prompt` and `completion`, strings or lists of messages; only the completion carries loss."""
    prompt = _turns(value["prompt"], "prompt", "user")
    completion = _turns(value["completion"], "completion", "assistant")
    if not prompt or not completion:
        raise RecordError("schema", "no messages", "empty prompt or completion")
    (asked, tools), (answered, more) = unfolded(prompt), unfolded(completion)
    messages = read_messages([*asked, *answered], pool)
    return Draft(
        tuple(
            replace(message, train=False) if position < len(asked) and message.role == "assistant" else message
            for position, message in enumerate(messages)
        ),
        tools=(*tools, *more),
    )


def _turns(item: object, name: str, role: str) -> list[Any]:
    if isinstance(item, str):
        return [{"role": role, "content": item}]
    return list(as_list(item, name))


def instruction_schema(value: Mapping[str, Any], pool: MediaPool | None) -> Draft:
    """Alpaca: `instruction`, optional `input` below it, `output`; optional `history` of earlier pairs."""
    question = _string(value["instruction"], "instruction")
    given = value.get("input")
    if given is not None and _string(given, "input"):
        question = f"{question}\n{given}" if question else given
    turns: list[dict[str, str]] = []
    for pair in as_list(value.get("history") or [], "history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RecordError("schema", "history is not a list of pairs", type(pair).__name__)
        turns += _exchange(_string(pair[0], "history"), _string(pair[1], "history"))
    return Draft(read_messages([*turns, *_exchange(question, _string(value["output"], "output"))], pool))


def question_answer_schema(value: Mapping[str, Any], pool: MediaPool | None) -> Draft:
    """`question` and `answer`."""
    question, answer = _string(value["question"], "question"), _string(value["answer"], "answer")
    return Draft(read_messages(_exchange(question, answer), pool))


def text_schema(value: Mapping[str, Any], pool: MediaPool | None) -> Draft:
    """`text` or `caption`: running text; beside media it is their caption, asked for by the media alone."""
    found = value.get("text")
    text = checked(_string(value.get("caption") if found is None else found, "text"))
    if not text:
        raise RecordError("schema", "empty text")
    answer = Message(role="assistant", parts=(Text(text),))
    if pool is None or not pool.left():
        return Draft((answer,), plain=True)
    if any(f"<{kind}>" in text for kind in pool.given):
        raise RecordError("schema", "markers in plain text are not supported", "use messages for interleaved media")
    return Draft((Message(role="user", parts=tuple(pool.take_rest())), answer))


def _exchange(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _string(item: object, name: str) -> str:
    if not isinstance(item, str):
        raise RecordError("schema", "a column has the wrong type", f"{name}: {type(item).__name__}, not text")
    return item
