"""Keys as files have them -> settings by our own names; problems are collected and reported together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packtrain.config.config_files import RuntimeValue, Written
from packtrain.config.data_section import MEDIA_LIMITS
from packtrain.config.foreign_keys import OF_SYSTEM, THEIRS
from packtrain.config.foreign_values import Meant
from packtrain.config.keys import Raw, brief_name
from packtrain.config.sections import (
    ALIASES,
    HOMES,
    KEYS,
    PROCESSOR_CLASS,
    PROCESSOR_NAMES,
    SECTION_ALIASES,
    SECTIONS,
    key_hint,
    names_model,
)
from packtrain.config.systems import detect_systems, system_marks
from packtrain.core.errors import ConfigError

_EMPTY: tuple[str, Any] = ("processor_config", {})  # that held the name of the model alone
_NO = ("save_strategy", "eval_strategy", "logging_strategy")  # whose `no` is false in YAML


@dataclass(frozen=True, slots=True)
class _Understood:
    """A key that was written by another name than our own."""

    at: str
    home: str
    name: str
    brings: Raw
    why: str = ""

    def note(self, values: Raw) -> str:
        """How it was understood, with what it brings along that `values` have, not overruled."""
        kept = [f"{other}: {_plainly(given)}" for other, given in self.brings.items() if values.get(other) == given]
        named = [f"{self.home}.{self.name}"] if self.name else []
        why = f" ({self.why})" if self.why else ""
        return f"{self.at} is {', '.join([*named, *kept])}{why}" if named or kept else f"{self.at} is overridden"


@dataclass(slots=True)
class Reading:
    """The settings read so far from one file and from those it extends."""

    merged: dict[str, dict[str, object]] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)  # other names of sections
    understood: list[_Understood] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)  # keys of other systems that change nothing here, and why
    mixture: tuple[Mapping[str, object], ...] = ()  # of several datasets, which are a file of their own
    takes_mixture: bool = False
    explicit: set[tuple[str, str]] = field(default_factory=set)  # settings that the files below say themselves
    marks: list[str] = field(default_factory=list)  # by which another system is known
    places: dict[tuple[str, str], Callable[[], str]] = field(default_factory=dict)  # where settings are
    problems: list[str] = field(default_factory=list)

    def file(self, written: Written) -> dict[str, dict[str, object]]:
        """One file, over what it extends; what it says itself."""
        one = _File(written=written, reading=self)
        self.marks += system_marks(written.content)
        for key, value in written.content.items():
            section = SECTION_ALIASES.get(str(key), str(key))
            if key == "extends":
                continue
            if section not in SECTIONS or (str(key) in THEIRS and not isinstance(value, Mapping | None)):
                one.place(None, str(key), value, at=str(key))
                continue
            if section == "model" and isinstance(value, str):
                value = {"model_name_or_path": value}
            if not isinstance(value, Mapping):
                if value is not None:
                    way = (
                        ". Set data.dataset_path, or use --data" if section == "data" and isinstance(value, str) else ""
                    )
                    one.problem(str(key), f"{key}: {type(value).__name__} instead of a section{way}")
                continue
            if section != key:
                self.sections[str(key)] = section
            for inner, given in value.items():
                one.place(section, str(inner), given, at=f"{key}.{inner}")
        sections = one.finished()
        for home, values in sections.items():
            # What a key only brings along does not overrule what a file below says itself.
            own = {name: value for name, value in values.items() if not one.only_brings(home, name)}
            self.merged.setdefault(home, {}).update(own)
        self.explicit |= one.keys.keys()
        return sections

    def read_as(self) -> list[str]:
        """How names were understood; the settings they imply are listed only where they were not overruled."""
        notes = [f"section {name} is {section}" for name, section in self.sections.items()]
        notes += [one.note(self._values(one.home)) for one in self.understood]
        return list(dict.fromkeys(notes))

    def notes(self) -> tuple[str, ...]:
        """Keys of other systems, in two lines: what they mean, and which have no effect."""
        by_why: dict[str, list[str]] = {}
        for at, why in self.unused.items():
            by_why.setdefault(why, []).append(at)
        unused = [f"{', '.join(names)} ({why})" for why, names in by_why.items()]
        lines = (("read as", self.read_as()), ("no effect here", unused))
        return tuple(f"{title}: {'; '.join(notes)}" for title, notes in lines if notes)

    def _values(self, home: str) -> Raw:
        """The settings of a section, limits of media too."""
        values = self.merged.get(home, {})
        limits = values.get("processor_config")
        return {**values, **(limits if isinstance(limits, Mapping) else {})}

    def checked(self, where: str) -> dict[str, dict[str, object]]:
        """The settings by section, or everything that is wrong with them."""
        # A key without a value is not set; over a file that is extended it takes the setting back.
        merged = {
            section: {name: value for name, value in values.items() if value is not None and (name, value) != _EMPTY}
            for section, values in self.merged.items()
        }
        problems = list(dict.fromkeys(self.problems))  # a file may be extended twice
        for section, values in merged.items():  # what does not go together is said by the stages
            for name, value in values.items():
                place = self.places.get((section, name))
                prefix = f"{place()}: " if place else ""
                problems += (f"{prefix}{one}" for one in SECTIONS[section].problems({name: value}, f"{section}."))
        if problems:
            raise ConfigError(where, problems=[problem.removeprefix(f"{where}: ") for problem in problems])
        return merged


@dataclass(slots=True)
class _File:
    """The keys of one file, each put where it belongs."""

    written: Written
    reading: Reading
    values: dict[str, dict[str, object]] = field(default_factory=dict)
    keys: dict[tuple[str, str], str] = field(default_factory=dict)  # settings, and by which key they are set
    implied: list[tuple[str, str, Any]] = field(default_factory=list)  # by keys of other systems
    limits: dict[str, object] = field(default_factory=dict)  # of media, outside processor_config

    def theirs(self, section: str | None, key: str, name: str) -> Meant | None:
        """The meaning of a key in another system, where it differs from ours."""
        for system in detect_systems(system_marks(self.written.content), sure=True):
            if key in OF_SYSTEM.get(system, {}):
                return OF_SYSTEM[system][key]
        return THEIRS.get(name)

    def beside(self) -> Raw:
        """All keys of the file by their own names, in whatever section."""
        top = self.written.content.items()
        parts = (value.items() if isinstance(value, Mapping) else [(key, value)] for key, value in top)
        return {str(key): value for part in parts for key, value in part}

    def place(self, section: str | None, key: str, value: Any, at: str) -> None:
        """Put one key where it belongs; flat keys and keys of a neighbouring section find their own."""
        name, brings = ALIASES.get(key, (key, {}))
        meant = self.theirs(section, key, name)
        if meant is not None and (self._theirs(at, meant, value) if value is not None else name not in HOMES):
            return
        if isinstance(value, RuntimeValue):
            self.problem(at, f"{at}: {value.text}: only literals and arithmetic are evaluated; no code is run")
            return
        if name in _NO and value is False:
            value = "no"
        if name in MEDIA_LIMITS:
            self._media_limit(at, name, value)
            if key != name and value is not None:
                self.reading.understood.append(_Understood(brief_name(at), "data", f"processor_config.{name}", {}))
            return
        if name == "processor_config" and isinstance(value, Mapping):
            value = self._processor(at, value)
        home = HOMES.get(name)
        if home is None:
            self._unknown(section, key, value, at)
            return
        if not self._set(at, home, name, value) or value is None:
            return
        if key != name:
            self.reading.understood.append(_Understood(brief_name(at), home, name, brings))
        for other, given in brings.items():
            if (home, other) in self.keys:
                continue
            if _contradict(self.values[home].setdefault(other, given), given):
                self.problem(at, f"{at} means {other}: {given}; another key sets {self.values[home][other]}: keep one")

    def finished(self) -> dict[str, dict[str, object]]:
        """All values, with the limits of media in their section, over those of the files that are extended."""
        for at, name, value in self.implied:
            if name in MEDIA_LIMITS:
                self._media_limit(at, name, value)
                continue
            self._set(at, HOMES[name], name, value)
        data = self.values.setdefault("data", {})
        given = data.get("processor_config") or {}
        if isinstance(given, Mapping) and (self.limits or given):
            for name in self.limits.keys() & given.keys():
                if _contradict(given[name], self.limits[name]):
                    self.problem("", f"{name} beside data.processor_config, which differs")
            below = self.reading.merged.get("data", {}).get("processor_config")
            own = {name: given.get(name) if value is None else value for name, value in self.limits.items()}
            data["processor_config"] = {**(below if isinstance(below, Mapping) else {}), **given, **own}
        return self.values

    def only_brings(self, home: str, name: str) -> bool:
        """Does this file have a setting along with another key only, and a file below by itself?"""
        return (home, name) in self.reading.explicit and (home, name) not in self.keys and name != "processor_config"

    def problem(self, at: str, text: str) -> None:
        """Something that is wrong with a key."""
        self.reading.problems.append(f"{self.written.place(at)}: {text.replace(at, brief_name(at))}")

    def _set(self, at: str, home: str, name: str, value: Any) -> bool:
        """Whether it could be set: the same value again, or none, is no contradiction."""
        before = self.values.get(home, {}).get(name) if (home, name) in self.keys else None
        if before is None:
            self.keys[home, name] = brief_name(at)
            self.reading.places[home, name] = lambda: self.written.place(at)
            self.values.setdefault(home, {})[name] = value
        elif _contradict(before, value):
            self.problem(at, f"{at} and {self.keys[home, name]} are the same setting")
            return False
        return True

    def _theirs(self, at: str, meant: Meant, value: Any) -> bool:
        """A key that other systems have: it means settings of ours, nothing, or cannot be. False: it is as ours."""
        meaning = meant(value, self.beside())
        if meaning is None:
            return False
        if isinstance(meaning, str):
            self.problem(at, f"{at}: {meaning}")
        elif meaning.mixture and not self.reading.takes_mixture:
            way = "packtrain config convert writes both"
            self.problem(at, f"{at}: {len(meaning.mixture)} datasets are a mixture, which needs its own file: {way}")
        elif meaning.mixture:
            self.reading.mixture = meaning.mixture
        elif not meaning.settings:
            self.reading.unused[brief_name(at)] = meaning.why
        else:
            self.implied += [(at, name, given) for name, given in meaning.settings.items()]
            home = HOMES.get(next(iter(meaning.settings)), "data")
            self.reading.understood.append(_Understood(brief_name(at), home, "", meaning.settings, meaning.why))
        return True

    def _media_limit(self, at: str, name: str, value: Any) -> None:
        before = self.limits.get(name)
        if _contradict(before, value):
            self.problem(at, f"{at}: {name} is set twice")
        self.limits[name] = before if value is None else value
        self.reading.places["data", "processor_config"] = lambda: self.written.place(at)

    def _processor(self, at: str, given: Mapping[Any, Any]) -> dict[Any, Any]:
        """The limits of media in it; the model's name goes where models are named."""
        model = (PROCESSOR_CLASS,) if names_model(given.get(PROCESSOR_CLASS)) else ()
        for name in (*PROCESSOR_NAMES, *model):
            if given.get(name):  # published examples leave it empty
                self.place("model", "name", given[name], at=f"{at}.{name}")
        if given.get(PROCESSOR_CLASS) and not model:
            self.reading.unused[f"{at}.{PROCESSOR_CLASS}"] = "the model defines it"
        return {name: value for name, value in given.items() if name not in (*PROCESSOR_NAMES, PROCESSOR_CLASS)}

    def _unknown(self, section: str | None, key: str, value: Any, at: str) -> None:
        if value is None and detect_systems(self.reading.marks):
            self.reading.unused[brief_name(at)] = "it has no value"
            return
        names = SECTIONS[section].known() if section else KEYS
        hint = key_hint(key, [*names, *ALIASES, *MEDIA_LIMITS, *SECTIONS, *SECTION_ALIASES])
        self.problem(at, f"{at}: unknown key. {hint or 'packtrain init lists all keys'}")


def _contradict(one: object, other: object) -> bool:
    """Do two keys not say the same? What is true is not the number 1; one without a value says nothing."""
    same = one == other and isinstance(one, bool) == isinstance(other, bool)
    return one is not None and other is not None and not same


def _plainly(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
