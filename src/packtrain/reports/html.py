"""Shared by all pages: templates that escape, numbers that say where they come from, a policy against requests."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from packtrain import __version__
from packtrain.core.numbers import count, decimal, format_number, shown
from packtrain.reports.study_content import LONGEST, Content, modality, other_limits, words
from packtrain.reports.svg import DARK, LIGHT


def render(template: str, content: Content, *, styles: tuple[str, ...] = ("report.css.jinja",), **more: object) -> str:
    """A page from its template. `content` is all that it may show; what follows the scripts is data, never markup."""
    environment = _environment()
    sheets = (environment.get_template(name).render(light=LIGHT, dark=DARK) for name in styles)
    style = Markup("").join(map(Markup, sheets))
    script = Markup(environment.get_template("report.js.jinja").render())
    return environment.get_template(template).render(
        c=content,
        n=Numbers(content),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        data=embed_json(content),
        version=__version__,
        **more,
    )


class Numbers:
    """Shows a number of the content, together with its place and its exact value."""

    def __init__(self, content: Content) -> None:
        self._content = content

    def __call__(self, kind: str, *path: str | int) -> Markup:
        value: Any = self._content
        for key in path:
            value = value[key]
        pointer = "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in path)
        exact = "" if value is None else json.dumps(value)
        return Markup('<data value="{}" data-at="{}" data-as="{}">{}</data>').format(
            exact, pointer, kind, format_number(kind, value)
        )

    def of(self, noun: str, *path: str | int) -> Markup:
        """A count with its noun."""
        number = self("count", *path)
        return number + f" {noun}" + ("" if 'value="1"' in number else "s")


def embed_json(content: Content) -> Markup:
    """JSON that no HTML parser can take for markup: plain ASCII without brackets."""
    text = json.dumps(content)
    for char in "<>&":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return Markup(text)


def yaml_lines(text: str) -> list[tuple[bool, str]]:
    """Lines of a config: is it a comment, and what it says."""
    return [(line.lstrip().startswith("#"), line) for line in text.splitlines()]


def changes(config: Mapping[str, object], other: Mapping[str, object], path: str = "") -> list[str]:
    """How another config differs, one setting a line.

    >>> changes({"data": {"packing_length": 20000, "packing": True}}, {"data": {"packing_length": 8192}})
    ['data.packing_length: 8192', 'data.packing: (left out)']
    """
    lines = []
    for key in (*config, *(key for key in other if key not in config)):
        here, there, name = config.get(key), other.get(key), f"{path}{key}"
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            lines += changes(here, there, f"{name}.")
        elif key not in other:
            lines.append(f"{name}: (left out)")
        elif here != there or key not in config:
            lines.append(f"{shown(name, 80)}: {shown(json.dumps(there, ensure_ascii=False), 120)}")
    return lines


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("packtrain.reports", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "text": _text,
        "sentence": _sentence,
        "words": words,
        "modality": modality,
        "setting": setting,
        "limits": other_limits,
    }
    return environment


def _text(text: object, limit: int = LONGEST) -> str:
    """Text of a study as it is, on one line."""
    return shown(text, limit)


def _sentence(text: str) -> str:
    """A name of ours at the start of a line."""
    return shown(text if "_" in text.split(" ")[0] else text[:1].upper() + text[1:], 120)


def setting(value: object) -> str:
    """A value of a config or of run.json, as pages show it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, int):
        return count(value)
    if isinstance(value, float):
        return f"{value:g}" if abs(value) < 0.01 else decimal(value)
    return shown(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 120)


def _hash(text: str) -> str:
    """The hash by which a content security policy knows an inline text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
