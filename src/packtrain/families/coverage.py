"""Which tokens cover a span of characters, how many follow one, and how many of a record carry loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Span = tuple[int, int]  # its first token, and the one behind its last


class Runs:
    """Lengths of the spans that tokens fall into, in turn without and with loss."""

    def __init__(self) -> None:
        self._lengths = [0]

    def add(self, count: int, *, loss: bool) -> None:
        """The next tokens."""
        if not count:
            return
        if loss == (len(self._lengths) % 2 == 0):
            self._lengths[-1] += count
        else:
            self._lengths.append(count)

    def add_text(self, count: int, spans: Iterable[Span], begin: int = 0) -> None:
        """The tokens of a text from `begin` to `count`; those inside the spans, which are in order, carry loss."""
        for first, end in spans:
            first = max(first, begin)
            if first < end:
                self.add(first - begin, loss=False)
                self.add(end - first, loss=True)
                begin = end
        self.add(count - begin, loss=False)

    def lengths(self) -> tuple[int, ...]:
        """The spans so far."""
        return tuple(self._lengths)


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


def last_runs(lengths: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The runs of the last `count` tokens."""
    skipped, found = sum(lengths) - count, Runs()
    for number, length in enumerate(lengths):
        found.add(length - min(skipped, length), loss=number % 2 == 1)
        skipped -= min(skipped, length)
    return found.lengths()


def covered_tokens(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """The first token that covers a character in [start, end), and how many do."""
    first = _token_at(encoding, start, end, 1)
    last = _token_at(encoding, end - 1, start - 1, -1)
    if first is None or last is None:
        return 0, 0
    # A rare character is several tokens, all with its offsets: the span ends with the last of them. Where a
    # normalizer has composed characters, the later ones have no token, so the span may end behind that.
    while last + 1 < len(encoding):
        characters = encoding.token_to_chars(last + 1)
        if characters is None or characters[0] >= end:
            break
        last += 1
    return first, last - first + 1


def covered_by_all(encoding: Any, spans: Iterable[tuple[int, int]], *, behind: int = 0) -> list[Span]:
    """The tokens that cover a character of any of these spans, which are in order; the first `behind` never do."""
    found = []
    for start, end in spans:
        first, count = covered_tokens(encoding, start, end)
        first, stop = max(first, behind), first + count  # a token may reach from one span into the next
        if first < stop:
            found.append((first, stop))
            behind = stop
    return found


def tokens_behind(encoding: Any, at: int) -> int:
    """The tokens after the one that covers a character; none where it has no token, so that nothing is promised."""
    token = encoding.char_to_token(at)
    return 0 if token is None else len(encoding) - 1 - int(token)


def _token_at(encoding: Any, at: int, stop: int, step: int) -> int | None:
    """The token that covers a character, or the next character that any token covers, before `stop`."""
    while (at < stop) if step > 0 else (at > stop):
        token = encoding.char_to_token(at)
        if token is not None:
            return int(token)
        at += step
    return None
