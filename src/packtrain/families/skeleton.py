"""Rendering by filling in: what a chat template writes around the texts is the same for all records of one shape.

A template is run once per shape (roles and kinds of parts) with marker strings that notice when they are looked into.
If the template only ever writes them out, or trims and writes them out, its text for any record of that shape is the
literals between the markers with the record's own texts in their places; otherwise it is run for every record. That
is then tried on texts made from every string that the template itself contains. A template with a function that
markers cannot see through (they are plain strings behind a `join`) is always run.

    <|im_start|>user\\n  [0]  <|im_end|>\\n<|im_start|>assistant\\n  [1]  <|im_end|>\\n
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packtrain.core.errors import RecordError
from packtrain.core.values import Media, MediaHeader, MediaKind, MediaRef, Part, Record, Text
from packtrain.families.chat_template import Watched
from packtrain.families.family import Expansion, Run
from packtrain.families.layout import Layout, Layouter, PlacedRun
from packtrain.families.turns import Span

_MARKER = re.compile("\ue0f0([0-9]+)\ue0f1")
# Texts that many templates treat specially: blank edges, nothing, thinking blocks, quotes, markup.
_PROBES = (
    "",
    " ",
    "\n",
    "  a b",
    "a b \n",
    "<think>\na\n</think>\n\nb",
    '"a" \\n {{ b }}',
    "é\t<b>&amp;</b>",
    "assistant",
)

# Filters that either do not look into a text, or do it by its own methods, which markers notice.
_SEEN_THROUGH = {
    *("capitalize", "count", "d", "default", "first", "items", "last", "length", "list", "lower", "reject"),
    *("rejectattr", "replace", "select", "selectattr", "string", "title", "tojson", "trim", "upper"),
}
_HIDING_METHODS = frozenset((".format", ".format_map", ".join"))

Shape = tuple[tuple[object, ...], ...]
_STRUCTURED = ("structured",)  # as if one more message: the template has to be run for each of these
MOST_SHAPES = 4096  # kept in memory; more mean that hardly any comes again


@dataclass(frozen=True, slots=True)
class Place:
    """A character position: `offset` into literal number `literal`."""

    literal: int
    offset: int


@dataclass(frozen=True, slots=True)
class Slot:
    """What stands between two literals: text number `text`, trimmed or not, or else a medium of a kind."""

    text: int = -1
    trim: bool = False
    kind: MediaKind | None = None
    supervised: bool = False  # does a medium here stand where loss is taken


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The literals of one shape, and the slots between them."""

    literals: tuple[str, ...]
    slots: tuple[Slot, ...]
    spans: tuple[tuple[Place, Place], ...] | None
    special: bool

    def fill(self, texts: Sequence[str], kinds: Sequence[MediaKind], expansions: Sequence[Expansion]) -> Layout:
        """The record with its media expanded, each run written once."""
        literals = self.literals
        pieces, starts, runs = [literals[0]], [0], []
        length = len(literals[0])
        media = _queues(kinds, expansions)
        for slot, literal in zip(self.slots, literals[1:], strict=True):
            if slot.kind is None:
                text = texts[slot.text].strip() if slot.trim else texts[slot.text]
                pieces.append(text)
                length += len(text)
            else:
                for piece in next(media[slot.kind]).pieces:
                    if type(piece) is Run:
                        if not piece.count:
                            continue
                        runs.append(PlacedRun(length, piece.count, slot.kind))
                        piece = piece.token
                    pieces.append(piece)  # type: ignore[arg-type]
                    length += len(piece)  # type: ignore[arg-type]
            pieces.append(literal)
            starts.append(length)
            length += len(literal)
        spans = self.spans
        return Layout(
            text="".join(pieces),
            special=self.special,
            runs=tuple(runs),
            expansions=tuple(expansions),
            supervised=None
            if spans is None
            else tuple([(starts[a.literal] + a.offset, starts[b.literal] + b.offset) for a, b in spans]),
            media_supervised=tuple([slot.supervised for slot in self.slots if slot.kind is not None]),
        )


