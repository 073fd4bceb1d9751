"""What a section of settings is made of: each key is one field of one dataclass, with all that is known about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from packtrain.config.kinds import Kind, brief_name, nearest_key

# What a resumed run does with another value: takes it; takes it where its schedule follows rates; refuses it, because
# checkpoints hold states of the old one; leaves it to the check of plan and data; or means another place of the same.
Resume = Literal["taken", "rate", "refused", "plan", "place"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One setting: what its value may be, what it means, and by which other names it is known."""

    kind: Kind
    help: str = ""
    default: Any = None  # None: it follows from something else, or is not set
    shown: str = ""  # the default in words, where it follows from something else
    aliases: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # with what each brings along
    verbs: tuple[str, ...] = ()  # commands that have it as an option
    options: tuple[str, ...] = ()  # its names there; by default its own
    resume: Resume = "taken"

    @property
    def default_words(self) -> str:
        """As documentation and help name it."""
        if self.shown or self.default is None:
            return self.shown
        return str(self.default).lower() if isinstance(self.default, bool) else f"{self.default}"


def key(
    kind: Kind, help: str = "", *, aliases: Sequence[str] | Mapping[str, Mapping[str, object]] = (), **more: Any
) -> Any:
    """A field of a section. It is None where nothing is said."""
    named = aliases if isinstance(aliases, Mapping) else {name: {} for name in aliases}
    return field(default=None, metadata={"key": Key(kind=kind, help=help, aliases=named, **more)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Settings by name; None where not set."""

    @classmethod
    def known(cls) -> dict[str, Key]:
        """All its keys, in order."""
        return {one.name: one.metadata["key"] for one in fields(cls) if "key" in one.metadata}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """From values that were checked."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def given(self, *names: str) -> dict[str, Any]:
        """The settings that were given, of these or of all."""
        wanted = names or tuple(self.known())
        return {name: value for name in wanted if (value := getattr(self, name)) is not None}

    @classmethod
    def problems(cls, values: Mapping[str, object], where: str = "") -> Iterator[str]:
        """Unknown keys and wrong values."""
        known = cls.known()
        for name, value in values.items():
            if name not in known:
                yield f"{where}{brief_name(name)}: unknown key. {nearest_key(name, known)}".rstrip()
            elif value is not None:
                yield from known[name].kind.faults(f"{where}{name}", value)
