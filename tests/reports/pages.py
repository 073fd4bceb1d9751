"""Reading a page back: its elements, its visible numbers and the JSON inside it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class Element:
    """An element with what is written in it."""

    tag: str
    attributes: dict[str, str]
    parents: tuple[str, ...]
    text: str = ""


@dataclass
class Page(HTMLParser):
    """A parsed page; a tag that is not closed where it should be is an error."""

    source: str
    elements: list[Element] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[Element] = []
        self.feed(self.source)
        self.close()
        assert not self._open, [element.tag for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"{tag} has an attribute twice"
        parents = tuple(element.tag for element in self._open)
        element = Element(tag, {name: value or "" for name, value in attrs}, parents)
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str) -> list[Element]:
        """Elements of one kind, in order."""
        return [element for element in self.elements if element.tag == tag]

    @property
    def data(self) -> dict[str, Any]:
        """The JSON that the page carries."""
        [script] = [one for one in self.all("script") if one.attributes.get("id") == "study"]
        return dict(json.loads(script.text))


def read_page(path: Path) -> Page:
    """A page from its file."""
    return Page(path.read_text(encoding="utf-8"))


def at(content: Any, pointer: str) -> Any:
    """The value at a JSON pointer."""
    for key in pointer.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        content = content[int(key)] if isinstance(content, list) else content[key]
    return content
