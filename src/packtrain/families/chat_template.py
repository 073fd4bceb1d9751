"""A conversation through a model's chat template, exactly as transformers renders it, without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packtrain.core.errors import ConfigError, RecordError

# Unicode non-characters: they mark where a template's own generation blocks begin and end, and are cut out again.
_BLOCK_START, _BLOCK_END = "\ufdd0", "\ufdd1"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text; `generated` are the character spans that the template itself marks, if it marks any."""

    text: str
    generated: tuple[tuple[int, int], ...] | None = None


class _GenerationBlocks(jinja2.ext.Extension):
    """The `{% generation %}` tag of Hugging Face templates."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BLOCK_START}{caller()}{_BLOCK_END}"


class ChatTemplate:
    """One compiled chat template with the special tokens it may refer to.

    `literals` are the string constants in its source: whatever it compares a text with is among them.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                "chat template", got=f"{type(error).__name__}: {error}", expected="a Jinja template"
            ) from None
        constants = environment.parse(source).find_all(jinja2.nodes.Const)
        self.literals = tuple(dict.fromkeys(c.value for c in constants if isinstance(c.value, str)))
        self._variables = {"tools": None, "documents": None, **special_tokens}
        self._marks_generation = "generation" in source and "endgeneration" in source

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False) -> Rendered:
        """The conversation as the tokenizer will see it."""
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._variables
            )
        except jinja2.TemplateError as error:
            raise RecordError("template", "the chat template refused the record", str(error)) from None
        except (TypeError, KeyError, IndexError, AttributeError, ValueError) as error:
            raise RecordError("template", "the chat template failed", f"{type(error).__name__}: {error}") from None
        return _cut_marks(text) if self._marks_generation else Rendered(text)


def _cut_marks(text: str) -> Rendered:
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    length = 0
    first, *blocks = text.split(_BLOCK_START)
    pieces.append(first)
    length += len(first)
    for block in blocks:
        inside, _, after = block.partition(_BLOCK_END)
        spans.append((length, length + len(inside)))
        pieces += [inside, after]
        length += len(inside) + len(after)
    return Rendered("".join(pieces), tuple(spans))


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes for HTML, which no tokenizer wants."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
