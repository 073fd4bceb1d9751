"""A config of another system -> one in our own keys, and an account of every key: none is dropped silently."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from packtrain.app.train.resolve import resolve_run
from packtrain.config.config_files import config_files
from packtrain.config.data_options import section_defaults
from packtrain.config.keys import Section
from packtrain.config.reading import Reading
from packtrain.config.run_config import RunConfig, run_config
from packtrain.config.sections import SECTIONS
from packtrain.config.steps import counted_in_packs_by
from packtrain.config.systems import detect_systems
from packtrain.core.errors import ConfigError
from packtrain.core.secrets import without_secrets
from packtrain.records.formats.source_files import is_hub_name
from packtrain.records.shards.address import is_remote
from packtrain.records.yaml_text import Dumper

_NAMED = re.compile(r"(model|data|training|report)\.(\w+)\b")
# Settings of a dataset, and their names in an item of a mixture.
_ITEM = {"dataset_path": "path", "subset": "subset", "split": "split", "media_root": "media_root", "max_samples": ""}
# What a run needs: a description for the user, and a stand-in while the rest is checked.
_NEEDED = {
    ("model", "model_name_or_path"): ("a model folder, a hub name or tiny:FAMILY", "tiny:llama"),
    ("data", "dataset_path"): ("a file or folder, or a hub name", "data.jsonl"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """A config in our own keys, and what became of the original ones."""

    config: RunConfig
    systems: tuple[str, ...]
    read_as: tuple[str, ...]  # how keys of other systems were read
    no_effect: Mapping[str, str]  # keys without effect, and why
    refused: tuple[str, ...]  # keys that cannot be supported, and why
    missing: tuple[str, ...]  # what a run needs and the config does not have
    notes: tuple[str, ...]  # what behaves differently here
    mixture: tuple[Mapping[str, object], ...] = ()  # several datasets, written to a file of their own

    def text(self, *, of: str) -> str:
        """The config as YAML; what was left out is listed in comments."""
        system = f", a config of {' and '.join(self.systems)}" if self.systems else ""
        head = [f"# From {of}{system}."]
        head += [f"# left out: {line}" for one in self.refused for line in one.splitlines()]
        head += [f"# note: {one}" for one in self.missing]
        return "\n".join([*head, "", sections_text(self.config)])

    def mixture_text(self, *, beside: Path) -> str:
        """The datasets as a mixture file for this folder."""
        return _yaml({"datasets": [_item(one, beside) for one in self.mixture]})


def convert(path: str | Path) -> Converted:
    """Read a config of any system as `train` does, but continue after unsupported keys and account for them."""
    reading = Reading(takes_mixture=True)
    for written in config_files(Path(path)):
        reading.file(written)
    refused = list(dict.fromkeys(reading.problems))
    reading.problems.clear()
    reading.mixture, problems = _as_items(reading)
    refused += [*problems, *_wrong_values(reading)]
    config = run_config(reading, str(path))
    if reading.mixture:
        config = replace(config, data=replace(config.data, dataset_path="datasets.yaml"))
    read_as, no_effect = tuple(reading.read_as()), dict(reading.unused)
    config, notes = section_defaults(config)
    missing = [place for place in _NEEDED if getattr(getattr(config, place[0]), place[1]) is None]
    while problems := _resolve_problems(config, missing):  # each round leaves settings out, or is the last
        config, left = _without(config, problems)
        refused += problems
        if not left:
            break
    system = counted_in_packs_by(config)
    if system:
        way = "training.effective_batch_unit: packs does so here too"
        notes = (*notes, f"a step is counted in samples; in {system}, batch size counts packs: {way}")
    return Converted(
        config=config,
        systems=tuple(detect_systems(config.written_as)),
        read_as=read_as,
        no_effect=no_effect,
        refused=tuple(dict.fromkeys(refused)),
        missing=tuple(f"{'.'.join(place)}: {_NEEDED[place][0]}" for place in missing),
        notes=notes,
        mixture=reading.mixture,
    )


def _as_items(reading: Reading) -> tuple[tuple[Mapping[str, object], ...], list[str]]:
    """The datasets of a mixture; what an item cannot have becomes a setting of all, if they agree on it."""
    items, problems = reading.mixture, []
    for name in dict.fromkeys(name for item in items for name in item if name not in _ITEM):
        values = [item.get(name) for item in items]
        if any(value != values[0] for value in values):
            problems.append(
                f"datasets: {name} is one setting for all sources; measure these separately, or use the same value"
            )
        else:
            reading.merged.setdefault("data", {}).setdefault(name, values[0])
    return tuple({name: value for name, value in item.items() if name in _ITEM} for item in items), problems


def _wrong_values(reading: Reading) -> list[str]:
    """Invalid values; their keys are removed."""
    problems = []
    for section, values in reading.merged.items():
        for name, value in list(values.items()):
            wrong = [] if value is None else [*SECTIONS[section].problems({name: value}, f"{section}.")]
            if wrong:
                problems += wrong
                del values[name]
    return problems


def _resolve_problems(config: RunConfig, missing: list[tuple[str, str]]) -> list[str]:
    """Why a run of it would be refused, apart from what is missing."""
    for section, name in missing:
        stand_in = {name: _NEEDED[section, name][1]}
        config = replace(config, **{section: replace(getattr(config, section), **stand_in)})  # type: ignore[arg-type]
    try:
        resolve_run(config)
    except ConfigError as error:
        return list(error.problems) or [str(error)]
    return []


def _without(config: RunConfig, problems: list[str]) -> tuple[RunConfig, bool]:
    """The config without the settings that these problems are about, and whether there were any."""
    left = False
    for named in filter(None, map(_NAMED.match, problems)):
        section: Section = getattr(config, named[1])
        if getattr(section, named[2], None) is not None:
            config, left = replace(config, **{named[1]: replace(section, **{named[2]: None})}), True  # type: ignore[arg-type]
    return config, left


def config_sections(config: RunConfig) -> dict[str, object]:
    """The given settings, without secrets and empty sections."""
    sections = {
        name: {key: one for key, one in values.items() if one != {}} for name, values in config.sections().items()
    }
    return {name: dict(without_secrets(values)) for name, values in sections.items() if values}


def sections_text(config: RunConfig) -> str:
    """The given settings as YAML."""
    return _yaml(config_sections(config))


def _item(given: Mapping[str, object], beside: Path) -> dict[str, object]:
    item = {_ITEM[name] or name: value for name, value in given.items()}
    for name in ("path", "media_root"):
        place = item.get(name)
        if isinstance(place, str) and not is_remote(place) and (os.path.lexists(place) or not is_hub_name(place)):
            item[name] = os.path.relpath(os.path.expanduser(place), beside)
    return dict(without_secrets(item))


def _yaml(value: Mapping[str, object]) -> str:
    return str(yaml.dump(dict(value), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=110))
