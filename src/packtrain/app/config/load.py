"""A run's config: one YAML file in, checked sections out; everything that is wrong with it is said at once."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packtrain.app.config.kinds import brief_name
from packtrain.app.config.sections import (
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
)
from packtrain.core.errors import ConfigError, nearest
from packtrain.core.secrets import kept_apart
from packtrain.records.yaml_text import brief, read_value, read_yaml

_MOST_EXTENDS = 16
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
_NO = ("save_strategy", "eval_strategy", "logging_strategy")  # whose `no` is false in YAML


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The sections of a run, by our own names. What a section does not name takes its default where it is used."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    training: TrainingSection = field(default_factory=TrainingSection)
    report: ReportSection = field(default_factory=ReportSection)
    notes: tuple[str, ...] = ()  # names of other systems that were understood, and what they mean here
    written_as: tuple[str, ...] = ()  # other systems' names of sections that it was written with

    @classmethod
    def of(cls, sections: Mapping[str, Mapping[str, Any]], where: str = "config") -> RunConfig:
        """From settings by our own names, as a file would have them."""
        return _Reading(merged={name: dict(values) for name, values in sections.items()}).finished(where)

    def sections(self, *names: str) -> dict[str, dict[str, Any]]:
        """What was said, as plain values, by these sections or all."""
        return {name: getattr(self, name).given() for name in names or SECTIONS}


@dataclass(frozen=True, slots=True)
class _Understood:
    """A key that was written otherwise than by our own name in its own section."""

    at: str
    home: str
    name: str
    brings: Mapping[str, object]


@dataclass(slots=True)
class _Reading:
    """What has been read of one file and of those it extends."""

    merged: dict[str, dict[str, Any]] = field(default_factory=dict)
    sections: dict[str, str] = field(default_factory=dict)  # other names of sections
    understood: list[_Understood] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def file(self, name: str, content: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
        """One file, over what it extends; what it says itself."""
        found = _File(name=name, reading=self)
        for key, value in content.items():
            section = SECTION_ALIASES.get(str(key), str(key))
            if key == "extends":
                continue
            if section not in SECTIONS:
                found.place(None, str(key), value, written=str(key))
                continue
            if section == "model" and isinstance(value, str):
                value = {"model_name_or_path": value}
            if not isinstance(value, Mapping):
                if value is not None:
                    self.problems.append(f"{name}: {key}: {type(value).__name__} instead of a section")
                continue
            if section != key:
                self.sections[str(key)] = section
            for inner, given in value.items():
                found.place(section, str(inner), given, written=f"{key}.{inner}")
        said = found.finished()
        for home, values in said.items():
            self.merged.setdefault(home, {}).update(values)
        return said

    def notes(self) -> tuple[str, ...]:
        """How names were understood; what they bring along is said only where it has not been overruled."""
        found = [f"section {name} is {section}" for name, section in self.sections.items()]
        for one in self.understood:
            values = self.merged.get(one.home, {})
            kept = [f"{other}: {given}" for other, given in one.brings.items() if values.get(other) == given]
            found.append(", ".join([f"{one.at} is {one.home}.{one.name}", *kept]))
        return tuple(dict.fromkeys(found))

    def finished(self, where: str, notes: tuple[str, ...] = (), written_as: tuple[str, ...] = ()) -> RunConfig:
        """The config, or everything that is wrong with it."""
        # A key without a value is not set; over a file that is extended it takes the setting back.
        merged = {
            section: {name: value for name, value in values.items() if value is not None}
            for section, values in self.merged.items()
        }
        problems = list(self.problems)
        for section, values in merged.items():  # what does not go together is said by the stages
            problems += SECTIONS[section].problems(values, f"{section}.")
        if problems:
            raise ConfigError(where, problems=problems)
        for name in _URLS & merged.get("data", {}).keys():  # which from here on have no secrets
            given = merged["data"][name]
            merged["data"][name] = kept_apart(given) if isinstance(given, str) else given
        return RunConfig(
            **{name: cls.of(merged.get(name, {})) for name, cls in SECTIONS.items()},  # type: ignore[arg-type]
            notes=tuple(dict.fromkeys((*notes, *self.notes()))),
            written_as=tuple(dict.fromkeys((*written_as, *self.sections))),
        )


@dataclass(slots=True)
class _File:
    """The keys of one file, each put where it belongs."""

    name: str
    reading: _Reading
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    written: dict[tuple[str, str], str] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=dict)  # of media, that stand outside processor_config

    def place(self, section: str | None, key: str, value: Any, written: str) -> None:
        """Put one key where it belongs; flat keys and keys of a neighbouring section find their own."""
        at = brief_name(written)
        name, brings = ALIASES.get(key, (key, {}))
        if key == "filter_overlong":
            if not isinstance(value, bool):
                self._problem(f"{at}: {brief(value)} instead of true or false")
                return
            name, value = "overlong", "drop" if value else "error"
            brings = {"overlong": value}
        if name in _NO and value is False:
            value = "no"
        if name in MEDIA_LIMITS:
            self._media_limit(at, name, value)
            return
        if name == "processor_config" and isinstance(value, Mapping):
            value = self._processor(at, value)
        home = HOMES.get(name)
        if home is None:
            self._unknown(section, key, at)
            return
        if (home, name) in self.written:
            self._problem(f"{at} and {self.written[home, name]} are the same setting")
            return
        self.written[home, name] = at
        if (section, key) != (home, name):
            self.reading.understood.append(_Understood(at, home, name, brings))
        self.values.setdefault(home, {})[name] = value
        for other, given in brings.items():
            if (home, other) not in self.written:
                self.values[home][other] = given

    def finished(self) -> dict[str, dict[str, Any]]:
        """All values, with the limits of media in their section, over those of the files that are extended."""
        data = self.values.setdefault("data", {})
        given = data.get("processor_config") or {}
        if self.limits and given:
            self._problem(f"{', '.join(self.limits)} beside data.processor_config, where they belong")
        elif isinstance(given, Mapping) and (self.limits or given):
            below = self.reading.merged.get("data", {}).get("processor_config")
            data["processor_config"] = {**(below if isinstance(below, Mapping) else {}), **given, **self.limits}
        return self.values

    def _media_limit(self, at: str, name: str, value: Any) -> None:
        if name in self.limits:
            self._problem(f"{at}: {name} is set twice")
        self.limits[name] = value
        self.reading.understood.append(_Understood(at, "data.processor_config", name, {}))

    def _processor(self, at: str, given: Mapping[Any, Any]) -> dict[Any, Any]:
        """The limits of media in it; the model's name goes where models are named."""
        for name in PROCESSOR_NAMES:
            if given.get(name) is not None and ("model", "model_name_or_path") not in self.written:
                self.place("model", "name", given[name], written=f"{at}.{name}")
        return {name: value for name, value in given.items() if name not in (*PROCESSOR_NAMES, PROCESSOR_CLASS)}

    def _unknown(self, section: str | None, key: str, at: str) -> None:
        known = SECTIONS[section].known() if section else KEYS
        hint = nearest(key[:100], [*known, *ALIASES, *MEDIA_LIMITS, *SECTIONS, *SECTION_ALIASES])
        self._problem(f"{at}: unknown key. {hint}".rstrip())

    def _problem(self, text: str) -> None:
        self.reading.problems.append(f"{self.name}: {text}")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config and the files it extends; `section.key=value` overrides what they say."""
    reading = _Reading()
    for file, content in reversed(_chain(Path(path))):
        reading.file(file.name, content)
    found = reading.finished(str(path))
    return with_overrides(found, overrides) if overrides else found


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The config with settings from the command line over it; their values are YAML, null takes a setting back."""
    reading, notes = _Reading(merged=config.sections()), []
    said = reading.file("command line", _overrides(overrides, reading.problems)).get("training", {})
    for name in (name for name, value in said.items() if value not in (None, -1)):
        for other in (other for other in _INSTEAD_OF.get(name, ()) if other not in said):
            if (before := reading.merged["training"].pop(other, None)) is not None:
                notes.append(f"{name} {brief(said[name])} of the command line replaces {other} {before}")
    return reading.finished("command line", (*config.notes, *notes), config.written_as)


