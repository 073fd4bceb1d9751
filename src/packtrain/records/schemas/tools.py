"""Tool calls, tool definitions, reasoning and template arguments, however they are written -> the values of a record.

Turns of other systems are first written as OpenAI writes them:

    {"role": "tool_call", "content": '{"name": ...}'}           ms-swift, ShareGPT's function_call
    {"content": [{"type": "thinking"}, {"type": "tool_use"}]}   Anthropic, LLaMA-Factory v1
 -> {"role": "assistant", "content": ..., "reasoning_content": ..., "tool_calls": [...]}
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.values import Extras, Scalar, ToolCall, Variables
from packtrain.records.schemas.recognise import LOSS_FLAGS
from packtrain.records.source import RawRecord

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
EXTRA_KEYS = ("tool_calls", "function_call", *REASONING_KEYS)
ANSWER_KEYS = ("tool_call_id", "name")  # of a tool's answer
TOOL_COLUMNS = ("tools", "functions")
KWARGS_COLUMN = "chat_template_kwargs"
CALL_ROLES = frozenset(("tool_call", "function_call"))
# Types of parts that are no content, and the field that holds what they are; v1 of LLaMA-Factory has `value` for all.
BLOCKS: Mapping[str, str] = {
    "reasoning": "reasoning",
    "thinking": "thinking",
    "tool_use": "input",
    "tool_call": "tool_call",
    "tool_calls": "tool_calls",
    "tool_result": "content",
    "tools": "tools",
}
BLOCK_KEYS = frozenset((*BLOCKS.values(), "type", "value", "id", "name", "tool_use_id", "signature", "cache_control"))
# Arguments of `apply_chat_template` itself.
_RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "sanitize_control_tokens", "padding", "truncation", "max_length"),
        *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "processor_kwargs"),
        *("load_audio_from_video", "self"),
    )
)
_MOST_KWARGS = 32
_LONGEST = 10_000  # characters of an argument of the template

_PART_LOSS = "loss on a part of a message is not supported"
_EXCHANGE = ("user", "human", "assistant")  # keys of a turn that holds a question and its answer
_CONTENT = ("role", "content", "from", "value")

# ---- turns


def unfold(turns: Sequence[Any]) -> tuple[Sequence[Any], list[Any]]:
    """The turns in OpenAI's form, and the tool definitions that they contained."""
    for turn in turns:
        if _is_folded(turn):
            break
    else:
        return turns, []
    unfolded_turns: list[Any] = []
    tools: list[Any] = []
    for turn in turns:
        if not _is_folded(turn):
            unfolded_turns.append(turn)
        elif _is_exchange(turn):
            rest = {key: item for key, item in turn.items() if key not in _EXCHANGE}
            question = turn.get("user") if turn.get("user") is not None else turn.get("human")
            unfolded_turns += [{**rest, "role": "user", "content": question}]
            unfolded_turns += [{**rest, "role": "assistant", "content": turn["assistant"]}]
        elif (role := _role(turn)) in CALL_ROLES:
            _add_calls(unfolded_turns, turn, role)
        else:
            unfolded_turns += _from_blocks(turn, tools)
    return unfolded_turns, tools


def _is_folded(turn: object) -> bool:
    if not isinstance(turn, dict) and not isinstance(turn, Mapping):
        return False
    content = turn.get("content") or turn.get("value")
    if isinstance(content, str):
        return _role(turn) in CALL_ROLES
    if not isinstance(content, list | tuple):
        return _is_exchange(turn)
    for part in content:
        if isinstance(part, dict | Mapping) and isinstance(kind := part.get("type"), str) and kind in BLOCKS:
            return True
    return False


def _is_exchange(turn: RawRecord) -> bool:
    """A question and its answer in one: nanoVLM's {user, assistant}, ms-swift's {human, assistant}."""
    return "assistant" in turn and ("user" in turn or "human" in turn)


def _role(turn: RawRecord) -> Any:
    role = turn.get("role") or turn.get("from")
    return role if isinstance(role, str) else None


def _add_calls(turns: list[Any], turn: RawRecord, role: str) -> None:
    """A turn that is calls. ms-swift's belong to the answer before them, and to those beside them."""
    content = turn.get("content") or turn.get("value")
    calls = parse_json(content, "a tool call is not JSON")
    calls = list(calls) if isinstance(calls, list | tuple) else [calls]
    rest = {key: item for key, item in turn.items() if key not in _CONTENT}
    previous = turns[-1] if turns else None
    if role == "tool_call" and isinstance(previous, Mapping) and _role(previous) in ("assistant", "gpt"):
        if any(previous.get(flag) != rest.get(flag) for flag in LOSS_FLAGS):
            raise RecordError("schema", _PART_LOSS, "an answer and its tool calls")
        earlier = parse_json(previous.get("tool_calls") or [], "a tool call is not JSON")
        if not isinstance(earlier, list | tuple):
            raise RecordError("schema", "a tool call is not an object", f"tool_calls: {type(earlier).__name__}")
        turns[-1] = _merge_keys(rest, {**previous, "tool_calls": [*earlier, *calls]})
    else:
        turns.append(_merge_keys(rest, {"role": "assistant", "content": None, "tool_calls": calls}))


