"""A record as the text that will be tokenized: rendered, media expanded, the characters that carry loss marked."""

from __future__ import annotations

import contextlib
import itertools
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import Media, MediaHeader, MediaKind, MediaRef, Record, Text, Variables
from packtrain.families.chat_template import ChatMessage, ChatTemplate, Rendered
from packtrain.families.dialect import Dialect, dialect_of, template_variables
from packtrain.families.family import Expansion, ProcessorSettings, Rule, Run
from packtrain.families.part_limits import MediaRules
from packtrain.families.tokenizer import LightTokenizer
from packtrain.families.turns import TextSpan, TurnFinder, common_length

LossOn = Literal["assistant", "completion", "all"]
# Media on which rules are tried when nothing is known about the data yet.
SAMPLE_HEADERS = (
    MediaHeader(kind="image", width=64, height=48),
    MediaHeader(kind="image", width=1300, height=700),
    MediaHeader(kind="video", width=64, height=48, frames=40, fps=8.0, seconds=5.0),
)


_MOST_CHATS = 64  # tool sets and template arguments for which what stands around turns is kept


@dataclass(frozen=True, slots=True)
class _Chat:
    """A chat template and what is known about it."""

    template: ChatTemplate
    turns: TurnFinder
    dialect: Dialect


@dataclass(frozen=True, slots=True)
class PlacedRun:
    """A run of media tokens: it stands once in the text, at `at`, and counts `count` times."""

    at: int  # character position in Layout.text
    count: int
    kind: MediaKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A record as text with every run of media tokens written once, before tokenization."""

    text: str
    special: bool  # does the tokenizer add its own special tokens around it
    runs: tuple[PlacedRun, ...] = ()
    expansions: tuple[Expansion, ...] = ()
    supervised: tuple[TextSpan, ...] | None = None  # characters that carry loss; None means all of them
    media_supervised: tuple[bool, ...] = ()
    shortened: bool = False  # does the template leave out what an answer says

    def ended(self, tokenizer: LightTokenizer) -> bool:
        """Does anything that carries loss end in an end token?"""
        if self.supervised is None:
            return (self.special and tokenizer.appends_eos) or self.text.rstrip().endswith(tokenizer.ends)
        return any(self.text.endswith(tokenizer.ends, start, end) for start, end in self.supervised)


class Layouter:
    """Lays out records for one model and one rule of what carries loss. `Skeletons` is the fast path."""

    def __init__(
        self,
        settings: ProcessorSettings,
        rule: Rule,
        tokenizer: LightTokenizer,
        *,
        loss_on: LossOn | None,
        add_eos: bool | None,
        typed: bool,
    ) -> None:
        self.rule = rule
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self._typed = bool(rule.placeholders) or typed  # a processor, not a bare tokenizer, renders the template
        # Templates of text models expect plain strings, those of processors a list of typed parts.
        self._string_content = not self._typed if rule.string_content is None else rule.string_content
        self.parts = MediaRules(settings, rule)
        self._chat = self._prepare(settings.chat_template, settings)
        videos = None if settings.own_template else rule.video_chat_template
        self._video_chat = self._prepare(videos, settings) or self._chat
        self._tool_chat = self._prepare(settings.tool_template, settings) or self._chat
        self._given: dict[tuple[bool, Variables], _Chat] = {}
        self._kinds = {token: kind for kind, token in rule.placeholders.items()}
        self.placeholders = re.compile("|".join(map(re.escape, self._kinds)) or r"(?!)")
        self.reserved = (*self._kinds, *self._run_tokens())
        if add_eos and not tokenizer.eos_token:
            raise ConfigError("add_eos", got="a tokenizer without an EOS token", fix="leave add_eos out")
        self._eos = tokenizer.eos_token if add_eos else None
        self._plain_eos = None if add_eos is False else tokenizer.eos_token

    def _run_tokens(self) -> list[str]:
        """Tokens replaced by embeddings that are not placeholders; no text may hold them either."""
        tokens: dict[str, None] = {}
        for header in SAMPLE_HEADERS:
            if header.kind in self.rule.placeholders:
                with contextlib.suppress(RecordError):
                    video = header.kind == "video"
                    expansion = self.rule.video(header) if video else self.rule.image(header, 1)
                    tokens |= {piece.token: None for piece in expansion.pieces if isinstance(piece, Run)}
        return [token for token in tokens if token not in self._kinds]

    def _prepare(self, source: str | None, settings: ProcessorSettings) -> _Chat | None:
        if not source:
            return None
        template = ChatTemplate(source, settings.special_tokens, settings.template_date)
        return _Chat(template, self._turns(template), dialect_of(template, string_content=self._string_content))

    def _turns(self, template: ChatTemplate) -> TurnFinder:
        return TurnFinder(
            template,
            string_content=self._string_content,
            specials=self.tokenizer.special_tokens(),
            tokens=self.tokenizer.offsets,
        )

    def _chat_of(self, record: Record) -> _Chat | None:
        """The template that writes a record, with what the record gives to it."""
        videos = any(medium.kind == "video" for medium in record.media())
        chat, variables = self._video_chat if videos else self._chat, record.variables
        if variables is not None and variables.tools and self._tool_chat is not self._chat:
            chat = self._tool_chat
        if chat is None or not record.structured:
            return chat
        chat.dialect.require(record)
        texts = ["".join(_texts(message.parts)) for message in record.messages]
        if any(token in text for text in (*texts, *record.beside()) for token in self.reserved):
            raise RecordError("template", "media placeholders in the text do not match the media", "one is in a text")
        if variables is None:
            return chat
        if (videos, variables) not in self._given:
            if len(self._given) >= _MOST_CHATS:
                self._given.clear()
            values = template_variables(variables)
            template = chat.template.with_variables(values)
            if variables.kwargs:
                chat = replace(chat, turns=self._turns(template.with_variables({"tools": None})))
            self._given[videos, variables] = replace(chat, template=template, turns=chat.turns.with_template(template))
        return self._given[videos, variables]

    def layout(self, record: Record, headers: Sequence[MediaHeader]) -> Layout:
        """The text that will be tokenized, where its media runs stand and which characters carry loss."""
        return self.expanded(self.rendered(record), record, headers)

    def expanded(self, rendered: Layout, record: Record, headers: Sequence[MediaHeader]) -> Layout:
        """A rendered record with its media expanded."""
        return self.expand(rendered, [medium.kind for medium in record.media()], self.expansions(headers))

    # ---- text with placeholders

    def rendered(self, record: Record) -> Layout:
        """The record through the chat template, placeholders still in place."""
        if record.plain:
            return self._plain(record)
        chat = self._chat_of(record)
        if chat is None:
            return self._without_template(record)
        template, turns = chat.template, chat.turns
        messages = self.messages(record, chat.dialect)
        rendered = template.render(messages)
        told = self._turns_of(record, turns, rendered, messages)
        self._require_calls(record, rendered.text, told)
        spans = self._carrying(record, turns, rendered, messages, told)
        if spans and self.loss_on != "all" and _answers_with_media(record):
            spans = self._without_media(template, rendered.text, spans)
        bos = self.tokenizer.bos_token
        special = self._typed and not (bos and rendered.text.startswith(bos))
        text, spans = self._ended(rendered.text, spans, self._eos, special=special)
        return Layout(
            text=text, special=special, supervised=spans, shortened=self._shortens(record, rendered.text, told)
        )

    def messages(self, record: Record, dialect: Dialect) -> list[ChatMessage]:
        """The conversation as the template expects it."""
        if self.rule.media_first:
            return self._messages_media_first(record, dialect)
        return [dialect.written(m, self._content(m.parts)) for m in record.messages]

    def _content(self, parts: Sequence[Text | Media]) -> str | list[dict[str, str]]:
        if self._string_content:
            pieces = [part.text if isinstance(part, Text) else self.placeholder(part.kind) for part in parts]
            return pieces[0] if len(pieces) == 1 else "".join(pieces)
        return [{"type": "text", "text": p.text} if isinstance(p, Text) else {"type": p.kind} for p in parts]

    def _messages_media_first(self, record: Record, dialect: Dialect) -> list[ChatMessage]:
        """All media stand before the first user text, as the family was trained."""
        lead = "".join(self.placeholder(medium.kind) for medium in record.media())
        messages = []
        for message in record.messages:
            text = "".join(_texts(message.parts))
            if message.role == "user":
                text, lead = lead + text, ""
            elif message.role == "tool" and len(_texts(message.parts)) < len(message.parts):
                raise RecordError(
                    "family", "media in a tool's answer", "this model puts all media before the first text"
                )
            messages.append(dialect.written(message, text))
        if lead:
            raise RecordError("family", "media without a user message")
        return messages

    @property
    def template_literals(self) -> tuple[str, ...]:
        """The string constants of the templates in use."""
        chats = [chat for chat in (self._chat, self._video_chat) if chat is not None]
        return tuple(dict.fromkeys(literal for chat in chats for literal in chat.template.literals))

    @property
    def template_functions(self) -> frozenset[str]:
        """The filters and methods that the templates in use call."""
        chats = [chat for chat in (self._chat, self._video_chat) if chat is not None]
        return frozenset(name for chat in chats for name in chat.template.functions)

    def placeholder(self, kind: MediaKind) -> str:
        """What the template writes for one medium."""
        try:
            return self.rule.placeholders[kind]
        except KeyError:
            raise RecordError("family", f"this model takes no {kind}") from None

    def _without_template(self, record: Record) -> Layout:
        """A base model: a prompt and its completion, joined as they are."""
        if [message.role for message in record.messages] != ["user", "assistant"] or any(True for _ in record.media()):
            raise RecordError("template", "the model has no chat template")
        if record.structured:
            raise RecordError(
                "template", "the model has no chat template", "which tools, reasoning and template arguments need"
            )
        return self._plain(record)

    def _plain(self, record: Record) -> Layout:
        """Running text, or a prompt and its completion joined as they are, with the end token."""
        texts = ["".join(_texts(message.parts)) for message in record.messages]
        edges = list(itertools.accumulate(map(len, texts), initial=0))
        carrying = [
            message.train and (self.loss_on == "all" or message.role == "assistant") for message in record.messages
        ]
        places = zip(edges, edges[1:], carrying, strict=False)
        spans = None if all(carrying) else tuple((start, end) for start, end, carries in places if carries)
        text, spans = self._ended("".join(texts), spans, self._plain_eos, special=True)
        return Layout(text=text, special=True, supervised=spans)

    def _ended(
        self, text: str, spans: tuple[TextSpan, ...] | None, eos: str | None, *, special: bool
    ) -> tuple[str, tuple[TextSpan, ...] | None]:
        """Append the end token unless the text already ends with it or the tokenizer will append it."""
        if eos is None or text.rstrip().endswith(eos) or (special and self.tokenizer.appends_eos):
            return text, spans
        if spans and spans[-1][1] >= len(text.rstrip()):
            spans = (*spans, (len(text), len(text) + len(eos)))
        return text + eos, spans

    def _turns_of(
        self, record: Record, turns: TurnFinder, rendered: Rendered, messages: list[ChatMessage]
    ) -> dict[int, TextSpan]:
        """The assistant's turns by the number of the message, where anything depends on them."""
        numbers = [number for number, message in enumerate(record.messages) if message.role == "assistant"]
        if not numbers or (self.loss_on == "all" and not record.structured and all(m.train for m in record.messages)):
            return {}
        return dict(zip(numbers, turns.turns(rendered, messages), strict=True))

    def _carrying(
        self,
        record: Record,
        turns: TurnFinder,
        rendered: Rendered,
        messages: list[ChatMessage],
        told: Mapping[int, TextSpan],
    ) -> tuple[TextSpan, ...] | None:
        """The characters that carry loss; None means all of them."""
        silent = [number for number, message in enumerate(record.messages) if not message.train]
        if self.loss_on == "all" and not silent:
            return None
        spans = dict(zip(told, turns.marked(rendered, list(told.values())), strict=True))
        if self.loss_on == "all":
            left_out = [spans[n] if n in spans else (turns.content(rendered, messages, n),) for n in silent]
            return _between([span for parts in left_out for span in parts], len(rendered.text))
        wanted = [number for number in spans if number not in silent]
        if self.loss_on == "completion":
            wanted = [number for number in wanted if number == len(record.messages) - 1]
        return tuple(span for number in wanted for span in spans[number])

    def _shortens(self, record: Record, text: str, told: Mapping[int, TextSpan]) -> bool:
        """Does the template leave out what an answer that carries loss says? White space does not matter.

        Beside tools and reasoning it may also write it elsewhere: there it is looked for up to the end of the turn.
        """
        answers = record.messages[-1:] if self.loss_on == "completion" else record.messages
        first, before = len(record.messages) - len(answers), 0
        for number, message in enumerate(answers, first):
            if message.role != "assistant":
                continue
            where, before = (text[before : told[number][1]], told[number][1]) if record.structured else (text, 0)
            reasoning = message.extras.reasoning if message.extras is not None else None
            for part in (*_texts(message.parts), reasoning or "") if message.train else ():
                if part not in where and "".join(str.split(part)) not in "".join(where.split()):
                    return True
        return False

    def _require_calls(self, record: Record, text: str, told: Mapping[int, TextSpan]) -> None:
        """Refuse a record of whose calls some are not written. How arguments are written is the template's business."""
        for number, message in enumerate(record.messages):
            names = [call.name for call in message.extras.tool_calls] if message.extras is not None else []
            for name in dict.fromkeys(names):
                if text.count(name, *told[number]) < names.count(name):
                    raise RecordError("template", "the chat template drops a tool call", name[:60])

    def _without_media(self, template: ChatTemplate, text: str, spans: tuple[TextSpan, ...]) -> tuple[TextSpan, ...]:
        """The spans less media and what the template writes around them: no model can write a picture."""
        cut: list[TextSpan] = []
        for match in self.placeholders.finditer(text):
            if any(start <= match.start() < end for start, end in spans):
                kind = self._kinds[match.group()]
                around = self._around(template, kind)
                start, end = match.start() - len(around[0]), match.end() + len(around[1])
                if text[start : match.start()] != around[0] or text[match.end() : end] != around[1]:
                    raise RecordError(
                        "loss", f"{kind} in an answer that carries loss", "written differently than in a question"
                    )
                cut.append((start, end))
        left = _between(cut, len(text))
        return tuple((max(a, c), min(b, d)) for a, b in spans for c, d in left if max(a, c) < min(b, d))

    def _around(self, template: ChatTemplate, kind: MediaKind) -> tuple[str, str]:
        """What the template writes directly before and after a medium of this kind."""
        words, nothing = (Text("qzbefore"), Text("qzafter")), Media(kind, MediaRef(name=""))
        shown, plain = (
            template.text([{"role": "user", "content": self._content(parts)}], add_generation_prompt=True)
            for parts in ((words[0], nothing, words[1]), words)
        )
        first = common_length(shown, plain)
        last = len(shown) - common_length(shown[first:][::-1], plain[first:][::-1])
        before, placeholder, after = shown[first:last].partition(self.placeholder(kind))
        if not placeholder or shown[:first] + shown[last:] != plain:
            raise RecordError(
                "loss", f"{kind} in an answer that carries loss", "the template writes it in several places"
            )
        return before, after

    # ---- media

    def expansions(self, headers: Sequence[MediaHeader]) -> list[Expansion]:
        """What the processor writes for each medium."""
        for header in headers:
            self.placeholder(header.kind)
        return self.parts.expansions(headers)

    def expand(self, rendered: Layout, kinds: Sequence[MediaKind], expansions: Sequence[Expansion]) -> Layout:
        """Put the expansions in place of the placeholders, each run written once."""
        text, spans = rendered.text, rendered.supervised
        matches = list(self.placeholders.finditer(text))
        shown = [self._kinds[match.group()] for match in matches]
        if sorted(shown) != sorted(kinds) or any(token in text for token in self.reserved[len(self._kinds) :]):
            raise RecordError(
                "template",
                "media placeholders in the text do not match the media",
                f"{len(shown)} in the text, {len(kinds)} media",
            )
        if not matches:
            return rendered
        # A template may show images and videos in another order than the record, so each kind has its own queue.
        queues = {kind: iter([e for k, e in zip(kinds, expansions, strict=True) if k == kind]) for kind in set(kinds)}
        pieces: list[str] = []
        runs: list[PlacedRun] = []
        ends, gains = [], [0]  # of the placeholders, and how many characters were gained up to each end
        cursor = length = 0
        for match, kind in zip(matches, shown, strict=True):
            pieces.append(text[cursor : match.start()])
            length += match.start() - cursor
            for piece in next(queues[kind]).pieces:
                if isinstance(piece, Run):
                    if not piece.count:
                        continue
                    runs.append(PlacedRun(length, piece.count, kind))
                    piece = piece.token
                pieces.append(piece)
                length += len(piece)
            cursor = match.end()
            ends.append(cursor)
            gains.append(length - cursor)

        def moved(position: int) -> int:
            return position + gains[bisect_right(ends, position)]

        return Layout(
            text="".join((*pieces, text[cursor:])),
            special=rendered.special,
            runs=tuple(runs),
            expansions=tuple(expansions),
            supervised=None if spans is None else tuple((moved(a), moved(b)) for a, b in spans),
            media_supervised=tuple(spans is None or any(a <= m.start() < b for a, b in spans) for m in matches),
            shortened=rendered.shortened,
        )


def _answers_with_media(record: Record) -> bool:
    parts = (part for message in record.messages if message.role == "assistant" for part in message.parts)
    return any(isinstance(part, Media) for part in parts)


def _between(spans: Sequence[TextSpan], end: int) -> tuple[TextSpan, ...]:
    """What these spans leave.

    >>> _between([(0, 2), (5, 6)], 9)
    ((2, 5), (6, 9))
    """
    edges = [0, *(edge for span in sorted(spans) for edge in span), end]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def _texts(parts: Sequence[Text | Media]) -> list[str]:
    return [part.text for part in parts if isinstance(part, Text)]