def absolute_paths(config: RunConfig) -> RunConfig:
    """The config with paths that exist here as they are called from anywhere."""
    for section, name in _PATHS:
        values = getattr(config, section)
        given = getattr(values, name)
        if given is not None and os.path.exists(there := os.path.expanduser(given)):
            config = replace(config, **{section: replace(values, **{name: os.path.abspath(there)})})
    return config


def _overrides(given: Sequence[str], problems: list[str]) -> dict[str, Any]:
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
        inside: Any = content
        for part in parts[:-1]:
            inside = inside.setdefault(part, {}) if isinstance(inside, dict) else {}
        if isinstance(inside, dict):
            inside[parts[-1]] = value
    return content


def _chain(path: Path) -> list[tuple[Path, dict[Any, Any]]]:
    """The file and those it extends, nearest first."""
    found = [(path, read_yaml(path))]
    while (below := found[-1][1].get("extends")) is not None:
        here = found[-1][0]
        if not isinstance(below, str):
            raise ConfigError(f"{here}: extends", got=brief(below), expected="the path of another config")
        paths = [*(one for one, _ in found), here.parent / below]
        if paths[-1].resolve() in {one.resolve() for one in paths[:-1]} or len(paths) > _MOST_EXTENDS:
            raise ConfigError(f"{path}: extends", got=" -> ".join(map(str, paths)), expected="a chain that ends")
        found.append((paths[-1], read_yaml(paths[-1])))
    return found
