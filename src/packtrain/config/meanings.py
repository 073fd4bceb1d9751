"""What a key of another system can mean here: settings of ours, nothing, or an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Means:
    """Settings of ours, or none where a key changes nothing here; and what else there is to know."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""
    mixture: tuple[Mapping[str, Any], ...] = ()  # several datasets, which are a file of their own


# A text says why it cannot be; None: the key means here what it says.
Meaning = Means | str | None
Meant = Callable[[Any, Mapping[str, Any]], Meaning]  # of a value and of all that stands beside it
_OFF = (None, False, "", 0, 0.0, "no", "none", "None", "false", "False")


def to(name: str) -> Meant:
    """Another name of a setting, where not every system has it."""
    return lambda value, beside: Means({name: value})


def nothing(why: str) -> Meant:
    """No effect here, whatever its value."""
    return lambda value, beside: Means(why=why)


def refused(why: str) -> Meant:
    """Refused, whatever its value."""
    return lambda value, beside: why


def only_off(why: str) -> Meant:
    """A switch, a list, or a section with `enabled`, that has to be off."""

    def meaning(value: Any, beside: Mapping[str, Any]) -> Meaning:
        on = value.get("enabled", bool(value)) if isinstance(value, Mapping) else value
        empty = on in _OFF if isinstance(on, str | int | float | None) else not on
        return Means(why="it is off") if empty else why

    return meaning


def only(usual: Any, why: str, said: str = "the same here") -> Meant:
    """A setting of which one value is known, or nothing."""
    return lambda value, beside: Means(why=said) if value == usual or not value else why


def switch(on: Mapping[str, Any], off: Mapping[str, Any] | None = None, why: str = "") -> Meant:
    """true or false, and what each of them means."""

    def meaning(value: Any, beside: Mapping[str, Any]) -> Meaning:
        if not isinstance(value, bool):
            return f"{value!r:.100} instead of true or false"
        settings = on if value else off or {}
        return Means(settings, why if settings or (value and why) else "it is off")

    return meaning


def default(usual: Any) -> Meant:
    """A value that is the default here; any other is ours."""
    return lambda value, beside: Means(why="the default here") if value == usual else None


def flag(why: str) -> Meant:
    """A switch that changes nothing here, either way."""
    return lambda value, beside: Means(why=why) if isinstance(value, bool) else None


def among(known: Mapping[str, Mapping[str, Any]], otherwise: str = "", said: str = "the same here") -> Meant:
    """One of these words; any other cannot be."""
    otherwise = otherwise or f"instead of {' or '.join([', '.join([*known][:-1]), [*known][-1]])}"

    def meaning(value: Any, beside: Mapping[str, Any]) -> Meaning:
        if not isinstance(value, str) or value not in known:
            return f"{value!r:.100}{'' if otherwise.startswith('instead') else ':'} {otherwise}"
        return Means(known[value], "" if known[value] else said)

    return meaning


def rows(make: Callable[[str], Meant], names: Mapping[str, str]) -> dict[str, Meant]:
    """Keys of one kind, by the words that are said about them."""
    return {name: make(why) for why, said in names.items() for name in said.split()}


def each(names: str | Iterable[str], meant: Meant) -> dict[str, Meant]:
    """Keys that mean the same."""
    return dict.fromkeys(names.split() if isinstance(names, str) else names, meant)
