"""Settings: the kind of value each may have, and the field of a section that describes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, Self

from packtrain.core.errors import nearest
from packtrain.core.values import MediaLimits
from packtrain.families.chat_template import A_DAY, is_date
from packtrain.records.yaml_text import brief

Raw = Mapping[str, Any]  # keys and values as a file has them, not checked yet

_NEAR = 0.8  # of two names: the share that they have in common
_LARGEST = 1 << 53  # beyond it whole numbers are no longer told apart as floats


@dataclass(frozen=True, slots=True)
class KeyKind:
    """A kind of value. `types` are those that it may have in Python."""

    text: str
    types: tuple[type, ...]
    fits: Callable[[Any], bool] = lambda _: True
    inside: Mapping[str, KeyKind] | None = None  # of a section whose keys are known
    words: tuple[str, ...] = ()  # of which it is one

    def holds(self, value: object) -> bool:
        """Whether a value is of this kind. bool does not count as a number."""
        right_type = isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))
        return right_type and self.fits(value)

    def faults(self, name: str, value: object) -> Iterator[str]:
        """The faults of a value, by the name of its key or of the key inside it."""
        if self.inside is None or not isinstance(value, Mapping):
            if not self.holds(value):
                yield f"{name}: {brief(value)} instead of {self}. {nearest(str(value), self.words)}".rstrip(". ")
            return
        for key, given in value.items():
            if key not in self.inside:
                yield f"{name}.{brief_name(key)}: unknown key. {nearest_key(key, self.inside)}".rstrip()
            elif given is not None:
                yield from self.inside[key].faults(f"{name}.{key}", given)

    def __str__(self) -> str:
        return self.text


def whole(text: str, least: int, most: int = _LARGEST) -> KeyKind:
    """Whole numbers within bounds."""
    return KeyKind(text, (int,), lambda value: least <= value <= most)


def number(text: str, fits: Callable[[Any], bool]) -> KeyKind:
    """Numbers that are finite."""
    return KeyKind(text, (int, float), lambda value: abs(value) <= _LARGEST and math.isfinite(value) and fits(value))


def choice(*names: str) -> KeyKind:
    """One of these words."""
    return KeyKind(" or ".join([", ".join(names[:-1]), names[-1]]), (str,), lambda value: value in names, words=names)


def either(*kinds: KeyKind) -> KeyKind:
    """A value of any of these kinds."""
    types = tuple(dict.fromkeys(kind for one in kinds for kind in one.types))
    return KeyKind(" or ".join(map(str, kinds)), types, lambda value: any(one.holds(value) for one in kinds))


def _texts(values: Any) -> bool:
    return all(TEXT.holds(value) for value in values)


def _plain(value: Any) -> bool:
    """Sections, lists and plain values: what JSON can say. YAML has been bounded before."""
    if isinstance(value, Mapping):
        return all(TEXT.holds(key) and _plain(inner) for key, inner in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or isinstance(value, str | bool) or number("", lambda _: True).holds(value)


FLAG = KeyKind("true or false", (bool,))
COUNT = whole("a positive integer", 1)
WHOLE = whole("an integer of at least 0", 0)
SEED = whole("an integer from 0 to 4294967295", 0, 2**32 - 1)
STEPS = whole("a whole number of steps, at most a billion", -1, 10**9)
PLACE = whole("an integer of at least -1", -1)
AMOUNT = number("a number of at least 0", lambda value: value >= 0)
POSITIVE = number("a number above 0", lambda value: value > 0)
RATE = number("a number from 0 to 1000", lambda value: 0 <= value <= 1000)
SHARE = number("a share from 0 to 1", lambda value: 0 <= value <= 1)
HELD = number(
    "a share below 1, or a whole number of records", lambda value: value >= 0 and (value < 1 or value == int(value))
)
BELOW_ONE = number("a number of at least 0 and below 1", lambda value: 0 <= value < 1)
TEXT = KeyKind("a string", (str,), lambda value: "\0" not in value)
WORD = KeyKind("a non-empty string", (str,), lambda value: bool(value.strip()) and "\0" not in value)
FOLDER = KeyKind("a local folder", (str,), lambda value: WORD.holds(value) and "://" not in value)
WORDS = KeyKind("a list of strings", (list,), _texts)
SECTION = KeyKind("a section", (dict,), _plain)
NAMES = KeyKind("a section of name: name", (dict,), lambda value: _texts(value) and _texts(value.values()))
SWITCH = KeyKind(
    "true, false, or a section with enabled",
    (bool, dict),
    lambda value: isinstance(value if isinstance(value, bool) else value.get("enabled"), bool),
)
DAY = KeyKind(A_DAY, (str,), is_date)
SECONDS = number("a number of seconds", lambda value: value >= 0)
_LIMITS = {**dict.fromkeys(MediaLimits.__slots__, COUNT), "fps": POSITIVE}
LIMITS = KeyKind("a section of limits", (dict,), _plain, inside=_LIMITS)


def nearest_key(name: object, names: Iterable[str]) -> str:
    """A hint for a misspelt key: only close matches, since names share many words.

    >>> nearest_key("packing_lenght", ["packing_length"]), nearest_key("saves_per_epoch", ["max_videos_per_pack"])
    ("did you mean 'packing_length'?", '')
    """
    return nearest(str(name)[:100], names, least=_NEAR)


def brief_name(name: object) -> str:
    """A name, shortened for a message."""
    text = str(name)
    return text if len(text) <= 100 else text[:99] + "…"


# What a resumed run does with another value: takes it; takes it where its schedule follows rates; refuses it, because
# checkpoints hold states of the old one; leaves it to the check of plan and data; or means another place of the same.
Resume = Literal["taken", "rate", "refused", "plan", "place"]
Need = Literal["measuring", "packing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One setting: what its value may be, what it means, and by which other names it is known."""

    kind: KeyKind
    help: str = ""
    default: Any = None  # None: it follows from something else, or is not set
    shown: str = ""  # the default in words, where it follows from something else
    aliases: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # with what each brings along
    verbs: tuple[str, ...] = ()  # commands that have it as an option
    options: tuple[str, ...] = ()  # its names there; by default its own
    resume: Resume = "taken"
    costs: bool = False  # do the costs of samples follow from it
    needs: tuple[Need, ...] = ()  # without which it can do nothing

    @property
    def default_words(self) -> str:
        """The default as documentation and help show it."""
        if self.shown or self.default is None:
            return self.shown
        return str(self.default).lower() if isinstance(self.default, bool) else f"{self.default}"