def _queues(kinds: Sequence[MediaKind], expansions: Sequence[Expansion]) -> dict[MediaKind, Iterator[Expansion]]:
    """A template may show images and videos in another order than the record, so each kind has its own queue."""
    if not kinds:
        return {}
    if kinds.count(kinds[0]) == len(kinds):
        return {kinds[0]: iter(expansions)}
    return {kind: iter([e for k, e in zip(kinds, expansions, strict=True) if k == kind]) for kind in set(kinds)}


def shape_of(record: Record) -> Shape:
    """What a record's skeleton depends on."""
    shape = [(m.role, m.train, *[None if isinstance(p, Text) else p.kind for p in m.parts]) for m in record.messages]
    return (*shape, _STRUCTURED) if record.structured else tuple(shape)


def texts_of(record: Record) -> list[str]:
    """The texts of a record, in order."""
    return [part.text for message in record.messages for part in message.parts if isinstance(part, Text)]


class Skeletons:
    """The skeletons of one layouter, found shape by shape."""

    def __init__(self, layouter: Layouter) -> None:
        self._layouter = layouter
        self._reserved = layouter.reserved
        functions = layouter.template_functions
        filters = {name for name in functions if not name.startswith(".")}
        self._always_run = not filters <= _SEEN_THROUGH or bool(functions & _HIDING_METHODS)
        self._known: dict[Shape, Skeleton | None] = {}

    def layout(self, record: Record, headers: Sequence[MediaHeader], shape: Shape | None = None) -> Layout:
        """As the layouter lays it out, by filling in where that is known to be the same; `shape` where it is known."""
        expansions = self._layouter.expansions(headers)
        kinds = [header.kind for header in headers]
        skeleton = self.skeleton(record, shape_of(record) if shape is None else shape)
        if skeleton is not None:
            texts = texts_of(record)
            if not self.hides_placeholder(texts):
                return skeleton.fill(texts, kinds, expansions)
        return self._layouter.expand(self._layouter.rendered(record), kinds, expansions)

    def skeleton(self, record: Record, shape: Shape) -> Skeleton | None:
        """The skeleton of a record's shape; None where its template has to be run for each record."""
        if record.plain or record.structured or self._always_run:
            return None
        if shape not in self._known:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            self._known[shape] = self._find(record)
        return self._known[shape]

    def hides_placeholder(self, texts: Sequence[str]) -> bool:
        """Could the texts, also side by side, hold what stands for a medium?"""
        if not self._reserved:
            return False
        joined = "".join(texts)
        return any(token in joined for token in self._reserved)

    def _find(self, record: Record) -> Skeleton | None:
        count = sum(isinstance(part, Text) for message in record.messages for part in message.parts)
        kinds = [medium.kind for medium in record.media()]
        looks: list[set[str]] = [set() for _ in range(count)]
        markers = [_Opaque(f"\ue0f0{number}\ue0f1", (looked,)) for number, looked in enumerate(looks)]
        try:
            rendered = self._layouter.rendered(with_texts(record, markers))
        except RecordError:
            return None
        if any(not looked <= {"strip"} for looked in looks):
            return None
        for trims in ([bool(looked) for looked in looks], [True] * count):
            skeleton = self._cut(rendered, trims, kinds)
            if skeleton is not None and self._holds(record, skeleton, count, kinds):
                return skeleton
        return None

    def _holds(self, record: Record, skeleton: Skeleton, count: int, kinds: list[MediaKind]) -> bool:
        """Does filling in give what the template gives, for texts that are likely to show a difference?"""
        media = [Expansion(pieces=(f"({n})", Run("*", n + 2)), patches=0, max_patches=0) for n in range(len(kinds))]
        for probe in self.probes():
            texts = [probe] * count
            try:
                slowly = self._layouter.expand(self._layouter.rendered(with_texts(record, texts)), kinds, media)
            except RecordError:
                return False
            if skeleton.fill(texts, kinds, media) != slowly:
                return False
        return True

    def probes(self) -> Iterator[str]:
        """Texts that are likely to show whether a template looks into them."""
        # A text with a medium's token is never filled in, so nothing need be known about it.
        literals = [text for text in self._layouter.template_literals if not self.hides_placeholder([text])]
        yield from _PROBES
        for literal, following in zip(literals, [*literals[1:], ""], strict=False):  # a base model has none
            yield from (literal, f"{literal}a", f"a{literal}", f"a {literal} b", f"{literal}a{following}")

    def _cut(self, rendered: Layout, trimmed: list[bool], kinds: list[MediaKind]) -> Skeleton | None:
        """Cut markers and placeholders out of the text; None where they are not exactly what was put in."""
        text = rendered.text
        pattern = re.compile(f"{_MARKER.pattern}|{self._layouter.placeholders.pattern}")
        matches = list(pattern.finditer(text))
        edges = [0, *(edge for match in matches for edge in match.span()), len(text)]
        bounds = list(zip(edges[::2], edges[1::2], strict=True))
        spans = None
        if rendered.supervised is not None:
            # A span that begins where a text begins must stay before it, one that ends where a text ends after it.
            pairs = [(_place(bounds, a, 0), _place(bounds, b, -1)) for a, b in rendered.supervised]
            spans = tuple((a, b) for a, b in pairs if a is not None and b is not None)
            if len(spans) < len(pairs):
                return None
        slots = tuple(self._slot(match, trimmed, rendered.supervised) for match in matches)
        texts = [slot.text for slot in slots if slot.kind is None]
        if sorted(texts) != list(range(len(trimmed))) or sorted(s.kind for s in slots if s.kind) != sorted(kinds):
            return None
        return Skeleton(tuple(str.__str__(text[a:b]) for a, b in bounds), slots, spans, rendered.special)

    def _slot(self, match: re.Match[str], trimmed: list[bool], spans: tuple[Span, ...] | None) -> Slot:
        if match.group(1) is not None:
            number = int(match.group(1))
            return Slot(text=number, trim=number < len(trimmed) and trimmed[number])
        supervised = spans is None or any(start <= match.start() < end for start, end in spans)
        return Slot(kind=self._layouter.kind_of(match.group()), supervised=supervised)


