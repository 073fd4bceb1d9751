"""A run's config: one YAML file in, checked sections out; all errors are reported together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packtrain.config.kinds import brief_name, nearest_key
from packtrain.config.meanings import Meant
from packtrain.config.python_file import RuntimeValue, read_python
from packtrain.config.script_file import ENDINGS as SCRIPTS
from packtrain.config.script_file import read_script
from packtrain.config.sections import (
    ALIASES,
    HOMES,
    KEYS,
    MEDIA_LIMITS,
    PROCESSOR_CLASS,
    PROCESSOR_NAMES,
    SECTION_ALIASES,
    SECTIONS,
    DataSection,
    ModelSection,
    ReportSection,
    TrainingSection,
    described_key,
    names_model,
)
from packtrain.config.systems import marks_of, systems_of
from packtrain.config.theirs import OF_SYSTEM, THEIRS
from packtrain.core.errors import ConfigError
from packtrain.core.secrets import kept_apart
from packtrain.core.user_code import from_anywhere
from packtrain.records.yaml_text import as_sections, brief, key_lines, read_any, read_value

_MOST_EXTENDS, _MOST_FILES = 16, 256
_DATA_FILES = (".jsonl", ".parquet", ".arrow", ".tar", ".gz", ".zst", ".csv")
_PATHS = (
    ("model", "model_name_or_path"),
    *(("data", name) for name in ("dataset_path", "eval_path", "media_root", "chat_template", "costs", "plan")),
)
_URLS = {"dataset_path", "eval_path", "media_root"}  # of data, or paths


# Settings of which one is enough: on the command line it stands for those of a file.
_INSTEAD_OF: Mapping[str, tuple[str, ...]] = {
    "max_steps": ("num_train_epochs",),
    "num_train_epochs": ("max_steps",),
    "warmup_steps": ("warmup_ratio",),
    "warmup_ratio": ("warmup_steps",),
    "packs_per_step": ("effective_batch_size", "effective_batch_unit", "gradient_accumulation_steps"),
    "effective_batch_size": ("packs_per_step", "gradient_accumulation_steps"),
    "gradient_accumulation_steps": ("packs_per_step", "effective_batch_size", "effective_batch_unit"),
}
_EMPTY: tuple[str, Any] = ("processor_config", {})  # that held the name of the model alone
_NO = ("save_strategy", "eval_strategy", "logging_strategy")  # whose `no` is false in YAML


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The sections of a run, by our own names. What a section does not name takes its default where it is used."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    report: ReportSection = field(default_factory=ReportSection)
    notes: tuple[str, ...] = ()  # names of other systems that were understood, and what they mean here
    called: tuple[tuple[str, str], ...] = ()  # settings that were written otherwise, and how
    written_as: tuple[str, ...] = ()  # names of sections and keys by which another system is known

    @classmethod
    def of(cls, sections: Mapping[str, Mapping[str, Any]], where: str = "config") -> RunConfig:
        """From settings by our own names, as a file would have them."""
        return Reading(merged={name: dict(values) for name, values in sections.items()}).finished(where)

    @property
    def packs(self) -> bool:
        """Whether samples are packed; the default."""
        return self.data.packing is not False

    @property
    def evaluates(self) -> bool:
        """Whether there is evaluation data."""
        return bool(self.data.eval_path or self.data.eval_size)

    def sections(self, *names: str) -> dict[str, dict[str, object]]:
        """The settings that were given, as plain values, of these sections or all."""
        return {name: getattr(self, name).given() for name in names or SECTIONS}


@dataclass(frozen=True, slots=True)
class _Understood:
    """A key that was written by another name than our own."""

    at: str
    home: str
    name: str
    brings: Mapping[str, object]
    why: str = ""

    def said(self, values: Mapping[str, object]) -> str:
        """How it was understood; what it brings along is said only where `values` have it, not overruled."""
        kept = [f"{other}: {_plainly(given)}" for other, given in self.brings.items() if values.get(other) == given]
        named = [f"{self.home}.{self.name}"] if self.name else []
        why = f" ({self.why})" if self.why else ""
        return f"{self.at} is {', '.join([*named, *kept])}{why}" if named or kept else f"{self.at} is overridden"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """A config as it was written."""

    name: str
    content: Mapping[Any, Any]
    lines: Callable[[], Mapping[str, int]] = dict  # of keys, as they are written

    def place(self, at: str) -> str:
        """Where a key stands, for messages."""
        line = self.lines().get(at)
        return self.name if line is None else f"{self.name}:{line}"


@dataclass(slots=True)
class Reading:
    """What has been read of one file and of those it extends."""

    merged: dict[str, dict[str, object]] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)  # other names of sections
    understood: list[_Understood] = field(default_factory=list)
    unused: dict[str, str] = field(default_factory=dict)  # keys of other systems that change nothing here, and why
    mixture: tuple[Mapping[str, object], ...] = ()  # of several datasets, which are a file of their own
    takes_mixture: bool = False
    explicit: set[tuple[str, str]] = field(default_factory=set)  # settings that the files below say themselves
    marks: list[str] = field(default_factory=list)  # by which another system is known
    places: dict[tuple[str, str], Callable[[], str]] = field(default_factory=dict)  # where settings stand
    problems: list[str] = field(default_factory=list)

    def file(self, written: _Written) -> dict[str, dict[str, object]]:
        """One file, over what it extends; what it says itself."""
        found = _File(written=written, reading=self)
        self.marks += marks_of(written.content)
        for key, value in written.content.items():
            section = SECTION_ALIASES.get(str(key), str(key))
            if key == "extends":
                continue
            if section not in SECTIONS or (str(key) in THEIRS and not isinstance(value, Mapping | None)):
                found.place(None, str(key), value, at=str(key))
                continue
            if section == "model" and isinstance(value, str):
                value = {"model_name_or_path": value}
            if not isinstance(value, Mapping):
                if value is not None:
                    way = (
                        ". Set data.dataset_path, or use --data" if section == "data" and isinstance(value, str) else ""
                    )
                    found.problem(str(key), f"{key}: {type(value).__name__} instead of a section{way}")
                continue
            if section != key:
                self.sections[str(key)] = section
            for inner, given in value.items():
                found.place(section, str(inner), given, at=f"{key}.{inner}")
        said = found.finished()
        for home, values in said.items():
            kept = self.merged.setdefault(home, {})
            # What a key only brings along does not overrule what a file below says itself.
            kept.update({name: one for name, one in values.items() if not found.only_brings(home, name)})
        self.explicit |= found.said.keys()
        return said

    def read_as(self) -> list[str]:
        """How names were understood; what they bring along is said only where it has not been overruled."""
        found = [f"section {name} is {section}" for name, section in self.sections.items()]
        found += [one.said(self._values(one.home)) for one in self.understood]
        return list(dict.fromkeys(found))

    def notes(self) -> tuple[str, ...]:
        """What is said about keys of other systems, in two lines."""
        found = self.read_as()
        said = [f"read as: {'; '.join(found)}"] if found else []
        if self.unused:
            by_why: dict[str, list[str]] = {}
            for at, why in self.unused.items():
                by_why.setdefault(why, []).append(at)
            said.append("no effect here: " + "; ".join(f"{', '.join(names)} ({why})" for why, names in by_why.items()))
        return tuple(said)

    def _values(self, home: str) -> dict[str, object]:
        """The settings of a section, limits of media too."""
        values = self.merged.get(home, {})
        limits = values.get("processor_config")
        return {**values, **(limits if isinstance(limits, Mapping) else {})}

    def finished(self, where: str, below: RunConfig | None = None, notes: Sequence[str] = ()) -> RunConfig:
        """The config, or everything that is wrong with it; `below` is one that this is read over."""
        below = below or RunConfig()
        # A key without a value is not set; over a file that is extended it takes the setting back.
        merged = {
            section: {name: value for name, value in values.items() if value is not None and (name, value) != _EMPTY}
            for section, values in self.merged.items()
        }
        problems = list(dict.fromkeys(self.problems))  # a file may be extended twice
        for section, values in merged.items():  # what does not go together is said by the stages
            for name, value in values.items():
                place = self.places.get((section, name))
                where_it_stands = f"{place()}: " if place else ""
                wrong = SECTIONS[section].problems({name: value}, f"{section}.")
                problems += (f"{where_it_stands}{problem}" for problem in wrong)
        if problems:
            raise ConfigError(where, problems=[problem.removeprefix(f"{where}: ") for problem in problems])
        for name in _URLS & merged.get("data", {}).keys():  # which from here on have no secrets
            given = merged["data"][name]
            merged["data"][name] = kept_apart(given) if isinstance(given, str) else given
        return RunConfig(
            **{name: cls.of(merged.get(name, {})) for name, cls in SECTIONS.items()},  # type: ignore[arg-type]
            notes=tuple(dict.fromkeys((*below.notes, *notes, *self.notes()))),
            called=(*below.called, *((f"{one.home}.{one.name}", one.at) for one in self.understood if one.name)),
            written_as=tuple(dict.fromkeys((*below.written_as, *self.sections, *self.marks))),
        )


@dataclass(slots=True)
class _File:
    """The keys of one file, each put where it belongs."""

    written: _Written
    reading: Reading
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    said: dict[tuple[str, str], str] = field(default_factory=dict)  # settings, and by which key
    implied: list[tuple[str, str, Any]] = field(default_factory=list)  # by keys of other systems
    limits: dict[str, object] = field(default_factory=dict)  # of media, that stand outside processor_config

    def theirs(self, section: str | None, key: str, name: str) -> Meant | None:
        """What another system means by a key, where that is not what we mean."""
        for system in systems_of(marks_of(self.written.content), sure=True):
            if key in OF_SYSTEM.get(system, {}):
                return OF_SYSTEM[system][key]
        return THEIRS.get(name)

    def beside(self) -> dict[str, Any]:
        """All keys of the file by their own names, whatever section they stand in."""
        found: dict[str, Any] = {}
        for key, value in self.written.content.items():
            found |= (
                {str(inner): one for inner, one in value.items()} if isinstance(value, Mapping) else {str(key): value}
            )
        return found

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
            if (home, other) in self.said:
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
            said = {name: given.get(name) if value is None else value for name, value in self.limits.items()}
            data["processor_config"] = {**(below if isinstance(below, Mapping) else {}), **given, **said}
        return self.values

    def only_brings(self, home: str, name: str) -> bool:
        """Does this file have a setting along with another key only, and a file below by itself?"""
        return (home, name) in self.reading.explicit and (home, name) not in self.said and name != "processor_config"

    def problem(self, at: str, text: str) -> None:
        """Something that is wrong with a key."""
        self.reading.problems.append(f"{self.written.place(at)}: {text.replace(at, brief_name(at))}")

    def _set(self, at: str, home: str, name: str, value: Any) -> bool:
        """Whether it could be set: what is said again, or without a value, is no contradiction."""
        before = self.values.get(home, {}).get(name) if (home, name) in self.said else None
        if before is None:
            self.said[home, name] = brief_name(at)
            self.reading.places[home, name] = lambda: self.written.place(at)
            self.values.setdefault(home, {})[name] = value
        elif _contradict(before, value):
            self.problem(at, f"{at} and {self.said[home, name]} are the same setting")
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
        if value is None and systems_of(self.reading.marks):
            self.reading.unused[brief_name(at)] = "it has no value"
            return
        known = SECTIONS[section].known() if section else KEYS
        hint = nearest_key(key, [*known, *ALIASES, *MEDIA_LIMITS, *SECTIONS, *SECTION_ALIASES]) or described_key(key)
        self.problem(at, f"{at}: unknown key. {hint or 'packtrain init lists all keys'}")


def _contradict(one: object, other: object) -> bool:
    """Do two keys not say the same? What is true is not the number 1; one without a value says nothing."""
    same = one == other and isinstance(one, bool) == isinstance(other, bool)
    return one is not None and other is not None and not same


def _plainly(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config and the files it extends; `section.key=value` overrides what they say."""
    reading = Reading()
    for written in config_files(Path(path)):
        reading.file(written)
    found = _beside(reading.finished(str(path)), Path(path).parent)
    return with_overrides(found, overrides) if overrides else found


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The config with settings from the command line over it; their values are YAML, null takes a setting back."""
    reading, notes = Reading(merged=config.sections()), []
    content = _overrides(overrides, reading.problems)
    said = reading.file(_Written(name="command line", content=content)).get("training", {})
    reading.sections.clear()  # how single settings are written tells nothing about the config
    reading.marks.clear()
    for name in (name for name, value in said.items() if value not in (None, -1)):
        for other in (other for other in _INSTEAD_OF.get(name, ()) if other not in said):
            if (before := reading.merged["training"].pop(other, None)) is not None:
                notes.append(f"{name} {brief(said[name])} of the command line replaces {other} {before}")
    return reading.finished("command line", config, notes)


def _beside(config: RunConfig, folder: Path) -> RunConfig:
    """The config with paths that are not here but lie in its file's folder, as they are called from anywhere."""
    for section, name in _PATHS:
        values = getattr(config, section)
        given = getattr(values, name)
        if given is None or os.path.exists(os.path.expanduser(given)):
            continue
        if os.path.exists(there := os.path.abspath(folder / given)):
            config = replace(config, **{section: replace(values, **{name: there})})
    return _with_formatting(_with_formatting(config, "."), str(folder))


