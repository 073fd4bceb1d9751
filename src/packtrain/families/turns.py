"""Where the assistant's turns are in a rendered conversation: the characters that carry loss.

A turn is what the model has to write after the generation prompt, its end token included, without the white space that
a template puts after that. Where a rendered turn departs from the generation prompt, it begins at the departure:

    <|im_start|>user\\nHow many?<|im_end|>\\n<|im_start|>assistant\\n<think>\\n            with a generation prompt
    <|im_start|>user\\nHow many?<|im_end|>\\n<|im_start|>assistant\\nThree.<|im_end|>\\n   as history
                                                                  ^^^^^^^^^^^^^^^^
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from packtrain.core.errors import RecordError
from packtrain.families.chat_template import ChatMessage, ChatTemplate, Messages, Rendered

TextSpan = tuple[int, int]
_ANOTHER = "qz\ue0f2another"  # a text that no record has
_WORDS = ("qzuserone", "qzanswerone", "qzusertwo", "qzanswertwo")


@dataclass(frozen=True, slots=True)
class _Frame:
    """The literal text around an assistant turn, found once per template; empty where it cannot be told."""

    prompt: str = ""  # the generation prompt
    header: str = ""  # as much of it as stands before earlier answers, too
    closing: str = ""  # after an answer that others follow, to the end token
    last: str = ""  # after the last answer, to the end token
    tail: str = ""  # all that stands after the last answer


class TurnFinder:
    """Finds assistant turns by rendering what comes before them with a generation prompt."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        string_content: bool,
        specials: Sequence[str] = (),
        tokens: Callable[[str], Iterable[TextSpan]] = lambda _: (),
    ) -> None:
        self._template = template
        self._string_content = string_content
        self._tokens = tokens  # where the tokens of a text begin and end
        # Special tokens and tags are never cut in two: `<think>` and `</think>` have nothing in common.
        known = map(re.escape, sorted(specials, key=len, reverse=True))
        self._piece = re.compile("|".join((*known, r"<[^<>\s]+>", ".")), re.DOTALL)
        self._frame = self._probe()

    def with_template(self, template: ChatTemplate) -> TurnFinder:
        """The same for the template with tools. What stands around turns is told without them, where that can be:
        some templates write tools before the last question."""
        other = copy.copy(self)
        other._template = template
        other._frame = self._frame if self._frame != _Frame() else other._probe()
        return other

    def spans(self, rendered: Rendered, messages: Messages) -> tuple[tuple[TextSpan, ...], ...]:
        """What carries loss of each assistant message, in order; several spans where the template marks them."""
        return self.marked(rendered, self.turns(rendered, messages))

    def turns(self, rendered: Rendered, messages: Messages) -> tuple[TextSpan, ...]:
        """The turn of each assistant message, in order."""
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        return tuple([self._turn(rendered.text, messages, number) for number in numbers])

    def marked(self, rendered: Rendered, turns: Sequence[TextSpan]) -> tuple[tuple[TextSpan, ...], ...]:
        """What of each turn carries loss: what the template marks, or all of it."""
        marked = [[part for mark in rendered.generated or () if (part := _marked(turn, mark))] for turn in turns]
        if any(marked):  # a template that marks none of them has other things in mind
            return tuple(map(tuple, marked))
        return tuple((turn,) for turn in turns)

    def _turn(self, text: str, messages: Messages, turn: int) -> TextSpan:
        start = self._start(text, messages, turn)
        end = None if start is None else self._end(text, messages, turn, start)
        if start is None or end is None:
            raise RecordError("template", "assistant turn not found in the rendered text", f"message {turn + 1}")
        return start, max(start, end)  # of an answer of white space nothing is left

    # ---- where a turn begins

    def _start(self, text: str, messages: Messages, turn: int) -> int | None:
        """Where the generation prompt ends, or where the text departs from it."""
        if turn and messages[turn - 1]["role"] != "assistant":  # after an answer some templates write no prompt
            prompt = self._rendered(messages[:turn], add_generation_prompt=True)
            if prompt is not None and text.startswith(prompt):
                return len(prompt)
        return self._departure(text, messages, turn)

    def _departure(self, text: str, messages: Messages, turn: int) -> int | None:
        """Where the text after the message before stops being the generation prompt; never before the header."""
        before = shared = 0  # where that message ends, and how far the text after it is the prompt
        if turn:
            longer = [*messages[: turn - 1], self._longer(messages[turn - 1]), *messages[turn:]]
            following = self._after(longer)
            if following is None or not text.endswith(following):
                return None
            before = len(text) - len(following)
            prompt = self._after(longer[:turn], add_generation_prompt=True)
            plain = self._after(longer[:turn])
            shared = self._same_tokens(following, prompt or "")
            if not self._frame.header and (plain is None or shared < len(plain.rstrip())):
                return None  # not even the message before is written as it would be at its end
        lead = self._lead(messages, turn)
        if lead is None or len(lead) < before:
            return None
        header = self._frame.header
        at = lead.rfind(header, before) if header else -1
        if at >= 0 and at + len(header) > before + shared:  # no generation prompt is written here, or another one
            return at + self._same_tokens(text[at:], self._frame.prompt)
        return before + shared if turn else len(lead)

    def _lead(self, messages: Messages, turn: int) -> str | None:
        """What stands before an answer, told by another one in its place that makes the same calls."""
        another = self._message("assistant", _ANOTHER)
        lead = None
        if calls := messages[turn].get("tool_calls"):
            another["tool_calls"] = calls
            lead = self._before([*messages[:turn], another, *messages[turn + 1 :]])
            first = {**calls[0], "function": {**calls[0]["function"], "name": _ANOTHER}}
            another = {**self._message("assistant", ""), "tool_calls": [first, *calls[1:]]}
        return lead or self._before([*messages[:turn], another, *messages[turn + 1 :]])

    # ---- where it ends

    def _end(self, text: str, messages: Messages, turn: int, start: int) -> int | None:
        """After the end token, or after the answer where there is none."""
        is_last = turn + 1 == len(messages)
        through = text if is_last else self._rendered(messages[: turn + 1])
        if through is not None:
            answered = through.removesuffix(self._frame.tail)
            if through.endswith(self._frame.tail) and len(answered) >= start and text.startswith(answered):
                end = self._closed(text, len(answered), is_last=is_last)
                if end is not None:
                    return end
            if text.startswith(through.rstrip()) and not text[len(through.rstrip()) : start].strip():
                return len(through.rstrip())
        if messages[turn].get("tool_calls"):
            return self._calls_end(text, messages, turn, start)
        ends = self._answer_end(text, messages, turn)  # the turn is written otherwise once others follow it
        if ends is None or text[ends:start].strip():
            return None
        end = self._closed(text, ends, is_last=is_last)
        return end if end is not None else len(text.rstrip()) if is_last else ends

    def _closed(self, text: str, ends: int, *, is_last: bool) -> int | None:
        """After the closing of an answer that ends here; None where it has none."""
        closing = self._frame.last if is_last else self._frame.closing
        return ends + len(closing) if closing and text.startswith(closing, ends) else None

    def _answer_end(self, text: str, messages: Messages, turn: int) -> int | None:
        """Where the text of a message ends, told by what follows a longer one in its place."""
        following = self._after([*messages[:turn], self._longer(messages[turn]), *messages[turn + 1 :]])
        return len(text) - len(following) if following is not None and text.endswith(following) else None

    def _calls_end(self, text: str, messages: Messages, turn: int, start: int) -> int | None:
        """Where what is after another call ceases to be what would be there at the end of the conversation."""
        longer = [*messages[:turn], self._longer(messages[turn]), *messages[turn + 1 :]]
        following, alone = self._after(longer), self._after(longer[: turn + 1])
        if following is None or alone is None:
            return None
        rest = following[len(following[: self._shared(following, alone)].rstrip()) :]
        end = len(text) - len(rest)
        return end if text.endswith(rest) and end >= start else None

    # ---- the texts of messages

    def content(self, rendered: Rendered, messages: Messages, number: int) -> TextSpan:
        """Where the text of any message stands."""
        text = rendered.text
        is_text = isinstance(messages[number]["content"], str)
        another = {**messages[number], "content": _ANOTHER if is_text else [{"type": "text", "text": _ANOTHER}]}
        lead = self._before([*messages[:number], another, *messages[number + 1 :]])
        end = self._answer_end(text, messages, number)
        if lead is None or end is None or not text.startswith(lead) or end < len(lead):
            raise RecordError("template", "message not found in the rendered text", f"message {number + 1}")
        return len(lead), end

    # ---- renderings

    def _rendered(self, messages: Messages, *, add_generation_prompt: bool = False) -> str | None:
        """The text of a conversation; None where the template refuses it."""
        try:
            return self._template.text(messages, add_generation_prompt=add_generation_prompt)
        except RecordError:
            return None

    def _before(self, messages: Messages) -> str | None:
        """What a template writes before the text that no record has."""
        lead, mark, _ = (self._rendered(messages) or "").partition(_ANOTHER)
        return lead if mark else None

    def _after(self, messages: Messages, *, add_generation_prompt: bool = False) -> str | None:
        """What it writes after that."""
        text = self._rendered(messages, add_generation_prompt=add_generation_prompt) or ""
        _, mark, tail = text.rpartition(_ANOTHER)
        return tail if mark else None

    def _longer(self, message: ChatMessage) -> ChatMessage:
        """The message with more text at its end; calls with another argument."""
        if calls := message.get("tool_calls"):
            function = calls[-1]["function"]
            function = {**function, "arguments": {**function["arguments"], "qz": _ANOTHER}}
            return {**message, "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]}
        content = message["content"]
        if isinstance(content, str):
            return {**message, "content": content + _ANOTHER}
        *others, last = content or [{"type": "text", "text": ""}]
        if "text" in last:
            return {**message, "content": [*others, {**last, "text": last["text"] + _ANOTHER}]}
        return {**message, "content": [*others, last, {"type": "text", "text": _ANOTHER}]}

    def _message(self, role: str, text: str) -> ChatMessage:
        return {"role": role, "content": text if self._string_content else [{"type": "text", "text": text}]}

    def _shared(self, a: str, b: str) -> int:
        """How far two texts are the same, in whole pieces."""
        same = common_length(a, b)
        if same in (len(a), len(b)):
            return same
        return min(self._whole(a, same), self._whole(b, same))

    def _same_tokens(self, text: str, prompt: str) -> int:
        """How far a text is the generation prompt: no token of that is left in two."""
        same = self._shared(text, prompt)
        return next((start for start, end in self._tokens(prompt) if start < same < end), same)

    def _whole(self, text: str, end: int) -> int:
        """The end of the last piece that ends there or before."""
        whole = 0
        for piece in self._piece.finditer(text):
            if piece.end() > end:
                break
            whole = piece.end()
        return whole

    # ---- the template

    def _probe(self) -> _Frame:
        """Render two exchanges of marker words and read off what stands around the assistant's."""
        roles = ("user", "assistant", "user", "assistant")
        messages = [self._message(role, word) for role, word in zip(roles, _WORDS, strict=True)]
        text, asked = self._rendered(messages), self._rendered(messages[:1])
        prompted = self._rendered(messages[:1], add_generation_prompt=True)
        if text is None or asked is None or prompted is None:
            return _Frame()
        at = [text.find(word) for word in _WORDS]
        if min(at) < 0 or sorted(at) != at or _WORDS[0] not in asked or _WORDS[0] not in prompted:
            return _Frame()
        ends = [start + len(word) for start, word in zip(at, _WORDS, strict=True)]
        prompt = prompted[self._shared(prompted, asked) :]
        after_user = prompted.rpartition(_WORDS[0])[2]
        header = prompt[: max(0, self._shared(text[ends[0] : at[1]], after_user) - len(after_user) + len(prompt))]
        history, tail = text[ends[1] : at[2]], text[ends[3] :]
        user_header = self._user_header(history, text[: at[0]], messages, asked.rpartition(_WORDS[0])[2])
        closing = history[: self._shared(history, tail)].rstrip()
        if user_header and len(longer := history.removesuffix(user_header).rstrip()) > len(closing):
            closing = longer
        last = closing if closing and tail.startswith(closing) else tail.rstrip()
        return _Frame(prompt=prompt, header=header, closing=closing, last=last, tail=tail)

    def _user_header(self, history: str, beginning: str, messages: Messages, after_user: str) -> str:
        """What opens a user's turn after an answer; empty where it cannot be told."""
        again = self._rendered([messages[0], messages[2]]) or ""
        between = again.partition(_WORDS[0])[2].partition(_WORDS[2])[0]
        header = between[len(after_user) :] if between.startswith(after_user) else ""
        if header and history.endswith(header):
            return header
        # Templates that want roles to alternate: what stands before the first question, too.
        cut = len(history) - common_length(history[::-1], beginning[::-1])
        starts = (piece.start() for piece in self._piece.finditer(history) if piece.start() >= cut > 0)
        return history[next(starts, len(history)) :]


def common_length(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _marked(turn: TextSpan, mark: TextSpan) -> TextSpan | None:
    """The part of a turn that a mark covers, which may be empty; None where the mark is not in the turn."""
    start, end = max(turn[0], mark[0]), min(turn[1], mark[1])
    return (start, end) if start < end or (start == end and mark[0] == mark[1]) else None
