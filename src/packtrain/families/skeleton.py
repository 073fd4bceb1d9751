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
from packtrain.core.values import Media, MediaHeader, MediaRef, Part, Record, Text
from packtrain.families.chat_template import Watched
from packtrain.families.layout import Layout, Layouter

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
Place = tuple[int, int]  # a character: the number of a literal, and the offset into it
_MOST_SHAPES = 4096  # kept in memory; more mean that hardly any comes again


@dataclass(frozen=True, slots=True)
class Skeleton:
    """The literals of one shape, placeholders of media included, and which text stands between two of them."""

    literals: tuple[str, ...]
    slots: tuple[tuple[int, bool], ...]  # number of the text, and whether it is trimmed
    spans: tuple[tuple[Place, Place], ...] | None
    special: bool

    def fill(self, texts: Sequence[str]) -> Layout:
        """What the template writes for these texts, placeholders still in place."""
        pieces, starts, length = [self.literals[0]], [0], len(self.literals[0])
        for (number, trim), literal in zip(self.slots, self.literals[1:], strict=True):
            text = texts[number].strip() if trim else texts[number]
            pieces += (text, literal)
            starts.append(length + len(text))
            length = starts[-1] + len(literal)
        spans = self.spans
        if spans is not None:
            supervised = tuple([(starts[a] + at, starts[b] + to) for (a, at), (b, to) in spans])
        return Layout(text="".join(pieces), special=self.special, supervised=None if spans is None else supervised)


def shape_of(record: Record) -> Shape:
    """What a record's skeleton depends on."""
    return tuple(
        [(m.role, m.train, *[None if isinstance(p, Text) else p.kind for p in m.parts]) for m in record.messages]
    )


def texts_of(record: Record) -> list[str]:
    """The texts of a record, in order."""
    return [part.text for message in record.messages for part in message.parts if isinstance(part, Text)]


class Skeletons:
    """The skeletons of one layouter, found shape by shape."""

    # Learning a shape costs as much as running the template for some hundred records, so rare shapes are not learned.
    patience: int = 32

    def __init__(self, layouter: Layouter) -> None:
        self._layouter = layouter
        functions = layouter.template_functions
        filters = {name for name in functions if not name.startswith(".")}
        self._always_run = not filters <= _SEEN_THROUGH or bool(functions & _HIDING_METHODS)
        self._known: dict[Shape, Skeleton | int | None] = {}  # a number: how often it has come

    def layout(self, record: Record, headers: Sequence[MediaHeader]) -> Layout:
        """As the layouter lays it out, by filling in where that is known to be the same."""
        skeleton = self.skeleton(record)
        texts = texts_of(record) if skeleton is not None else []
        if skeleton is None or self._reserved_in("".join(texts)):
            return self._layouter.layout(record, headers)
        return self._layouter.expanded(skeleton.fill(texts), record, headers)

    def skeleton(self, record: Record) -> Skeleton | None:
        """The skeleton of a record's shape; None where its template has to be run."""
        if record.plain or record.structured or self._always_run:
            return None
        shape = shape_of(record)
        known = self._known.get(shape, 0)
        if not isinstance(known, int):
            return known
        if len(self._known) >= _MOST_SHAPES:
            self._known.clear()
        learned = self._find(record) if known >= self.patience else None
        self._known[shape] = learned if known >= self.patience else known + 1
        return learned

    def _reserved_in(self, text: str) -> bool:
        """Does it hold a token of a medium?"""
        return any(token in text for token in self._layouter.reserved)

    def _find(self, record: Record) -> Skeleton | None:
        looks: list[set[str]] = [set() for _ in texts_of(record)]
        markers = [_Opaque(f"\ue0f0{number}\ue0f1", (looked,)) for number, looked in enumerate(looks)]
        try:
            rendered = self._layouter.rendered(with_texts(record, markers))
        except RecordError:
            return None
        if any(not looked <= {"strip"} for looked in looks):
            return None
        for trims in ([bool(looked) for looked in looks], [True] * len(looks)):
            skeleton = _cut(rendered, trims)
            if skeleton is not None and self._holds(record, skeleton, len(looks)):
                return skeleton
        return None

    def _holds(self, record: Record, skeleton: Skeleton, count: int) -> bool:
        """Does filling in give what the template gives, for texts that are likely to show a difference?"""
        try:
            return all(
                skeleton.fill([probe] * count) == self._layouter.rendered(with_texts(record, [probe] * count))
                for probe in self.probes()
            )
        except RecordError:
            return False

    def probes(self) -> Iterator[str]:
        """Texts that are likely to show whether a template looks into them."""
        # A text with a medium's token is never filled in, so nothing need be known about it.
        literals = [text for text in self._layouter.template_literals if not self._reserved_in(text)]
        yield from _PROBES
        for literal, following in zip(literals, [*literals[1:], ""], strict=False):  # a base model has none
            yield from (literal, f"{literal}a", f"a{literal}", f"a {literal} b", f"{literal}a{following}")


def _cut(rendered: Layout, trims: Sequence[bool]) -> Skeleton | None:
    """Cut the markers out of the text; None where they are not exactly what was put in."""
    text = rendered.text
    matches = list(_MARKER.finditer(text))
    numbers = [int(match[1]) for match in matches]
    if sorted(numbers) != list(range(len(trims))):
        return None
    edges = [0, *(edge for match in matches for edge in match.span()), len(text)]
    bounds = list(zip(edges[::2], edges[1::2], strict=True))
    spans = None
    if rendered.supervised is not None:
        # A span that begins where a text begins must stay before it, one that ends where a text ends after it.
        pairs = [(_place(bounds, a, 0), _place(bounds, b, -1)) for a, b in rendered.supervised]
        spans = tuple((a, b) for a, b in pairs if a is not None and b is not None)
        if len(spans) < len(pairs):
            return None
    literals = tuple(str.__str__(text[a:b]) for a, b in bounds)
    return Skeleton(literals, tuple((number, trims[number]) for number in numbers), spans, rendered.special)


def _place(bounds: list[tuple[int, int]], position: int, which: int) -> Place | None:
    """The first or last literal that a position touches."""
    places = [(at, position - start) for at, (start, end) in enumerate(bounds) if start <= position <= end]
    return places[which] if places else None


def with_texts(record: Record, texts: Sequence[str]) -> Record:
    """The same shape with other texts, and media that refer to nothing."""
    remaining = iter(texts)

    def part(old: Part) -> Part:
        return Text(next(remaining)) if isinstance(old, Text) else Media(old.kind, MediaRef(name=""))

    return replace(
        record, messages=tuple(replace(message, parts=tuple(map(part, message.parts))) for message in record.messages)
    )


class _Opaque(Watched):
    """A string that may be written out and joined with others, and notes everything else that is done with it."""

    _looks: tuple[set[str], ...]  # of every text that it is made of

    def __new__(cls, text: str, looks: tuple[set[str], ...]) -> _Opaque:
        marker = super().__new__(cls, text)
        marker._looks = looks
        return marker

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
        result = plain(self, *args, **kwargs)
        return _Opaque(result, self._looks) if name == "strip" else result

    return method


_OPERATORS = (
    *("contains", "eq", "ne", "lt", "le", "gt", "ge", "len", "hash", "getitem", "iter", "mod", "rmod", "mul", "rmul"),
    "format",
)
for _name in [*(name for name in dir(str) if not name.startswith("_")), *(f"__{name}__" for name in _OPERATORS)]:
    setattr(_Opaque, _name, _noting(_name))
