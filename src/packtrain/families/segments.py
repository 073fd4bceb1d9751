"""Tokenizing only what differs: what is the same in all records of one shape is tokenized once.

A tokenizer cuts its text at special tokens first and then works on each piece alone. So the tokens of a record are
those of its pieces, and most pieces of a rendered conversation never change:

    <|im_start|> system\\nYou are helpful. <|im_end|> \\n <|im_start|> user\\n[0] <|im_end|> \\n <|im_start|> ...
                 once                                once              each record              once

Only special tokens that no text can run into are cut at, and a shape is used only if its counts equal those of the
whole text for a set of awkward texts.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.families.base import Expansion, Run
from packtrain.families.coverage import Runs, Span, covered_by_all, tokens_behind
from packtrain.families.skeleton import Skeleton, Slot
from packtrain.families.tokenizer import LightTokenizer

Fragment = str | Slot
Edge = tuple[int, int]  # fragment of a segment, character in it
MOST_KNOWN = 10_000  # expansions whose tokens are remembered
# A position in a skeleton: (2 n, offset) inside literal n; slot n fills (2 n + 1, 0) to (2 n + 2, 0).
Position = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of one record, media apart."""

    text_tokens: int
    supervised_tokens: int
    tail_tokens: int  # after the last media token; all of them where there are no media
    tail_runs: tuple[int, ...]  # lengths of the spans of that tail, in turn without and with loss

    @classmethod
    def all_supervised(cls, text_tokens: int, supervised_tokens: int, tail_tokens: int) -> Counts:
        """Where all text carries loss; the first token, where it is in the tail, is predicted from nothing."""
        first = int(text_tokens == tail_tokens > supervised_tokens)
        runs = Runs()
        runs.add_text(tail_tokens, [(first, tail_tokens)])
        return cls(text_tokens, supervised_tokens, tail_tokens, runs.lengths())


@dataclass(frozen=True, slots=True)
class _Segment:
    """A piece between two cuts that holds texts; `ranges` are its parts that carry loss."""

    fragments: tuple[Fragment, ...]
    ranges: tuple[tuple[Edge, Edge], ...]

    def strings(self, texts: Sequence[str]) -> list[str]:
        """The fragments of one record."""
        return [
            fragment
            if isinstance(fragment, str)
            else texts[fragment.text].strip()
            if fragment.trim
            else texts[fragment.text]
            for fragment in self.fragments
        ]

    def supervised(self, strings: Sequence[str], encoding: Any) -> list[Span]:
        """Its tokens that carry loss."""
        starts = [0, *itertools.accumulate([len(text) for text in strings])]
        spans = [(starts[first] + start, starts[last] + end) for (first, start), (last, end) in self.ranges]
        return covered_by_all(encoding, spans)


@dataclass(frozen=True, slots=True)
class Draft:
    """One record cut into the pieces that have to be tokenized for it."""

    shape: SegmentedShape
    segments: list[str]
    strings: list[list[str]]
    media_text: int  # text tokens inside expansions
    media_supervised: int
    media_tail: int  # those behind the last media token

    def counts(self, encodings: Sequence[Any]) -> Counts:
        """The record's tokens, from the encodings of its segments."""
        shape = self.shape
        lengths = [len(encoding) for encoding in encodings]
        text = shape.constant + self.media_text + sum(lengths)
        tail = shape.constant_tail + self.media_tail + sum(lengths[shape.first_tail_segment :])
        if shape.all_supervised:
            return Counts.all_supervised(text, text - 1, tail)
        spans = [
            segment.supervised(strings, encoding) if segment.ranges else []
            for segment, strings, encoding in zip(shape.segments, self.strings, encodings, strict=True)
        ]
        supervised = shape.constant_supervised + self.media_supervised
        supervised += sum([end - first for found in spans for first, end in found])
        runs = Runs()
        runs.add(self.media_tail, loss=bool(shape.media) and shape.media[-1].supervised)
        for piece in shape.tail:
            if isinstance(piece, int):
                runs.add_text(lengths[piece], spans[piece])
            else:
                runs.add(piece.count, loss=piece.loss)
        return Counts(text, supervised, tail, runs.lengths())


@dataclass(frozen=True, slots=True)
class _Fixed:
    """Tokens that are the same in every record."""

    count: int
    loss: bool