def key(
    kind: KeyKind, help: str = "", *, aliases: Sequence[str] | Mapping[str, Mapping[str, object]] = (), **more: Any
) -> Any:
    """A field of a section, which is None where it is unset."""
    meanings = aliases if isinstance(aliases, Mapping) else {name: {} for name in aliases}
    return field(default=None, metadata={"key": Key(kind=kind, help=help, aliases=meanings, **more)})


MEASURING: tuple[Need, ...] = ("measuring",)
PACKING: tuple[Need, ...] = ("packing",)
measured = partial(key, verbs=("measure",), costs=True)
packed = partial(key, verbs=("pack",))
pack_limit = partial(packed, COUNT, shown="no limit", needs=PACKING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Settings by name; None where not set."""

    @classmethod
    def known(cls) -> dict[str, Key]:
        """All its keys, in order."""
        return {one.name: one.metadata["key"] for one in fields(cls) if "key" in one.metadata}

    @classmethod
    def of(cls, values: Raw) -> Self:
        """From values that were checked."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    @classmethod
    def needing(cls, need: Need) -> tuple[str, ...]:
        """Settings that can do nothing without measuring, or without packing."""
        return tuple(name for name, one in cls.known().items() if need in one.needs)

    def given(self, *names: str) -> dict[str, Any]:
        """The settings that were given, of these or of all."""
        keys = names or tuple(self.known())
        return {name: value for name in keys if (value := getattr(self, name)) is not None}

    @classmethod
    def problems(cls, values: Mapping[str, object], where: str = "") -> Iterator[str]:
        """Unknown keys and wrong values."""
        keys = cls.known()
        for name, value in values.items():
            if name not in keys:
                yield f"{where}{brief_name(name)}: unknown key. {nearest_key(name, keys)}".rstrip()
            elif value is not None:
                yield from keys[name].kind.faults(f"{where}{name}", value)
