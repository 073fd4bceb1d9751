"""A file that names several datasets and how much of each to use; all errors are reported together."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packtrain.core.errors import ConfigError, nearest
from packtrain.records.dataset_registry import is_registry, registry_items
from packtrain.records.energon import is_metadataset, metadataset_items
from packtrain.records.formats.source_files import YAML_ENDINGS, is_hub_name
from packtrain.records.shards.address import is_remote
from packtrain.records.source import FORMATS
from packtrain.records.yaml_text import brief, read_any

ALIASES: Mapping[str, str] = {
    **{"dataset_path": "path", "dataset_format": "format", "media_dir": "media_root"},
    **{"json_path": "path", "data_folder": "media_root"},  # of lmms-engine
}
# lmms-engine's kinds of data, which are recognised here.
_DATA_TYPES = ("json", "jsonl", "csv", "arrow", "parquet", "hf_dataset")
TEXT_KEYS = ("path", "name", "format", "media_root", "split", "subset")
_COUNTED = re.compile(r"(.+)#(\d+)")
_ASKS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    **{"data_folder": ("", None), "data_type": (*_DATA_TYPES, None), "sampling_strategy": ("all", None)},
}
SHARE_KEYS = ("weight", "repeats")
KEYS = (*TEXT_KEYS, *SHARE_KEYS, "max_samples")


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureItem:
    """One dataset of a mixture as the file gives it; paths are resolved against the file's folder."""

    path: str
    name: str | None = None
    format: str | None = None
    media_root: str | None = None
    split: str | None = None
    subset: str | None = None
    weight: float | None = None
    repeats: float | None = None
    max_samples: int | None = None


def read_mixture(file: str, names: Sequence[str] = (), split: str = "train") -> list[MixtureItem]:
    """The items of a mixture file; of another system's list of datasets, those of these names, or of this split.

    Raises ConfigError that lists every problem.
    """
    folder = os.path.dirname(os.path.abspath(file))
    problems: list[str] = []
    items = list(registry_items(file, names, problems)) if is_registry(file) else _items(file, split, problems)
    read = [_item(item, f"datasets[{number}]", folder, problems) for number, item in enumerate(items)]
    if problems:
        raise mixture_error(file, problems)
    return [item for item in read if item is not None]


def mixture_error(file: str, problems: list[str]) -> ConfigError:
    """One error for all that is wrong with a mixture."""
    return ConfigError(file, problems=problems, expected="items of " + ", ".join(KEYS))


def _items(file: str, split: str, problems: list[str]) -> list[Any]:
    """The list in the file, either at the top or under `datasets:`."""
    shape = "a list of datasets, or `datasets:` with such a list"
    content = read_any(Path(file), "a YAML file with " + shape)
    if is_metadataset(content):
        return metadataset_items(file, content, split, problems)
    if isinstance(content, Mapping):
        if unknown := [str(key) for key in content if key != "datasets"]:
            hint = nearest(unknown[0], ["datasets"]) or "remove it, or move it into the run's config"
            raise ConfigError(file, got=f"the key {unknown[0]!r}", expected="`datasets:` and nothing else", fix=hint)
        content = content.get("datasets")
    if not isinstance(content, list) or not content:
        raise ConfigError(file, got=type(content).__name__ if content else "nothing", expected=shape)
    return content


def _item(item: Any, where: str, folder: str, problems: list[str]) -> MixtureItem | None:
    """One item of the list; what is wrong with it is added to `problems`."""
    if isinstance(item, str):
        counted = _COUNTED.fullmatch(item)  # as ms-swift writes it
        if counted and not os.path.lexists(os.path.join(folder, item)):
            item = {"path": counted[1], "max_samples": int(counted[2])}
        else:
            item = {"path": item}
    if not isinstance(item, Mapping):
        problems.append(f"{where}: {type(item).__name__} instead of a dataset")
        return None
    before = len(problems)
    values: dict[str, Any] = {}
    for written, value in item.items():
        key = ALIASES.get(str(written), str(written))
        if value in _ASKS_NOTHING.get(str(written), ()):
            continue
        if key in _ASKS_NOTHING and key not in ALIASES:
            problems.append(f"{where}.{written}: {brief(value)} is not supported; repeats takes a share of a source")
        elif key not in KEYS:
            problems.append(f"{where}.{written}: unknown key. {nearest(str(written), [*KEYS, *ALIASES])}".rstrip())
        elif key in values:
            problems.append(f"{where}.{written}: {key} is given twice")
        elif value is not None:
            values[key] = value
    _check(values, where, problems)
    if len(problems) > before:
        return None
    values["path"] = _resolve(values["path"], values.get("format"), folder)
    if "media_root" in values:
        values["media_root"] = os.path.join(folder, os.path.expanduser(values["media_root"]))
    return MixtureItem(**values)


def _check(values: dict[str, Any], where: str, problems: list[str]) -> None:
    """Types and bounds of the values of one item."""
    for key in TEXT_KEYS:
        if key in values and (not isinstance(values[key], str) or not values[key]):
            problems.append(f"{where}.{key}: {brief(values[key])} instead of text")
    path = values.get("path")
    if path is None:
        problems.append(f"{where}: no path")
    elif isinstance(path, str) and path.lower().endswith(YAML_ENDINGS):
        problems.append(f"{where}.path: {brief(path)} is a mixture inside a mixture; list its datasets here")
    chosen = values.get("format")
    if isinstance(chosen, str) and chosen not in FORMATS:
        hint = nearest(chosen, FORMATS) or "one of " + ", ".join(FORMATS)
        problems.append(f"{where}.format: {brief(chosen)} is not a format. {hint}")
    for key in SHARE_KEYS:
        share = values.get(key)
        if key not in values:
            continue
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
            problems.append(f"{where}.{key}: {brief(share)} instead of a number above 0")
    most = values.get("max_samples")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        problems.append(f"{where}.max_samples: {brief(most)} instead of a positive whole number")
    if all(key in values for key in SHARE_KEYS):
        problems.append(f"{where}: weight and repeats are mutually exclusive")


def _resolve(path: str, format: str | None, folder: str) -> str:
    """A path relative to the mixture file; a name on the hub stays as it is where nothing local bears it."""
    if is_remote(path):
        return path
    local = os.path.join(folder, os.path.expanduser(path))
    hub = is_hub_name(path) or (format == "hf_dataset" and "/" not in path)
    return path if hub and not os.path.lexists(local) else local