def _place(bounds: list[tuple[int, int]], position: int, which: int) -> Place | None:
    """The first or last literal that a position touches."""
    found = [Place(at, position - start) for at, (start, end) in enumerate(bounds) if start <= position <= end]
    return found[which] if found else None


def with_texts(record: Record, texts: Sequence[str]) -> Record:
    """The same shape with other texts, and media that refer to nothing."""
    remaining = iter(texts)
    nothing = MediaRef(name="")

    def part(old: Part) -> Part:
        return Text(next(remaining)) if isinstance(old, Text) else Media(old.kind, nothing)

    return replace(
        record, messages=tuple(replace(message, parts=tuple(map(part, message.parts))) for message in record.messages)
    )


class _Opaque(Watched):
    """A string that may be written out and joined with others, and notes everything else that is done with it."""

    _looks: tuple[set[str], ...]  # of every text that it is made of

    def __new__(cls, text: str, looks: tuple[set[str], ...]) -> _Opaque:
        made = super().__new__(cls, text)
        made._looks = looks
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: Any) -> _Opaque:
        return self.joined([self, other])

    def __radd__(self, other: Any) -> _Opaque:
        return self.joined([other, self])

    def joined(self, pieces: list[str]) -> _Opaque:
        """Looking into the whole is looking into each of its texts."""
        looks = [looked for piece in pieces if isinstance(piece, _Opaque) for looked in piece._looks]
        return _Opaque("".join(pieces), tuple(looks))


def _noting(name: str) -> Any:
    plain = getattr(str, name)

    def method(self: _Opaque, *args: Any, **kwargs: Any) -> Any:
        for looked in self._looks:
            looked.add(name if not kwargs and args in ((), (None,)) else f"{name} with arguments")
        found = plain(self, *args, **kwargs)
        return _Opaque(found, self._looks) if name == "strip" else found

    return method


_OPERATORS = (
    *("contains", "eq", "ne", "lt", "le", "gt", "ge", "len", "hash", "getitem", "iter", "mod", "rmod", "mul", "rmul"),
    "format",
)
for _name in [*(name for name in dir(str) if not name.startswith("_")), *(f"__{name}__" for name in _OPERATORS)]:
    setattr(_Opaque, _name, _noting(_name))