@dataclass(frozen=True, slots=True)
class SegmentedShape:
    """A skeleton cut at special tokens."""

    segments: tuple[_Segment, ...]  # those with texts in them
    media: tuple[Slot, ...]
    constant: int  # tokens of everything else
    constant_supervised: int
    constant_tail: int  # those of the constant tokens that stand behind the last medium
    first_tail_segment: int  # the number of the first segment that does
    tail: tuple[_Fixed | int, ...]  # what stands behind the last medium, in order; numbers are those of segments
    all_supervised: bool
    media_supervised: tuple[bool, ...]
    ended: bool  # does anything that carries loss end in an end token

    def draft(self, texts: Sequence[str], expansions: Sequence[Expansion], pricer: ExpansionPricer) -> Draft | None:
        """The pieces of one record; None where one of its expansions has no price."""
        media_text = media_supervised = media_tail = 0
        if self.media:
            for slot, expansion in zip(self.media, expansions, strict=True):
                price = pricer.price(expansion)
                if price is None:
                    return None
                tokens, media_tail = price
                media_text += tokens
                media_supervised += tokens if slot.supervised else 0
        strings = [segment.strings(texts) for segment in self.segments]
        segments = ["".join(pieces) for pieces in strings]
        return Draft(self, segments, strings, media_text, media_supervised, media_tail)


class Cutter:
    """Cuts skeletons for one tokenizer."""

    def __init__(self, tokenizer: LightTokenizer) -> None:
        self._tokenizer = tokenizer
        self._specials = tokenizer.special_tokens()
        self.pricer = ExpansionPricer(tokenizer, frozenset(self._specials))

    def cut(self, skeleton: Skeleton) -> SegmentedShape | None:
        """The shape's constant and variable pieces; None where the first token could carry loss, or texts end it."""
        ended = self._ended(skeleton)
        if ended is None:
            return None
        specials = self._pattern(skeleton)
        builder = _Builder(self._tokenizer, skeleton)
        for number, literal in enumerate(skeleton.literals):
            cursor = 0
            for match in specials.finditer(literal):
                builder.literal(number, cursor, literal[cursor : match.start()])
                builder.special(number, match.start())
                cursor = match.end()
            builder.literal(number, cursor, literal[cursor:])
            if number < len(skeleton.slots):
                builder.slot(number, skeleton.slots[number])
        return builder.finished(ended=ended)

    def _ended(self, skeleton: Skeleton) -> bool | None:
        """Does anything that carries loss end in an end token? None where that depends on the texts."""
        ends = self._tokenizer.ends
        if skeleton.spans is None:
            last = skeleton.literals[-1].rstrip()
            return (skeleton.special and self._tokenizer.appends_eos) or (last.endswith(ends) if last else None)
        if any(skeleton.literals[end.literal].endswith(ends, 0, end.offset) for _, end in skeleton.spans):
            return True
        return None if any(end.literal and not end.offset for _, end in skeleton.spans) else False

    def _pattern(self, skeleton: Skeleton) -> re.Pattern[str]:
        """The special tokens in the literals at which texts may be cut."""
        found = [s for s in self._specials if any(s in literal for literal in skeleton.literals)]
        usable = sorted((s for s in found if self._tokenizer.is_isolated(s)), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, usable)) or r"(?!)")


class ExpansionPricer:
    """Text tokens of expansions, and those of them that stand behind the last run; each distinct one is counted once.

    Only expansions that begin and end with special tokens, and hold a run, have a price.
    """

    def __init__(self, tokenizer: LightTokenizer, specials: frozenset[str]) -> None:
        self._tokenizer, self._specials = tokenizer, specials
        self._known: dict[tuple[str | Run, ...], tuple[int, int] | None] = {}  # by what is written, each run once

    def price(self, expansion: Expansion) -> tuple[int, int] | None:
        """Text tokens, all and behind the last run; None where the text around the expansion could matter."""
        pieces = expansion.pieces
        shape = tuple([piece.token if type(piece) is Run and piece.count else piece for piece in pieces])
        if shape not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[shape] = self._count(pieces)
        return self._known[shape]

    def _count(self, pieces: tuple[str | Run, ...]) -> tuple[int, int] | None:
        shown = [piece for piece in pieces if not (isinstance(piece, Run) and not piece.count)]
        runs = [number for number, piece in enumerate(shown) if isinstance(piece, Run)]
        written = [piece.token if isinstance(piece, Run) else piece for piece in shown]
        if not runs or not self._opens(written[0]) or not self._closes(written[-1]):
            return None
        encoding = self._tokenizer.encode("".join(written), special=False)
        return len(encoding) - len(runs), tokens_behind(encoding, len("".join(written[: runs[-1]])))

    def _opens(self, text: str) -> bool:
        return any(text.startswith(s) and self._tokenizer.is_isolated(s) for s in self._specials)

    def _closes(self, text: str) -> bool:
        return any(text.endswith(s) and self._tokenizer.is_isolated(s) for s in self._specials)


