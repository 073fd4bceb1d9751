"""Where the assistant's turns stand in a rendered conversation: the characters that carry loss.

A turn is everything the model itself would have to write: from the end of the generation prompt to the end of the
turn's closing token, without the white space that a template puts after it.

    <|im_start|>user\\nHow many?<|im_end|>\\n<|im_start|>assistant\\nThree.<|im_end|>\\n
                                                                  ^^^^^^^^^^^^^^^^
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.families.chat_template import ChatTemplate, Rendered

Span = tuple[int, int]
_ANOTHER = "qz\ue0f2another"  # a text that no record has


@dataclass(frozen=True, slots=True)
class _Frame:
    """The literal text around an assistant turn, found once per template; empty where it cannot be told."""

    opening: str
    closing: str


class TurnFinder:
    """Finds assistant turns by the literal frame around them, and by rendering prefixes where that is ambiguous."""

    def __init__(self, template: ChatTemplate, *, string_content: bool, specials: Sequence[str] = ()) -> None:
        self._template = template
        self._specials = specials
        self._string_content = string_content
        self._frame = self._probe()

    def spans(self, rendered: Rendered, messages: Sequence[Mapping[str, Any]]) -> tuple[Span, ...]:
        """One span for each assistant message, in order."""
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if rendered.generated is not None and len(rendered.generated) == len(turns):
            return rendered.generated
        return self._by_frame(rendered.text, [messages[i] for i in turns]) or tuple(
            self._by_prefix(rendered.text, messages, i) for i in turns
        )

    def _by_frame(self, text: str, turns: list[Mapping[str, Any]]) -> tuple[Span, ...] | None:
        """None where the frame is unknown, or occurs in the text more often than there are turns."""
        opening, closing = self._frame.opening, self._frame.closing
        if not opening or not closing or _occurrences(text, opening) != len(turns):
            return None
        spans, cursor = [], 0
        for turn in turns:
            texts = _texts(turn)
            opened = text.find(opening, cursor)
            start = opened + len(opening)
            end = text.find(closing, start)
            # A template may leave its closing out; then the next one found is that of another message.
            if opened < 0 or end < 0 or any(closing in part for part in texts):
                return None
            if texts and not text[start:end].strip().endswith(texts[-1].strip()):
                return None
            cursor = end + len(closing)
            spans.append((start, cursor))
        return tuple(spans)

    def _by_prefix(self, text: str, messages: Sequence[Mapping[str, Any]], turn: int) -> Span:
        """What rendering one message more adds, less the opening that a template may count to the turn itself."""
        opening = self._frame.opening
        before = self._template.render(messages[:turn], add_generation_prompt=True).text if turn else ""
        if not text.startswith(before):
            before = self._template.render(messages[:turn]).text
        through = self._template.render(messages[: turn + 1]).text
        if not turn and opening:  # templates need a message, and before the first turn only they have written anything
            before = through[: max(0, through.find(opening))]
        start = len(before) + _missing(opening, before, text[len(before) :])
        end = len(_common_prefix(text, through).rstrip())
        if end < len(through.rstrip()):  # the turn is written otherwise once others follow it
            end = self._end_by_tail(text, messages, turn)
        if not text.startswith(before) or end < start:
            raise RecordError("template", "assistant turn not found in the rendered text", f"message {turn + 1}")
        return start, end

    def _end_by_tail(self, text: str, messages: Sequence[Mapping[str, Any]], turn: int) -> int:
        """Where a turn ends, told by what follows another text in its place; -1 where that is not what follows it."""
        other = [*messages[:turn], self._message("assistant", _ANOTHER), *messages[turn + 1 :]]
        _, found, tail = self._template.render(other).text.rpartition(_ANOTHER)
        if not found or not text.endswith(tail):
            return -1
        closing = self._frame.closing
        return len(text) - len(tail) + (len(closing) if tail.startswith(closing) else 0)

    def _probe(self) -> _Frame:
        """Render two exchanges of marker words and read off what stands around the assistant's."""
        words = ("qzuserone", "qzanswerone", "qzusertwo", "qzanswertwo")
        roles = ("user", "assistant", "user", "assistant")
        messages = [self._message(role, word) for role, word in zip(roles, words, strict=True)]
        try:
            text = self._template.render(messages).text
            prompt = self._template.render(messages[:3], add_generation_prompt=True).text
            without = self._template.render(messages[:3]).text
        except RecordError:
            return _Frame("", "")
        at = [text.find(word) for word in words]
        if min(at) < 0 or sorted(at) != at:
            return _Frame("", "")
        ends = [start + len(word) for start, word in zip(at, words, strict=True)]
        leads = (text[ends[0] : at[1]], text[ends[2] : at[3]])
        generation_prompt = prompt[len(without) :] if prompt.startswith(without) else ""
        if generation_prompt and all(generation_prompt in lead for lead in leads):
            opening = generation_prompt
        else:
            opening = _common_suffix(*leads)
        return _Frame(opening, self._closing(text[ends[1] : at[2]], text[ends[3] :]).rstrip())

    def _closing(self, *tails: str) -> str:
        """What follows every turn alike; never a part of a special token that follows only some."""
        common = _common_prefix(*tails)
        for special in self._specials:
            for cut in range(1, len(special)):
                at = len(common) - cut
                if common.endswith(special[:cut]) and any(tail.startswith(special, at) for tail in tails):
                    return self._closing(*(tail[:at] for tail in tails))
        return common

    def _message(self, role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": text if self._string_content else [{"type": "text", "text": text}]}


def _occurrences(text: str, part: str) -> int:
    """How often a part occurs, those that overlap included."""
    count, at = 0, text.find(part)
    while at >= 0:
        count, at = count + 1, text.find(part, at + 1)
    return count


def _missing(opening: str, before: str, after: str) -> int:
    """Characters of the opening that stand after a cut; none where it is not around the cut."""
    cuts = range(len(opening), -1, -1)
    return next(
        (len(opening) - at for at in cuts if before.endswith(opening[:at]) and after.startswith(opening[at:])), 0
    )


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return [str.__str__(text) for text in texts]  # plain copies: markers note who looks into them


def _common_prefix(a: str, b: str) -> str:
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return "".join(character for character, _ in same)


def _common_suffix(a: str, b: str) -> str:
    return _common_prefix(a[::-1], b[::-1])[::-1]