def _merge_keys(rest: RawRecord, extras: RawRecord) -> dict[str, Any]:
    """Merge the converted keys of a turn with the rest, which must not repeat them."""
    for key in EXTRA_KEYS:
        if key in extras and rest.get(key):
            raise RecordError("schema", "two kinds of tool calls or reasoning in one message", key)
    return {**rest, **extras}


def _from_blocks(turn: RawRecord, tools: list[Any]) -> Iterator[dict[str, Any]]:
    """Split a message into one turn for its content and one for each tool's answer, in order."""
    content = turn.get("content") or turn.get("value")
    assert content is not None
    rest = {key: item for key, item in turn.items() if key not in _CONTENT}
    parts: list[Any] = []
    message: dict[str, Any] = {}
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in BLOCKS:
            if "tool_calls" in message:
                raise RecordError("schema", "a part after a tool call", "templates write calls after the content")
            parts.append(part)
            continue
        if any(part.get(flag) is not None for flag in LOSS_FLAGS):
            raise RecordError("schema", _PART_LOSS, f"a flag of a part of type {kind}")
        item = part.get(BLOCKS[kind])
        item = part.get("value") if item is None else item
        if kind in ("reasoning", "thinking"):
            if message or parts:
                raise RecordError("schema", "reasoning after the answer has started", "templates write it before")
            message["reasoning_content"] = item
        elif kind == "tools":
            definitions = parse_json(item, "tool definitions are not JSON") or []
            if not isinstance(definitions, list | tuple):
                raise RecordError("schema", "tool definitions are not a list", type(definitions).__name__)
            tools += definitions
        elif kind == "tool_result":
            if parts:
                yield {**rest, "role": _role(turn), "content": parts}
                parts = []
            yield {**rest, "role": "tool", "content": item if item is not None else "", **_answer_id(part)}
        elif kind == "tool_use":
            call = {"id": part.get("id"), "name": part.get("name"), "arguments": item}
            message.setdefault("tool_calls", []).append(call)
        else:
            calls = parse_json(item, "a tool call is not JSON")
            message.setdefault("tool_calls", []).extend(calls if isinstance(calls, list | tuple) else [calls])
    if parts or message:
        yield _merge_keys(rest, {**message, "role": _role(turn), "content": parts or None})


def _answer_id(part: RawRecord) -> dict[str, Any]:
    return {"tool_call_id": part["tool_use_id"]} if part.get("tool_use_id") is not None else {}


# ---- what a message has beside its content


def read_extras(turn: RawRecord, role: str) -> Extras | None:
    """Tool calls and reasoning of an answer, id and name of a tool's answer."""
    if role == "tool":
        number, name = (_text(turn.get(key), key) for key in ANSWER_KEYS)
        return Extras(tool_call_id=number, name=name) if number is not None or name is not None else None
    calls, older = turn.get("tool_calls"), turn.get("function_call")
    if older:
        if calls:
            raise RecordError(
                "schema", "two kinds of tool calls or reasoning in one message", "tool_calls and function_call"
            )
        calls = [older]
    calls = parse_json(calls, "a tool call is not JSON") if isinstance(calls, str) else calls
    if calls and not isinstance(calls, list | tuple):
        raise RecordError("schema", "a tool call is not an object", f"tool_calls: {type(calls).__name__}")
    reasoning = {key: text for key in REASONING_KEYS if (text := _text(turn.get(key), key))}
    if len(set(reasoning.values())) > 1:
        raise RecordError("schema", "two kinds of tool calls or reasoning in one message", " and ".join(reasoning))
    if not calls and not reasoning:
        return None
    if role != "assistant":
        raise RecordError("schema", "tool calls or reasoning of a role that is not the assistant's", role)
    return Extras(tool_calls=tuple(map(_call, calls or ())), reasoning=next(iter(reasoning.values()), None))


def _text(item: object, key: str) -> str | None:
    if item is None:
        return None
    if not isinstance(item, str):
        raise RecordError("schema", "a field of a message is not text", f"{key}: {type(item).__name__}")
    return checked_text(item)


