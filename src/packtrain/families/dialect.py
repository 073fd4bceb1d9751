"""How a chat template takes what messages have beside their content: told by trying it on words that no record has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from packtrain.core.errors import RecordError
from packtrain.core.values import Message, Record, Variables
from packtrain.families.chat_template import ChatMessage, ChatTemplate, Messages

MessageContent = str | list[ChatMessage]
# Under which of these a template looks for reasoning differs; transformers, too, hands it over under several.
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_WORDS = {"tools": "qzdefined", "tool calls": "qzvalue", "a tool's answer": "qzresult"}
_THOUGHT = "qzthought"
_CALL = {
    "id": "qzcall123",
    "type": "function",
    "function": {"name": "qzfound", "arguments": {"a": _WORDS["tool calls"]}},
}
_FUNCTION = {
    "name": "qzfound",
    "description": _WORDS["tools"],
    "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "b"}}, "required": ["a"]},
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one template does with reasoning, and what it leaves out of a conversation with tools."""

    reasoning: Literal["keys", "part", "tags", "none"]
    tags: tuple[str, str] = ("", "")  # what is written around reasoning inside the content
    unwritten: tuple[str, ...] = ()  # keys of _WORDS
    variables: frozenset[str] = frozenset()
    plain_answers: bool = False  # a tool's answer of text alone is one string, though other contents are lists of parts

    def require(self, record: Record) -> None:
        """Refuse what the template would leave out without a word."""
        extras = [message.extras for message in record.messages if message.extras is not None]
        if self.reasoning == "none" and any(one.reasoning for one in extras):
            raise RecordError("template", "the chat template does not write reasoning")
        has = {
            "tools": record.variables is not None and bool(record.variables.tools),
            "tool calls": any(one.tool_calls for one in extras),
            "a tool's answer": any(message.role == "tool" for message in record.messages),
        }
        for name in self.unwritten:
            if has[name]:
                raise RecordError("template", f"the chat template does not write {name}")
        for name, _ in record.variables.kwargs if record.variables is not None else ():
            if name not in self.variables:
                raise RecordError("template", "the chat template has no such variable", f"chat_template_kwargs: {name}")

    def written(self, message: Message, content: MessageContent) -> ChatMessage:
        """A message as the template takes it."""
        written: ChatMessage = {"role": message.role, "content": content}
        if self.plain_answers and message.role == "tool" and not isinstance(content, str):
            texts = [part["text"] for part in content if part["type"] == "text"]
            written["content"] = "".join(texts) if len(texts) == len(content) else content
        extras = message.extras
        if extras is None:
            return written
        if extras.reasoning:
            if self.reasoning == "keys":
                written |= dict.fromkeys(_REASONING_KEYS, extras.reasoning)
            elif self.reasoning == "part":
                written["content"] = [{"type": "thinking", "thinking": extras.reasoning}, *_parts(content)]
            else:
                written["content"] = _begun(content, extras.reasoning.join(self.tags))
        if extras.tool_calls:
            written["tool_calls"] = [
                {
                    **({} if call.id is None else {"id": call.id}),
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.loads(call.arguments)},
                }
                for call in extras.tool_calls
            ]
        named = {"tool_call_id": extras.tool_call_id, "name": extras.name}
        return written | {key: item for key, item in named.items() if item is not None}


def template_variables(variables: Variables | None) -> ChatMessage:
    """What a record gives to the chat template beside its messages, as `apply_chat_template` takes it."""
    if variables is None:
        return {}
    return {**dict(variables.kwargs), **({"tools": json.loads(variables.tools)} if variables.tools else {})}


def dialect_of(template: ChatTemplate, *, string_content: bool) -> Dialect:
    """The dialect of a template."""

    def content(text: str) -> MessageContent:
        return text if string_content else [{"type": "text", "text": text}]

    asked: ChatMessage = {"role": "user", "content": content("qzasked")}
    answered = {"role": "assistant", "content": content("qzanswered")}
    called = {"role": "assistant", "content": content(""), "tool_calls": [_CALL]}
    result = {
        "role": "tool",
        "tool_call_id": _CALL["id"],
        "name": "qzfound",
        "content": content(_WORDS["a tool's answer"]),
    }
    with_tools = template.with_variables({"tools": [{"type": "function", "function": _FUNCTION}]})
    opening: ChatMessage = {"role": "system", "content": content("qzopened")}

    def told(answer: ChatMessage) -> str:
        conversation = [asked, called, answer, answered]
        return _tried(with_tools, conversation) or _tried(with_tools, [opening, *conversation])

    text = told(result)
    plain_answers = False
    if not string_content and _is_quoted(text):
        plain = told({**result, "content": _WORDS["a tool's answer"]})
        plain_answers = not _is_quoted(plain)
        text = plain if plain_answers else text
    unwritten = tuple(name for name, word in _WORDS.items() if text and word not in text)
    thoughts = dict.fromkeys(_REASONING_KEYS, _THOUGHT)
    part = [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": "qzanswered"}]
    by_keys: list[list[ChatMessage]] = [
        [asked, {**answered, **thoughts}],
        [asked, {**called, **thoughts}, result, answered],
    ]
    by_part = _tried(template, [asked, {**answered, "content": part}])
    tags = ("", "")
    if any(_THOUGHT in _tried(with_tools, messages) for messages in by_keys):
        reasoning: Literal["keys", "part", "tags", "none"] = "keys"
    elif _THOUGHT in by_part and "'thinking'" not in by_part and '"thinking"' not in by_part:
        reasoning = "part"
    elif template.looks_up & {"reasoning_content", "reasoning"}:
        reasoning = "keys"  # only where a variable asks for it
    elif any("</think>" in literal for literal in template.literals):
        reasoning = "tags"
        lines = any("<think>\n" in literal for literal in template.written)
        tags = ("<think>\n", "\n</think>\n\n") if lines else ("<think>", "</think>")
    else:
        reasoning = "none"
    return Dialect(reasoning, tags, unwritten, template.variables, plain_answers)


def _is_quoted(text: str) -> bool:
    """Is a tool's answer not written, or as the list of parts that it came in?"""
    before, mark, _ = text.partition(_WORDS["a tool's answer"])
    return not mark or before.rstrip(" '\"").endswith(("'text':", '"text":'))


def _tried(template: ChatTemplate, messages: Messages) -> str:
    """What the template makes of them; nothing where it refuses them, which says nothing about a record."""
    try:
        return template.text(messages)
    except RecordError:
        return ""


def _parts(content: MessageContent) -> list[dict[str, str]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return content


def _begun(content: MessageContent, beginning: str) -> MessageContent:
    if isinstance(content, str):
        return beginning + content
    if content and content[0]["type"] == "text":
        return [{"type": "text", "text": beginning + content[0]["text"]}, *content[1:]]
    return [{"type": "text", "text": beginning}, *content]