def _with_formatting(config: RunConfig, folder: str) -> RunConfig:
    given = config.data.formatting_func
    if given is None:
        return config
    return replace(config, data=replace(config.data, formatting_func=from_anywhere(given, folder)))


def absolute_paths(config: RunConfig) -> RunConfig:
    """The config with paths that exist here, and the cache, as they are called from anywhere."""
    for section, name in _PATHS:
        values = getattr(config, section)
        given = getattr(values, name)
        if given is not None and os.path.exists(there := os.path.expanduser(given)):
            config = replace(config, **{section: replace(values, **{name: os.path.abspath(there)})})
    if (cache := config.data.cache_dir) is not None:  # which may be made yet
        config = replace(config, data=replace(config.data, cache_dir=os.path.abspath(os.path.expanduser(cache))))
    return _with_formatting(config, ".")


def _overrides(given: Sequence[str], problems: list[str]) -> dict[str, object]:
    """What the command line says, in the form that a file would have."""
    content: dict[str, Any] = {}
    for one in given:
        name, equals, text = one.partition("=")
        parts = name.strip().split(".")
        if not equals or not all(parts):
            problems.append(f"command line: {brief_name(one)} instead of section.key=value")
            continue
        try:
            value = read_value(text)
        except ValueError as error:
            problems.append(f"command line: {brief_name(one)}: {error}")
            continue
        if parts == ["model"] and isinstance(value, str):
            parts = ["model", "model_name_or_path"]
        inside: Any = content
        for part in parts[:-1]:
            inside = inside.setdefault(part, {}) if isinstance(inside, dict) else None
        if not isinstance(inside, dict) or isinstance(inside.get(parts[-1]), dict):
            problems.append(f"command line: {brief_name(one)}: {parts[0]} is set in two ways")
        else:
            inside[parts[-1]] = value
    return content