class _Builder:
    """Collects fragments into segments and counts what is constant."""

    def __init__(self, tokenizer: LightTokenizer, skeleton: Skeleton) -> None:
        self._tokenizer = tokenizer
        self._all_supervised = skeleton.spans is None
        self._spans: list[tuple[Position, Position]] = [
            ((2 * start.literal, start.offset), (2 * end.literal, end.offset)) for start, end in skeleton.spans or ()
        ]
        self._open: list[tuple[Fragment, Position, Position]] = []  # with the positions it fills
        self._segments: list[_Segment] = []
        self._media: list[Slot] = []
        self._constant = tokenizer.added_around if skeleton.special else 0
        self._added_behind = tokenizer.added_behind if skeleton.special else 0
        self._before_tail = self._first_tail_segment = 0  # constant tokens and segments up to the last medium
        self._constant_supervised = 0
        self._tail: list[_Fixed | int] = [_Fixed(self._constant - self._added_behind, loss=False)]
        self._first_is_fixed = bool(self._constant) or bool(skeleton.literals[0])

    def literal(self, number: int, offset: int, text: str) -> None:
        """A span of literal `number` without special tokens."""
        if text:
            self._open.append((text, (2 * number, offset), (2 * number, offset + len(text))))

    def slot(self, number: int, slot: Slot) -> None:
        """A text becomes part of the segment; a medium ends it."""
        if slot.kind is None:
            self._open.append((slot, (2 * number + 1, 0), (2 * number + 2, 0)))
        else:
            self._close()
            self._media.append(slot)
            self._before_tail = self._constant - self._added_behind
            self._first_tail_segment = len(self._segments)
            self._tail = []

    def special(self, number: int, offset: int) -> None:
        """A special token ends the segment and is one token, which carries loss if it stands inside a span."""
        self._close()
        self._constant += 1
        supervised = sum(start <= (2 * number, offset) < end for start, end in self._spans)
        self._constant_supervised += supervised
        self._tail.append(_Fixed(1, loss=supervised > 0))

    def finished(self, *, ended: bool) -> SegmentedShape | None:
        """None where a record's first token, which never carries loss, could be one that does."""
        self._close()
        if not self._first_is_fixed or any(start <= (0, 0) for start, _ in self._spans):
            return None
        return SegmentedShape(
            segments=tuple(self._segments),
            media=tuple(self._media),
            constant=self._constant,
            constant_supervised=self._constant_supervised,
            constant_tail=self._constant - self._before_tail,
            first_tail_segment=self._first_tail_segment,
            tail=tuple(_joined([*self._tail, _Fixed(self._added_behind, loss=False)])),
            all_supervised=self._all_supervised,
            media_supervised=tuple(slot.supervised for slot in self._media),
            ended=ended,
        )

    def _close(self) -> None:
        """End the segment that was being collected."""
        filled, self._open = self._open, []
        if not filled:
            return
        ranges = tuple(found for start, end in self._spans if (found := _range(filled, start, end)) is not None)
        segment = _Segment(tuple(fragment for fragment, _, _ in filled), ranges)
        if any(isinstance(fragment, Slot) for fragment in segment.fragments):
            self._tail.append(len(self._segments))
            self._segments.append(segment)
            return
        strings = segment.strings(())
        encoding = self._tokenizer.encode("".join(strings), special=False)
        self._constant += len(encoding)
        begin = 0
        for first, end in segment.supervised(strings, encoding):
            self._constant_supervised += end - first
            self._tail += [_Fixed(first - begin, loss=False), _Fixed(end - first, loss=True)]
            begin = end
        self._tail.append(_Fixed(len(encoding) - begin, loss=False))


def _joined(pieces: Iterable[_Fixed | int]) -> list[_Fixed | int]:
    """The same tokens in fewer pieces."""
    found: list[_Fixed | int] = []
    for piece in pieces:
        last = found[-1] if found else None
        if isinstance(piece, _Fixed) and isinstance(last, _Fixed) and last.loss == piece.loss:
            found[-1] = _Fixed(last.count + piece.count, loss=last.loss)
        elif isinstance(piece, int) or piece.count:
            found.append(piece)
    return found


def _range(
    filled: list[tuple[Fragment, Position, Position]], start: Position, end: Position
) -> tuple[Edge, Edge] | None:
    """The part of a segment that lies between two positions."""
    edges: list[tuple[Edge, Edge]] = []
    for at, (fragment, low, high) in enumerate(filled):
        first, last = max(low, start), min(high, end)
        if first < last:
            whole = isinstance(fragment, Slot)
            edges.append(((at, 0 if whole else first[1] - low[1]), (at + 1, 0) if whole else (at, last[1] - low[1])))
    return (edges[0][0], edges[-1][1]) if edges else None
