"""A run's config: one YAML file in, checked sections out; all errors are reported together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from packtrain.config.config_files import Written, config_files
from packtrain.config.data_section import DataSection
from packtrain.config.keys import Raw, brief_name
from packtrain.config.reading import Reading
from packtrain.config.sections import SECTIONS, ModelSection, ReportSection
from packtrain.config.training_section import TrainingSection
from packtrain.core.secrets import hide_secrets
from packtrain.core.user_code import from_anywhere
from packtrain.records.yaml_text import brief, read_value

_PATHS = (
    ("model", "model_name_or_path"),
    *(("data", name) for name in ("dataset_path", "eval_path", "media_root", "chat_template", "costs", "plan")),
)
_URLS = {"dataset_path", "eval_path", "media_root"}  # of data, or paths


# Settings of which one is enough: on the command line it replaces those of a file.
_INSTEAD_OF: Mapping[str, tuple[str, ...]] = {
    "max_steps": ("num_train_epochs",),
    "num_train_epochs": ("max_steps",),
    "warmup_steps": ("warmup_ratio",),
    "warmup_ratio": ("warmup_steps",),
    "packs_per_step": ("effective_batch_size", "effective_batch_unit", "gradient_accumulation_steps"),
    "effective_batch_size": ("packs_per_step", "gradient_accumulation_steps"),
    "gradient_accumulation_steps": ("packs_per_step", "effective_batch_size", "effective_batch_unit"),
}


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
    def of(cls, sections: Mapping[str, Raw], where: str = "config") -> RunConfig:
        """From settings by our own names, as a file would have them."""
        return run_config(Reading(merged={name: dict(values) for name, values in sections.items()}), where)

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


def run_config(reading: Reading, where: str, below: RunConfig | None = None, notes: Sequence[str] = ()) -> RunConfig:
    """The config that was read, or everything that is wrong with it; `below` is one that this is read over."""
    sections, below = reading.checked(where), below or RunConfig()
    data = sections.get("data", {})
    data |= {name: hide_secrets(str(data[name])) for name in _URLS & data.keys()}  # which from here on have no secrets
    return RunConfig(
        **{name: cls.of(sections.get(name, {})) for name, cls in SECTIONS.items()},  # type: ignore[arg-type]
        notes=tuple(dict.fromkeys((*below.notes, *notes, *reading.notes()))),
        called=(*below.called, *((f"{one.home}.{one.name}", one.at) for one in reading.understood if one.name)),
        written_as=tuple(dict.fromkeys((*below.written_as, *reading.sections, *reading.marks))),
    )


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a config and the files it extends; `section.key=value` overrides what they say."""
    reading = Reading()
    for written in config_files(Path(path)):
        reading.file(written)
    config = _beside(run_config(reading, str(path)), Path(path).parent)
    return with_overrides(config, overrides) if overrides else config


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """The config with settings from the command line over it; their values are YAML, null takes a setting back."""
    reading, notes = Reading(merged=config.sections()), []
    content = _overrides(overrides, reading.problems)
    given = reading.file(Written(name="command line", content=content)).get("training", {})
    reading.sections.clear()  # how single settings are written tells nothing about the config
    reading.marks.clear()
    for name in (name for name, value in given.items() if value not in (None, -1)):
        for other in (other for other in _INSTEAD_OF.get(name, ()) if other not in given):
            if (before := reading.merged["training"].pop(other, None)) is not None:
                notes.append(f"{name} {brief(given[name])} of the command line replaces {other} {before}")
    return run_config(reading, "command line", config, notes)


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
    """The overrides of the command line, in the form that a file would have."""
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
