"""Records without turns -> messages: questions and answers, instructions, running text, or token ids made by others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.modality import MODALITIES
from packtrain.core.values import Message, Text, TokenIds
from packtrain.records.schemas.chat import ConvertedRecord, as_list, read_messages
from packtrain.records.schemas.recognise import LOSS_MASKS, OWN_FUNCTION, looks_like
from packtrain.records.schemas.references import MediaPool
from packtrain.records.schemas.tools import checked_text, unfold
from packtrain.records.source import RawRecord

_APPROPRIATELY = "Write a response that appropriately completes the request."


def prompt_completion_schema(value: RawRecord, pool: MediaPool | None) -> ConvertedRecord:
    """`prompt` and `completion`, which carries loss: strings are plain text; beside media, or as lists, turns."""
    if pool is None and isinstance(value["prompt"], str) and isinstance(value["completion"], str):
        return _plain_pair(value["prompt"], value["completion"])
    prompt = _turns(value["prompt"], "prompt", "user")
    completion = _turns(value["completion"], "completion", "assistant")
    if not prompt or not completion:
        raise RecordError("schema", "no messages", "empty prompt or completion")
    (prompt_turns, tools), (completion_turns, completion_tools) = unfold(prompt), unfold(completion)
    messages = read_messages([*prompt_turns, *completion_turns], pool)
    return ConvertedRecord(
        tuple(
            replace(message, train=False) if position < len(prompt_turns) and message.role == "assistant" else message
            for position, message in enumerate(messages)
        ),
        tools=(*tools, *completion_tools),
    )


def _plain_pair(prompt: str, completion: str, how: str = "plain text") -> ConvertedRecord:
    """A text and how it goes on, which pass through no chat template."""
    pairs = (("user", prompt), ("assistant", completion))
    return ConvertedRecord(
        tuple([Message(role=role, parts=(Text(checked_text(text)),)) for role, text in pairs]), plain=True, how=how
    )


def _turns(item: object, name: str, role: str) -> list[Any]:
    if isinstance(item, str):
        return [{"role": role, "content": item}]
    return list(as_list(item, name))


def instruction_schema(value: RawRecord, pool: MediaPool | None) -> ConvertedRecord:
    """Alpaca: `instruction`, optional `input` below it, `output`; optional `history` of earlier pairs."""
    question = _string(value, "instruction")
    extra = _string(value, "input") if value.get("input") is not None else ""
    if extra:
        question = f"{question}\n{extra}" if question else extra
    turns: list[dict[str, str]] = []
    for pair in as_list(value.get("history") or [], "history"):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RecordError("schema", "history is not a list of pairs", type(pair).__name__)
        turns += _exchange(*(_string({"history": text}, "history") for text in pair))
    messages = read_messages([*turns, *_exchange(question, _string(value, "output"))], pool)
    return ConvertedRecord(messages, how="input one line below instruction" if extra else "")


def alpaca_schema(value: RawRecord, pool: MediaPool | None) -> ConvertedRecord:
    """The same columns in the prompt that Alpaca was trained with: plain text, no chat template."""
    if pool is not None or value.get("history"):
        raise RecordError("schema", "media or history in Alpaca's prompt", "schema instruction takes them")
    extra = _string(value, "input") if value.get("input") is not None else ""
    sections = {"Instruction": _string(value, "instruction"), "Input": extra}
    paired = ", paired with an input that provides further context" if sections["Input"] else ""
    lead = f"Below is an instruction that describes a task{paired}. {_APPROPRIATELY}"
    written = "".join(f"\n\n### {name}:\n{text}" for name, text in sections.items() if text or name == "Instruction")
    return _plain_pair(f"{lead}{written}\n\n### Response:\n", _string(value, "output"), "### Instruction")


def question_answer_schema(value: RawRecord, pool: MediaPool | None) -> ConvertedRecord:
    """`question` and `answer`."""
    return ConvertedRecord(read_messages(_exchange(_string(value, "question"), _string(value, "answer")), pool))


def text_schema(value: RawRecord, pool: MediaPool | None) -> ConvertedRecord:
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


def _string(value: RawRecord, name: str) -> str:
    item = value.get(name)
    if not isinstance(item, str):
        detail = f"{name}: {type(item).__name__}, not text; {looks_like(value) or OWN_FUNCTION}"
        raise RecordError("schema", "a column has the wrong type", detail)
    return item


IGNORED = -100  # in `labels`
_LARGEST = 2**31 - 1
# Columns of made batches: a sample that needs them is not made of these ids alone.
_OF_MEDIA = (
    *(name for one in MODALITIES.values() for name in (one.features, one.sizes) if name is not None),
    "mm_inputs",
)
_OF_PACKS = ("seq_lengths", "cu_seqlens", "cu_seq_lens", "seq_idx", "sequence_ids", "segment_ids")
_OF_TOKENS = ("input_ids", "labels", "attention_mask", "position_ids", "special_tokens_mask", *LOSS_MASKS, *_OF_PACKS)


def tokens_schema(value: RawRecord, pool: MediaPool | None) -> ConvertedRecord:
    """`input_ids`, with `labels` and masks of 0 and 1 where there are any; without them all tokens carry loss."""
    ids = _numbers(value["input_ids"], "input_ids")
    if not ids:
        raise RecordError("schema", "no tokens", "input_ids is empty")
    if min(ids) < 0 or max(ids) > _LARGEST:
        raise RecordError("schema", "an id outside the vocabulary", f"input_ids: {_first_outside(ids)}")
    if pool is not None or any(_has_value(value.get(name)) for name in _OF_MEDIA):
        raise RecordError("schema", "media beside input_ids", "images need the processor: use messages")
    _refuse_packs(value, len(ids))
    supervised = [True] * len(ids)
    for name, mask in _masks(value, ids):
        if len(mask) != len(ids):
            raise RecordError("schema", "columns of different lengths", f"{len(ids)} input_ids, {len(mask)} {name}")
        supervised = [one and bool(other) for one, other in zip(supervised, mask, strict=True)]
    return ConvertedRecord((), tokens=TokenIds(ids=ids, supervised=_spans(supervised)))


def _masks(value: RawRecord, ids: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """The loss mask of each column that has one."""
    if value.get("labels") is not None:
        labels = _numbers(value["labels"], "labels")
        for at, (label, own) in enumerate(zip(labels, ids, strict=False)):
            if label not in (own, IGNORED):
                detail = f"token {at}: label {label}, id {own}; the model shifts labels itself"
                raise RecordError("schema", "a label is neither its token nor -100", detail)
        yield "labels", [label != IGNORED for label in labels]
    for name in LOSS_MASKS:
        if value.get(name) is not None:
            mask = _numbers(value[name], name)
            if not set(mask) <= {0, 1}:
                raise RecordError("schema", "a loss mask is neither 0 nor 1", f"{name}: {max(mask)}")
            yield name, mask


def _refuse_packs(value: RawRecord, count: int) -> None:
    """Refuse what is padded, or several samples in one: they would see each other."""
    mask = value.get("attention_mask")
    if mask is not None and (mask := _numbers(mask, "attention_mask")) != (1,) * count:
        ones = len(mask) == count and set(mask) <= {0, 1}
        detail = f"{mask.count(0)} zeros: leave padding out" if ones else f"{len(mask)} numbers for {count} ids"
        raise RecordError("schema", "attention_mask is not 1 for every token", detail)
    positions = value.get("position_ids")
    if positions is not None and _numbers(positions, "position_ids") != tuple(range(count)):
        raise RecordError("schema", "samples that are packed already", "position_ids do not count from 0: unpack them")
    for name in _OF_PACKS:
        item = value.get(name)
        if isinstance(item, list | tuple) and item and list(item) not in ([count], [0, count], [0] * count):
            raise RecordError("schema", "samples that are packed already", f"column {name}: unpack them")
    for name, item in value.items():
        known = name in _OF_TOKENS or (name == "token_type_ids" and isinstance(item, list) and not any(item))
        if not known and isinstance(item, list | tuple) and len(item) == count > 1:
            detail = f"column {name}; loss masks are {', '.join(LOSS_MASKS)}: --columns renames it"
            raise RecordError("schema", "an unknown column with one number per token", detail)


def _numbers(item: object, name: str) -> tuple[int, ...]:
    if not isinstance(item, list | tuple):
        raise RecordError("schema", "a column has the wrong type", f"{name}: {type(item).__name__}, not a list")
    for number in item:
        if type(number) is not int and not (type(number) is bool and name in LOSS_MASKS):
            raise RecordError("schema", "a column has the wrong type", f"{name}: {ascii(number)[:40]}, not an integer")
    return tuple(item)


def _has_value(item: object) -> bool:
    return item is not None and (not isinstance(item, list | tuple) or bool(item))


def _first_outside(ids: Sequence[int]) -> int:
    return next(one for one in ids if not 0 <= one <= _LARGEST)


def _spans(marked: Sequence[bool]) -> tuple[tuple[int, int], ...]:
    """Start and end of each span of True.

    >>> _spans([True, False, True, True])
    ((0, 1), (2, 4))
    """
    spans, at = [], 0
    for is_marked, run in itertools.groupby(marked):
        begin, at = at, at + sum(1 for _ in run)
        if is_marked:
            spans.append((begin, at))
    return tuple(spans)
