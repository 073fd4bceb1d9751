"""A conversation through a model's chat template, exactly as transformers renders it, without transformers.

The date that a template writes is one for all that is rendered, whenever and wherever: `strftime_now` is answered with
midnight of a given day, never with the clock.
"""

from __future__ import annotations

import copy
import json
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from packtrain.core.errors import ConfigError, RecordError

# Unicode non-characters: they mark where a template's own generation blocks begin and end, and are cut out again.
# Several of them, because a single one may be part of a text.
_BLOCK_START, _BLOCK_END = "\ufdd0\ufdd2\ufdd0", "\ufdd1\ufdd2\ufdd1"
_MARKS = "packtrain_marks"  # the variable through which a rendering says whether to mark


ChatMessage = dict[str, Any]  # as `apply_chat_template` takes it
Messages = Sequence[ChatMessage]


@dataclass(frozen=True, slots=True)
class _Marks:
    """What is written around a generation block."""

    start: str
    end: str


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

    @jinja2.pass_context
    def _mark(self, context: jinja2.runtime.Context, caller: Any) -> str:
        marks: _Marks = context[_MARKS]
        return marks.start + caller() + marks.end if marks.start else caller()  # type: ignore[no-any-return]


class Watched(str):
    """A text that wants to be asked when it is joined with others, so that it can go on watching what is done."""

    def joined(self, pieces: list[str]) -> str:
        """All pieces, of which this is one, as one text."""
        raise NotImplementedError


def _concat(pieces: Iterable[str]) -> str:
    """As "".join, by which macros, blocks and `~` make their texts."""
    pieces = list(pieces)
    watched = next((piece for piece in pieces if isinstance(piece, Watched)), None)
    return "".join(pieces) if watched is None else watched.joined(pieces)


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Joins by the environment's `concat` everywhere; jinja2 itself does not for `~`."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _CodeGenerator
    concat = staticmethod(_concat)  # type: ignore[assignment]


class ChatTemplate:
    """One compiled chat template with the special tokens it may refer to.

    `literals` are the texts that it may compare a text with: the string constants in its source and the special tokens.
    `functions` are the names of the filters it uses and of the methods it calls, `variables` of the variables it reads,
    `looks_up` of keys and attributes; `written` are the texts in its source. `date` is what it writes as today.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], date: str | None = None) -> None:
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=strftime_at(date))
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, SyntaxError, RecursionError) as error:  # loops or brackets in each other
            raise ConfigError(
                "chat template", got=f"{type(error).__name__}: {error}", expected="a Jinja template"
            ) from None
        tree = environment.parse(source)
        constants = [c.value for c in tree.find_all(jinja2.nodes.Const) if isinstance(c.value, str)]
        self.literals = tuple(dict.fromkeys([*constants, *special_tokens.values()]))
        filters = {node.name for node in tree.find_all(jinja2.nodes.Filter)}
        methods = {c.node.attr for c in tree.find_all(jinja2.nodes.Call) if isinstance(c.node, jinja2.nodes.Getattr)}
        self.functions = frozenset(filters | {f".{name}" for name in methods})
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        attributes = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
        self.looks_up = frozenset(attributes.union(constants))
        self.written = (*constants, *(node.data for node in tree.find_all(jinja2.nodes.TemplateData)))
        self._variables: dict[str, Any] = {"tools": None, "documents": None, **special_tokens}
        self._marks_generation = "generation" in source and "endgeneration" in source

    def with_variables(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """The same template with these variables, which come before its special tokens as in transformers."""
        other = copy.copy(self)
        other._variables = {**self._variables, **variables}
        return other

    def render(self, messages: Messages, *, add_generation_prompt: bool = False) -> Rendered:
        """The conversation as the tokenizer will see it, and what the template marks in it."""
        text = self.text(messages, add_generation_prompt=add_generation_prompt)
        if not self._marks_generation:
            return Rendered(text)
        # Marks may change what a template computes from a marked block; then they say nothing about its text.
        marked = _cut_marks(self._run(messages, add_generation_prompt, _Marks(_BLOCK_START, _BLOCK_END)))
        return marked if marked.text == text else Rendered(text)

    def text(self, messages: Messages, *, add_generation_prompt: bool = False) -> str:
        """The conversation as the tokenizer will see it."""
        return self._run(messages, add_generation_prompt, _Marks("", ""))

    def _run(self, messages: Messages, add_generation_prompt: bool, marks: _Marks) -> str:
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **{**self._variables, _MARKS: marks}
            )
            plain = str.__str__(text)  # whatever was watched in it
            plain.encode()  # half of a character is no text
        except jinja2.TemplateError as error:
            raise RecordError("template", "the chat template refused the record", str(error)) from None
        except Exception as error:  # a template can fail in any way that Python can
            raise RecordError(
                "template", "the chat template failed", f"{type(error).__name__}: {error}"[:200]
            ) from None
        return plain


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


A_DAY = "a day as YYYY-MM-DD"
_FUNCTION = "strftime_now"
_PERCENT = "\ufdd3"  # a Unicode non-character, for a doubled percent sign while others are replaced


def now() -> datetime:
    """The clock; asked only for the day of what is prepared for the first time."""
    return datetime.now()


def writes_date(template: str | None) -> bool:
    """Does a template ask for the time?"""
    return _FUNCTION in (template or "")


def date_for(template: str | None, given: str | None) -> str | None:
    """The date of a template: the given one, else today; None where it writes none."""
    if not writes_date(template):
        return None
    return given if given is not None else now().date().isoformat()


def is_date(given: object) -> bool:
    """Is it a day that there is, as YYYY-MM-DD and nothing else?"""
    try:
        return isinstance(given, str) and date.fromisoformat(given).isoformat() == given
    except ValueError:
        return False


def check_date(given: object) -> None:
    """Refuse what is no day."""
    if not is_date(given):
        raise ConfigError("template_date", got=repr(given), expected=A_DAY, fix="leave it out for today")


def strftime_at(given: str | None) -> Callable[[str], str]:
    """What a template is given as `strftime_now`; without a date the moment at which this is called."""
    moment = now() if given is None else _midnight(given)
    return lambda form: moment.strftime(form)


def with_date(template: str, given: str) -> str:
    """The template with a `strftime_now` of its own, for renderers whose functions cannot be replaced.

    It stands in a line of its own, which renders to nothing.
    """
    moment = _midnight(given)
    letters = [f"%{flag}{letter}" for flag in ("", "-") for letter in string.ascii_letters]
    known = {form: text for form in letters if (text := moment.strftime(form)) != form}
    steps = json.dumps([["%%", _PERCENT], *known.items(), [_PERCENT, "%"]])
    macro = (
        f"{{% macro {_FUNCTION}(form) %}}{{% set found = namespace(text=form) %}}"
        f"{{% for said, text in {steps} %}}{{% set found.text = found.text.replace(said, text) %}}{{% endfor %}}"
        "{{ found.text }}{% endmacro %}"
    )
    return f"{macro}\n{template}"


def unused_note(name: str, given: str | None, template: str | None) -> tuple[str, ...]:
    """A note where a date is given to a template that writes none."""
    if given is None or writes_date(template):
        return ()
    return (f"{name} {given} changes nothing: the model's chat template has no date",)


def _midnight(given: str) -> datetime:
    return datetime.combine(date.fromisoformat(given), time.min)
