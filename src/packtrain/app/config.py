"""A run's config: one YAML file in, checked sections out; everything that is wrong with it is said at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from packtrain.app.config_keys import ALIASES, PROCESSOR_KEYS, SECTION_ALIASES, SECTIONS
from packtrain.core.errors import ConfigError, nearest

_MOST_EXTENDS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The sections of a run, by our own names. What a section does not name takes its default where it is used."""

    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    report: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # names of other systems that were understood, and what they mean here


def load_config(path: str | Path) -> RunConfig:
    """Read a config and the files it extends."""
    merged: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    problems: list[str] = []
    for file in reversed(_chain(Path(path))):
        sections = _sections(file, _read(file), notes, problems)
        for section, values in sections.items():
            merged.setdefault(section, {}).update(values)
    _check_values(merged, problems)
    if problems:
        indent = "\n            "
        raise ConfigError(str(path), got=indent.join(problems), expected="a config of a run", fix="correct these lines")
    return RunConfig(**merged, notes=tuple(dict.fromkeys(notes)))


def _chain(path: Path) -> list[Path]:
    """The file and those it extends, nearest first."""
    found = [path]
    while True:
        below = _read(found[-1]).get("extends")
        if below is None:
            return found
        if not isinstance(below, str):
            raise ConfigError(f"{found[-1]}: extends", got=repr(below), expected="the path of another config")
        found.append(found[-1].parent / below)
        if found[-1].resolve() in {one.resolve() for one in found[:-1]} or len(found) > _MOST_EXTENDS:
            raise ConfigError(f"{path}: extends", got=" -> ".join(map(str, found)), expected="a chain that ends")


def _read(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(str(path), got=f"{type(error).__name__}: {error}", expected="a YAML file") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(str(path), got=f"a {type(content).__name__}", expected="sections model, data, training")
    return content


def _sections(
    file: Path, content: Mapping[str, Any], notes: list[str], problems: list[str]
) -> dict[str, dict[str, Any]]:
    """The content by section and by our own names."""
    found: dict[str, dict[str, Any]] = {}
    written: dict[tuple[str, str], str] = {}
    for name, value in content.items():
        section = SECTION_ALIASES.get(str(name), str(name))
        if name == "extends":
            continue
        if section in SECTIONS:
            if section == "model" and isinstance(value, str):
                value = {"model_name_or_path": value}
            if not isinstance(value, Mapping):
                if value is not None:
                    problems.append(f"{file.name}: {name}: {type(value).__name__} instead of a section")
                continue
            if section != name:
                notes.append(f"section {name} is {section}")
            for key, given in value.items():
                _place(file, section, str(key), given, found, written, notes, problems)
        else:
            _place(file, None, str(name), value, found, written, notes, problems)
    return found


def _place(
    file: Path,
    section: str | None,
    key: str,
    value: Any,
    found: dict[str, dict[str, Any]],
    written: dict[tuple[str, str], str],
    notes: list[str],
    problems: list[str],
) -> None:
    """Put one key where it belongs; flat keys and keys of a neighbouring section find their own."""
    at = f"{section}.{key}" if section else key
    name, brings = ALIASES.get(key, (key, {}))
    if key == "filter_overlong":
        name, value = "overlong", "drop" if value else "error"
    homes = [home for home, keys in SECTIONS.items() if name in keys]
    home = section if section in homes else (homes[0] if homes else None)
    if home is None:
        known = SECTIONS[section] if section else tuple(key for keys in SECTIONS.values() for key in keys)
        hint = nearest(key, [*known, *ALIASES, *SECTIONS])
        problems.append(f"{file.name}: {at}: unknown key. {hint}".rstrip())
        return
    if (home, name) in written and written[home, name] != at:
        problems.append(f"{file.name}: {at} and {written[home, name]} are the same setting")
        return
    written[home, name] = at
    if at != f"{home}.{name}":
        extra = "".join(f", {other}: {given}" for other, given in brings.items())
        notes.append(f"{at} is {home}.{name}" + (f" ({name}: {value})" if key == "filter_overlong" else extra))
    found.setdefault(home, {})[name] = value
    for other, given in brings.items():
        if (home, other) not in written:
            found[home].setdefault(other, given)


def _check_values(merged: Mapping[str, Mapping[str, Any]], problems: list[str]) -> None:
    """Values whose shape is known without the stage that uses them; the stages check the rest."""
    data = merged.get("data", {})
    for name in ("packing", "eval_packing", "packing_drop_last", "shuffle", "add_eos", "repack_each_epoch"):
        if name in data and not isinstance(data[name], bool):
            problems.append(f"data.{name}: {data[name]!r} instead of true or false")
    limits = data.get("processor_config")
    if limits is not None and not isinstance(limits, Mapping):
        problems.append(f"data.processor_config: {type(limits).__name__} instead of a section")
    for name in limits if isinstance(limits, Mapping) else ():
        if name not in PROCESSOR_KEYS:
            problems.append(f"data.processor_config.{name}: unknown key. {nearest(str(name), PROCESSOR_KEYS)}".rstrip())
