"""Text of data, names and configs on a terminal: nothing in it may move the cursor, change colours or hide the rest."""

from __future__ import annotations

import re

# Controls of C0 and C1 without tab and newline, and those that turn the direction of the text around.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""The same text with control characters written out as Python and JSON would.

    >>> print(visible("a\x1b[31m\nb\u202e"))
    a\x1b[31m
    b\u202e
    """
    return _CONTROLS.sub(lambda found: _escape(ord(found[0])), text)


def visible_json(text: str) -> str:
    """JSON text with such characters as its own escapes."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
