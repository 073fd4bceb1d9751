"""Which tokens cover a stretch of characters, and how many stand behind one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def covered_tokens(encoding: Any, start: int, end: int) -> tuple[int, int]:
    """The first token that covers a character in [start, end), and how many do."""
    first = _token_at(encoding, start, end, 1)
    last = _token_at(encoding, end - 1, start - 1, -1)
    if first is None or last is None:
        return 0, 0
    # A rare character is several tokens, all with its offsets: the stretch ends with the last of them. Where a
    # normalizer has composed characters, the later ones have no token, so the stretch may end behind that.
    while last + 1 < len(encoding):
        characters = encoding.token_to_chars(last + 1)
        if characters is None or characters[0] >= end:
            break
        last += 1
    return first, last - first + 1


def covered_by_all(encoding: Any, spans: Iterable[tuple[int, int]], *, behind: int = 0) -> int:
    """How many tokens cover a character of any of these stretches, which are in order; the first `behind` never do."""
    total = 0
    for start, end in spans:
        first, count = covered_tokens(encoding, start, end)
        if count:
            total += max(0, first + count - max(first, behind))  # a token may reach from one stretch into the next
            behind = max(behind, first + count)
    return total


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
