"""The date that a chat template writes: one for all that is rendered, whenever and wherever it is rendered.

Templates ask for it by `strftime_now`. They are answered with midnight of one given day, never with the clock.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from datetime import date, datetime, time

from packtrain.core.errors import ConfigError

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
