"""Text as it may be shown: URLs without users, passwords and signatures; no characters that steer a terminal."""

from __future__ import annotations

import re

LINK = r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)"  # before a URL in which another one is: zip://a.json::http://host/b.zip
ENDS = r"[\s'\"<>`\\]"  # what no URL has in it
_URL = re.compile(rf"([A-Za-z][A-Za-z0-9+.-]*)://((?:(?!{LINK}|{ENDS}).)*)")
WEB = ("http", "https")  # where a question mark begins a query instead of being a wildcard
# Names of parameters that are no part of a place; those of two letters are Azure's.
_SECRET = re.compile(r"(?i)sig|token|key|auth|pass|pwd|secret|cred|expires|policy|session|code|hmac|^x-|^s[a-z]$|^spr$")
_PLAIN = re.compile(r"[\w.,:/-]{0,24}")  # a value that says what is meant; what is longer may be a key to it


def public(text: str) -> str:
    """The same text with every URL in it reduced to its place, and what in its query says which of them is meant.

    >>> public("http://me:word@host:80/a.tar?part=3&X-Amz-Signature=abc#x, s3://key:secret@bucket/a-?.tar")
    'http://host:80/a.tar?part=3 s3://bucket/a-?.tar'
    """
    return _URL.sub(_without_secrets, text) if "://" in text else text


def _without_secrets(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    end = min((at for mark in "/?#" if (at := rest.find(mark)) >= 0), default=len(rest))
    host, place = rest[:end].rpartition("@")[2], rest[end:]
    if scheme.lower() not in WEB and "=" not in place.partition("?")[2]:  # it is a wildcard
        return f"{scheme}://{host}{place}"
    path, _, query = place.partition("#")[0].partition("?")
    shown = [one for one in query.split("&") if one and _may_be_shown(*one.partition("=")[::2])]
    return f"{scheme}://{host}{path}{'?' if shown else ''}{'&'.join(shown)}"


def _may_be_shown(name: str, value: str) -> bool:
    return not _SECRET.search(name) and _PLAIN.fullmatch(value) is not None and _PLAIN.fullmatch(name) is not None


# Controls of C0 and C1 without tab and newline, and those that turn the direction of the text around.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""The same text with control characters written out as Python and JSON would.

    >>> print(visible("a\x1b[31m\nb\u202e"))
    a\x1b[31m
    b\u202e
    """
    return _CONTROLS.sub(lambda match: _escape(ord(match[0])), text)


def visible_json(text: str) -> str:
    """JSON text with such characters as its own escapes."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