def config_files(path: Path, above: tuple[Path, ...] = ()) -> list[_Written]:
    """The file after those that it extends, each of them after its own: what comes later counts."""
    paths = [*above, path]
    if path.resolve() in {one.resolve() for one in above} or len(paths) > _MOST_EXTENDS:
        raise ConfigError(
            f"{paths[0]}: extends",
            got=" -> ".join(map(str, paths)),
            expected=f"no cycle, and at most {_MOST_EXTENDS} levels",
        )
    written = _read(path)
    given = written.content.get("extends")
    names = given if isinstance(given, list) else [given] if given is not None else []
    if not all(isinstance(name, str) for name in names):
        expected = "the path of another config, or a list of them"
        raise ConfigError(f"{path}: extends", got=brief(given), expected=expected)
    found = [below for name in names for below in config_files(path.parent / name, tuple(paths))]
    if len(found) > _MOST_FILES:
        raise ConfigError(f"{path}: extends", got=f"{len(found)} files", expected=f"up to {_MOST_FILES}")
    return [*found, written]


def _is_component(content: Any) -> bool:
    """Is it a list of components, of which one trains?"""
    if not isinstance(content, list) or len(content) != 1 or not isinstance(content[0], Mapping):
        return False
    return content[0].get("type") == "trainer" and isinstance(content[0].get("config"), Mapping | None)


def _read(path: Path) -> _Written:
    """A YAML file, or the dataclasses of a Python file, of which classes that are no section are left alone."""
    if path.suffix in _DATA_FILES and path.is_file():
        fix = f"packtrain train --model MODEL --data {path}"
        raise ConfigError(str(path), got="a data file", expected="a YAML file with the run's config", fix=fix)
    if path.suffix in SCRIPTS and path.is_file():
        return _Written(name=path.name, content=read_script(path))
    if path.suffix != ".py":
        content = read_any(path)
        if _is_component(content):  # of lmms-engine
            return _Written(name=path.name, content=content[0].get("config") or {})
        return _Written(name=path.name, content=as_sections(path, content), lines=lambda: key_lines(path))
    classes, lines = read_python(path)
    known = {name: fields for name, fields in classes.items() if SECTION_ALIASES.get(name, name) in SECTIONS}
    if not known:
        expected = "a class for a section: " + ", ".join(name for name in SECTION_ALIASES if name[0].isupper())
        raise ConfigError(str(path), got=f"class {', '.join(classes)[:100]}", expected=expected)
    return _Written(name=path.name, content=known, lines=lambda: lines)
