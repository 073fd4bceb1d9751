"""A record as the text that will be tokenized: rendered, media expanded, the characters that carry loss marked."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import Media, MediaHeader, MediaKind, MediaRef, Record, Text
from packtrain.families.base import Expansion, Family, ProcessorSettings, Run, Traits
from packtrain.families.chat_template import ChatTemplate, Rendered
from packtrain.families.part_limits import PartFamilies
from packtrain.families.tokenizer import LightTokenizer
from packtrain.families.turns import Span, TurnFinder, common_length

LossOn = Literal["assistant", "completion", "all"]
# Media on which rules are tried when nothing is known about the data yet.
SAMPLE_HEADERS = (
    MediaHeader(kind="image", width=64, height=48),
    MediaHeader(kind="image", width=1300, height=700),
    MediaHeader(kind="video", width=64, height=48, frames=40, fps=8.0, seconds=5.0),
)


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
    supervised: tuple[Span, ...] | None = None  # characters that carry loss; None means all of them
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
        family: Family,
        tokenizer: LightTokenizer,
        *,
        loss_on: LossOn | None,
        add_eos: bool | None,
        typed: bool,
    ) -> None:
        self.family = family
        self.tokenizer = tokenizer
        self.loss_on = loss_on
        self._typed = bool(family.placeholders) or typed  # a processor, not a bare tokenizer, renders the template
        # Templates of text models expect plain strings, those of processors a list of typed parts.
        traits: Traits = getattr(family, "traits", Traits())
        self._string_content = not self._typed if traits.string_content is None else traits.string_content
        self._media_first = traits.media_first
        self.parts = PartFamilies(settings, family)
        self._chat = self._prepare(settings.chat_template, settings)
        videos = None if settings.own_template else traits.video_chat_template
        self._video_chat = self._prepare(videos, settings) or self._chat
        self._kinds = {token: kind for kind, token in family.placeholders.items()}
        self.placeholders = re.compile("|".join(map(re.escape, self._kinds)) or r"(?!)")
        self.reserved = (*self._kinds, *self._run_tokens())
        if add_eos and not tokenizer.eos_token:
            raise ConfigError("add_eos", got="a tokenizer without an end token", fix="leave add_eos out")
        self._eos = tokenizer.eos_token if add_eos else None
        self._plain_eos = None if add_eos is False else tokenizer.eos_token

    def _run_tokens(self) -> list[str]:
        """Tokens that stand for embeddings without being placeholders; no text may hold them either."""
        found: dict[str, None] = {}
        for header in SAMPLE_HEADERS:
            if header.kind in self.family.placeholders:
                with contextlib.suppress(RecordError):
                    video = header.kind == "video"
                    expansion = self.family.video(header) if video else self.family.image(header, 1)
                    found |= {piece.token: None for piece in expansion.pieces if isinstance(piece, Run)}
        return [token for token in found if token not in self._kinds]

    def _prepare(self, source: str | None, settings: ProcessorSettings) -> tuple[ChatTemplate, TurnFinder] | None:
        if not source:
            return None
        template = ChatTemplate(source, settings.special_tokens, settings.template_date)
        specials = self.tokenizer.special_tokens()
        return template, TurnFinder(
            template, string_content=self._string_content, specials=specials, tokens=self.tokenizer.offsets
        )

    def layout(self, record: Record, headers: Sequence[MediaHeader]) -> Layout:
        """The text that will be tokenized, where its media runs stand and which characters carry loss."""
        return self.expand(self.rendered(record), [medium.kind for medium in record.media()], self.expansions(headers))

    # ---- text with placeholders

    def rendered(self, record: Record) -> Layout:
        """The record through the chat template, placeholders still in place."""
        if record.plain:
            return self._plain(record)
        chat = self._video_chat if any(medium.kind == "video" for medium in record.media()) else self._chat
        if chat is None:
            return self._without_template(record)
        template, turns = chat
        messages = self.messages(record)
        rendered = template.render(messages)
        spans = self._carrying(record, turns, rendered, messages)
        if spans and self.loss_on != "all" and _answers_with_media(record):
            spans = self._without_media(template, rendered.text, spans)
        bos = self.tokenizer.bos_token
        special = self._typed and not (bos and rendered.text.startswith(bos))
        text, spans = self._ended(rendered.text, spans, self._eos, special=special)
        return Layout(text=text, special=special, supervised=spans, shortened=self._shortens(record, rendered.text))

    def messages(self, record: Record) -> list[dict[str, Any]]:
        """The conversation as the template expects it."""
        if self._media_first:
            return self._messages_media_first(record)
        return [{"role": m.role, "content": self._content(m.parts)} for m in record.messages]

    def _content(self, parts: Sequence[Text | Media]) -> str | list[dict[str, str]]:
        if self._string_content:
            pieces = [part.text if isinstance(part, Text) else self.placeholder(part.kind) for part in parts]
            return pieces[0] if len(pieces) == 1 else "".join(pieces)
        return [{"type": "text", "text": p.text} if isinstance(p, Text) else {"type": p.kind} for p in parts]

    def _messages_media_first(self, record: Record) -> list[dict[str, Any]]:
        """All media stand before the first user text, as the family was trained."""
        lead = "".join(self.placeholder(medium.kind) for medium in record.media())
        messages = []
        for message in record.messages:
            text = "".join(_texts(message.parts))
            if message.role == "user":
                text, lead = lead + text, ""
            messages.append({"role": message.role, "content": text})
        if lead:
            raise RecordError("family", "media without a user message")
        return messages

    @property
    def template_literals(self) -> tuple[str, ...]:
        """The string constants of the templates in use."""
        chats = [chat for chat in (self._chat, self._video_chat) if chat is not None]
        return tuple(dict.fromkeys(literal for template, _ in chats for literal in template.literals))

    @property
    def template_functions(self) -> frozenset[str]:
        """The filters and methods that the templates in use call."""
        chats = [chat for chat in (self._chat, self._video_chat) if chat is not None]
        return frozenset(name for template, _ in chats for name in template.functions)

    def kind_of(self, placeholder: str) -> MediaKind:
        """Which kind of medium a placeholder stands for."""
        return self._kinds[placeholder]

    def placeholder(self, kind: MediaKind) -> str:
        """What the template writes for one medium."""
        try:
            return self.family.placeholders[kind]
        except KeyError:
            raise RecordError("family", f"this model takes no {kind}") from None

    def _without_template(self, record: Record) -> Layout:
        """A base model: a prompt and its completion, joined as they are."""
        if [message.role for message in record.messages] != ["user", "assistant"] or any(True for _ in record.media()):
            raise RecordError("template", "the model has no chat template")
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
        self, text: str, spans: tuple[Span, ...] | None, eos: str | None, *, special: bool
    ) -> tuple[str, tuple[Span, ...] | None]:
        """Append the end token unless the text already ends with it or the tokenizer will append it."""
        if eos is None or text.rstrip().endswith(eos) or (special and self.tokenizer.appends_eos):
            return text, spans
        if spans and spans[-1][1] >= len(text.rstrip()):
            spans = (*spans, (len(text), len(text) + len(eos)))
        return text + eos, spans

    def _carrying(
        self, record: Record, turns: TurnFinder, rendered: Rendered, messages: list[dict[str, Any]]
    ) -> tuple[Span, ...] | None:
        """The characters that carry loss; None means all of them."""
        silent = [number for number, message in enumerate(record.messages) if not message.train]
        if self.loss_on == "all" and not silent:
            return None
        assistants = [number for number, message in enumerate(record.messages) if message.role == "assistant"]
        spans = dict(zip(assistants, turns.spans(rendered, messages), strict=True)) if assistants else {}
        if self.loss_on == "all":
            left_out = [spans[n] if n in spans else (turns.content(rendered, messages, n),) for n in silent]
            return _between([span for found in left_out for span in found], len(rendered.text))
        wanted = [number for number in assistants if number not in silent]
        if self.loss_on == "completion":
            wanted = [number for number in wanted if number == len(record.messages) - 1]
        return tuple(span for number in wanted for span in spans[number])

    def _shortens(self, record: Record, text: str) -> bool:
        """Does the template leave out what an answer that carries loss says? White space does not matter."""
        answers = record.messages[-1:] if self.loss_on == "completion" else record.messages
        for message in answers:
            if message.role != "assistant" or not message.train:
                continue
            for part in _texts(message.parts):
                if part not in text and "".join(str.split(part)) not in "".join(text.split()):
                    return True
        return False

    def _without_media(self, template: ChatTemplate, text: str, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """The spans less media and what the template writes around them: no model can write a picture."""
        taken: list[Span] = []
        for match in self.placeholders.finditer(text):
            if any(start <= match.start() < end for start, end in spans):
                kind = self._kinds[match.group()]
                around = self._around(template, kind)
                start, end = match.start() - len(around[0]), match.end() + len(around[1])
                if text[start : match.start()] != around[0] or text[match.end() : end] != around[1]:
                    raise RecordError("loss", f"{kind} in an answer that carries loss", "not written as in a question")
                taken.append((start, end))
        left = _between(taken, len(text))
        return tuple((max(a, c), min(b, d)) for a, b in spans for c, d in left if max(a, c) < min(b, d))

    def _around(self, template: ChatTemplate, kind: MediaKind) -> tuple[str, str]:
        """What the template writes directly before and behind a medium of this kind."""
        words, nothing = (Text("qzbefore"), Text("qzbehind")), Media(kind, MediaRef(name=""))
        shown, plain = (
            template.text([{"role": "user", "content": self._content(parts)}], add_generation_prompt=True)
            for parts in ((words[0], nothing, words[1]), words)
        )
        first = common_length(shown, plain)
        last = len(shown) - common_length(shown[first:][::-1], plain[first:][::-1])
        before, found, behind = shown[first:last].partition(self.placeholder(kind))
        if not found or shown[:first] + shown[last:] != plain:
            raise RecordError(
                "loss", f"{kind} in an answer that carries loss", "the template writes it in several places"
            )
        return before, behind

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
        found = [self._kinds[match.group()] for match in matches]
        if sorted(found) != sorted(kinds) or any(token in text for token in self.reserved[len(self._kinds) :]):
            raise RecordError(
                "template",
                "media placeholders in the text do not match the media",
                f"{len(found)} in the text, {len(kinds)} media",
            )
        if not matches:
            return rendered
        # A template may show images and videos in another order than the record, so each kind has its own queue.
        queues = {kind: iter([e for k, e in zip(kinds, expansions, strict=True) if k == kind]) for kind in set(kinds)}
        writer = _Writer()
        cursor = 0
        for match, kind in zip(matches, found, strict=True):
            writer.text(text[cursor : match.start()])
            writer.expansion(next(queues[kind]), kind)
            cursor = match.end()
            writer.shift(cursor)
        writer.text(text[cursor:])
        return Layout(
            text=writer.joined(),
            special=rendered.special,
            runs=tuple(writer.runs),
            expansions=tuple(expansions),
            supervised=None if spans is None else tuple((writer.moved(a), writer.moved(b)) for a, b in spans),
            media_supervised=tuple(spans is None or any(a <= m.start() < b for a, b in spans) for m in matches),
            shortened=rendered.shortened,
        )


class _Writer:
    """Collects the pieces of a layout and knows where everything came to stand."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._length = 0
        self._shifts: list[tuple[int, int]] = []  # (position in the rendered text, characters gained before it)
        self.runs: list[PlacedRun] = []

    def text(self, text: str) -> None:
        self._pieces.append(text)
        self._length += len(text)

    def expansion(self, expansion: Expansion, kind: MediaKind) -> None:
        for piece in expansion.pieces:
            if isinstance(piece, Run):
                if piece.count:
                    self.runs.append(PlacedRun(self._length, piece.count, kind))
                    self.text(piece.token)
            else:
                self.text(piece)

    def shift(self, position: int) -> None:
        self._shifts.append((position, self._length - position))

    def moved(self, position: int) -> int:
        gained = 0
        for at, gain in self._shifts:
            if at > position:
                break
            gained = gain
        return position + gained

    def joined(self) -> str:
        return "".join(self._pieces)


def _answers_with_media(record: Record) -> bool:
    parts = (part for message in record.messages if message.role == "assistant" for part in message.parts)
    return any(isinstance(part, Media) for part in parts)


def _between(spans: Sequence[Span], end: int) -> tuple[Span, ...]:
    """What these stretches leave.

    >>> _between([(0, 2), (5, 6)], 9)
    ((2, 5), (6, 9))
    """
    edges = [0, *(edge for span in sorted(spans) for edge in span), end]
    return tuple((a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b)


def _texts(parts: Sequence[Text | Media]) -> list[str]:
    return [part.text for part in parts if isinstance(part, Text)]
