"""Secrets of the user: they are used where something is opened, and never written, shown or compared.

What a URL holds beside its place (user, password, signature) is kept apart from it where it comes in. From there on
only the rest is passed around, in requests, tables, ledgers and messages; code that opens it calls `with_secrets`.
What was kept apart is in the environment of this process, so that those that it starts have it too, and nowhere else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from packtrain.core.errors import ConfigError
from packtrain.core.public import ENDS, LINK, WEB, public

_VARIABLE = "PACKTRAIN_URLS"
_PATTERN = re.compile(r"[*?\[{]")
# Settings whose value is a secret, by their name.
_KEYS = ("token", "api_key", "password", "secret", "hub_token", "push_to_hub_token", "hf_token", "use_auth_token")
_ENDINGS = ("_api_key", "_secret_key", "_access_key", "_password", "_auth_token", "_access_token", "_api_token")


def hide_secrets(url: str) -> str:
    """A URL without its secrets, which are remembered for those who open it; any other text as it is."""
    _refuse_blanks(url)
    shown = public(url)
    if shown == url:
        return url
    secrets = _load_secrets()
    previous = secrets.get(shown, url)
    if _resource(previous) != _resource(url):
        raise ConfigError(
            shown,
            got="two URLs that differ only in parts that are not stored (user, password, long or secret parameters)",
            expected="URLs that differ in what is stored",
            fix="copy one of them elsewhere",
        )
    os.environ[_VARIABLE] = json.dumps({**secrets, shown: url})
    return shown


def _refuse_blanks(url: str) -> None:
    """In a text, a URL ends at a blank or a quote: the rest of a password after it would be shown."""
    filled = re.sub(ENDS, "_", url)
    if filled != url and public(filled) != filled:
        raise ConfigError(
            public(filled),
            got="a URL with a space, quote or backslash, and with a user, a password or a signature",
            expected="a URL with such characters escaped",
            fix="write %20 for a space, %22 and %27 for quotes, %5C for a backslash",
        )


def has_secrets(url: str) -> bool:
    """Was something of this URL kept apart?"""
    return _full_url(url) is not None


def with_secrets(url: str) -> str:
    """A URL with what was kept apart of it, or of the folder or pattern that it is a file of."""
    return _full_url(url) or url


def export_secrets() -> str:
    """All secrets, for a process on another machine; `import_secrets` there."""
    return os.environ.get(_VARIABLE, "{}")


def import_secrets(secrets: str) -> None:
    """Use the secrets that another process exported."""
    os.environ[_VARIABLE] = secrets


def is_secret(name: str) -> bool:
    """Is the value of a setting of this name a secret?"""
    return name.lower() in _KEYS or name.lower().endswith(_ENDINGS)


def without_secrets(value: Any) -> Any:
    """Plain values as they may be written: settings that are secrets are left out, URLs have none."""
    if isinstance(value, Mapping):
        return {name: without_secrets(inner) for name, inner in value.items() if not is_secret(str(name))}
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    return public(value) if isinstance(value, str) else value


def override_without_secrets(text: str) -> str:
    """A setting of the command line, `section.key=value`, as it may be written.

    >>> override_without_secrets("training.hub_token=hf_abc"), override_without_secrets("data.packing=false")
    ('training.hub_token=***', 'data.packing=false')
    """
    name, equals, _ = text.partition("=")
    return f"{name}{equals}***" if is_secret(name.rpartition(".")[2].strip()) else public(text)


def secret_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are secrets."""
    return {name: value for name, value in settings.items() if is_secret(str(name))}


def _load_secrets() -> dict[str, str]:
    return dict(json.loads(os.environ.get(_VARIABLE, "{}")))


def _full_url(url: str) -> str | None:
    secrets = _load_secrets()
    if url in secrets or not secrets:
        return secrets.get(url)
    stems = {shown: _stem(shown) for shown in secrets}
    above = [shown for shown, stem in stems.items() if url.startswith(stem)]
    if not above:
        return None
    prefix, last = _chain(url)
    scheme, _, place = last.partition("://")
    secret = urlsplit(_chain(secrets[max(above, key=lambda shown: len(stems[shown]))])[1])
    full = f"{prefix}{scheme}://{secret.netloc}/{place.partition('/')[2]}"
    params = [part for part in secret.query.split("&") if part and part not in urlsplit(url).query.split("&")]
    if scheme not in WEB or not params:
        return full
    return f"{full}{'&' if '?' in full else '?'}{'&'.join(params)}"


def _chain(url: str) -> tuple[str, str]:
    """The last URL of a chain such as simplecache::http://host/a.tar, and the text before it."""
    last = re.split(LINK, url)[-1]
    return url.removesuffix(last), last


def _stem(url: str) -> str:
    """The prefix that all files of a folder or a pattern share."""
    place = url.partition("?")[0] if url.startswith(tuple(f"{scheme}://" for scheme in WEB)) else url
    fixed = _PATTERN.split(place, maxsplit=1)[0]
    return fixed if fixed != place else place.rstrip("/") + "/"


def _resource(url: str) -> tuple[str, tuple[str, ...]]:
    """The parts of a URL that do not change with its signature."""
    place = urlsplit(url)
    names = sorted(part.partition("=")[0].lower() for part in place.query.split("&") if part)
    signed = any(re.search("sig|token|expires|policy|^x-", name) for name in names)
    return place.path, () if signed else tuple(sorted(place.query.split("&")))