def _call(item: object) -> ToolCall:
    if not isinstance(item, Mapping):
        raise RecordError("schema", "a tool call is not an object", type(item).__name__)
    function = item.get("function")
    function = item if function is None else function
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise RecordError("schema", "a tool call has no name", f"keys {list(item)[:5]!a}")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments = parse_json(arguments, "a tool call's arguments are not JSON")
    if arguments is None or arguments == "":
        arguments = {}
    if not isinstance(arguments, Mapping):
        raise RecordError("schema", "a tool call's arguments are not an object", f"{name[:60]!a}")
    return ToolCall(checked_text(name), _json(arguments), _text(item.get("id"), "id"))


# ---- what a record has beside its messages


def read_variables(value: RawRecord, in_messages: Sequence[Any]) -> Variables | None:
    """The tool definitions and template arguments of a record; `in_messages` are definitions that its messages hold."""
    columns = [name for name in TOOL_COLUMNS if value.get(name)]
    if len(columns) + bool(in_messages) > 1:
        raise RecordError("schema", "two columns of tool definitions", " and ".join(columns) or "columns and parts")
    tools = parse_json(value[columns[0]], "tool definitions are not JSON") if columns else list(in_messages)
    if not isinstance(tools, list | tuple):
        raise RecordError("schema", "tool definitions are not a list", type(tools).__name__)
    kwargs = _kwargs(value.get(KWARGS_COLUMN))
    if not tools and not kwargs:
        return None
    return Variables(_json([_definition(tool) for tool in tools]) if tools else "", kwargs)


def _definition(tool: object) -> object:
    """A tool as OpenAI and transformers have it; a bare function (glaive, Anthropic, `functions`) is put into one."""
    tool = parse_json(tool, "tool definitions are not JSON") if isinstance(tool, str) else tool
    if not isinstance(tool, Mapping):
        raise RecordError("schema", "a tool definition is not an object", type(tool).__name__)
    if "function" in tool or not isinstance(tool.get("name"), str):
        return tool
    names = {"input_schema": "parameters"}
    return {"type": "function", "function": {names.get(key, key): item for key, item in tool.items()}}


def _kwargs(item: object) -> tuple[tuple[str, Scalar], ...]:
    if isinstance(item, str) and item:
        item = parse_json(item, "chat_template_kwargs are not JSON")
    if not item:
        return ()
    if not isinstance(item, Mapping) or len(item) > _MOST_KWARGS:
        raise RecordError("schema", "chat_template_kwargs are not a small object", f"{type(item).__name__}")
    for name, one in item.items():
        if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or name in _RESERVED:
            raise RecordError("schema", "a name in chat_template_kwargs is not a variable's", f"{name!a}"[:60])
        if not isinstance(one, str | int | float | None) or len(str(one)) > _LONGEST:
            raise RecordError("schema", "a value in chat_template_kwargs is not one text, number or flag", name[:60])
        checked_text(str(one))
    return tuple(item.items())


# ---- JSON


def without_nulls(value: RawRecord, turns: Sequence[str]) -> RawRecord:
    """A row of a table less the keys that it has only because other rows have them, where they would be written out."""
    cleaned = {name: _drop_nulls(value[name]) for name in (*TOOL_COLUMNS, KWARGS_COLUMN) if value.get(name)}
    for name in turns:
        if isinstance(value.get(name), list | tuple):
            cleaned[name] = [
                _drop_nulls(turn)
                if isinstance(turn, Mapping) and (turn.get("tool_calls") or _is_folded(turn))
                else turn
                for turn in value[name]
            ]
    return {**value, **cleaned} if cleaned else value


def _drop_nulls(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {key: _drop_nulls(one) for key, one in item.items() if one is not None}
    return [_drop_nulls(one) for one in item] if isinstance(item, list | tuple) else item


def parse_json(item: Any, reason: str) -> Any:
    """Parse a text as JSON; return anything else unchanged."""
    if not isinstance(item, str):
        return item
    try:
        return json.loads(item)
    except (ValueError, RecursionError) as error:
        raise RecordError("schema", reason, str(error)[:100]) from None


def _json(item: object) -> str:
    """The text of JSON that a value is kept as."""
    try:
        return checked_text(json.dumps(item, ensure_ascii=False, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError("schema", "a tool's values are not JSON", str(error)[:100]) from None


def _plain(item: object) -> Any:
    if isinstance(item, Mapping):
        return dict(item)
    raise TypeError(f"{type(item).__name__} is not JSON")


def checked_text(text: str) -> str:
    """The text itself; lone surrogates (legal in JSON) cannot be tokenized or written."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RecordError("schema", "text is not valid Unicode", f"position {error.start}") from None
    return text
