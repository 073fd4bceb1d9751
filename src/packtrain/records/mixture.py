"""A file that names several datasets and how much of each to use; all errors are reported together.

Beside our own YAML: Energon's metadatasets (a member is a folder of tar shards, of which `.nv-meta/split.yaml` says
which belong to a split, or a JSON Lines file), LLaMA-Factory's dataset_info.json and InternVL's meta file. What an
entry says beyond where its data are is taken as it is meant, or refused by name.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from packtrain.core.errors import ConfigError, nearest
from packtrain.records.formats.source_files import YAML_ENDINGS, expand_braces, is_hub_name
from packtrain.records.shards.address import is_remote
from packtrain.records.source import FORMATS
from packtrain.records.yaml_text import brief, read_any

Item: TypeAlias = dict[str, Any]  # what a file says of one dataset, before it is checked

_META = ".nv-meta"
_SHARE = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}
_IGNORED = ("subflavor", "subflavors", "shuffle_over_epochs_multiplier", "split_part", "path")
_EXPECTED = "datasets with a path each, mixed by blend or blend_epochized"
_WAY = "list the files in a YAML mixture: {path: coco/shard-{000..099}.tar, weight: 0.6}; weights are shares"


def is_metadataset(content: Any) -> bool:
    """Is this content of a YAML file a metadataset?"""
    return isinstance(content, Mapping) and str(content.get("__module__", "")).startswith("megatron.energon")


def metadataset_items(file: str, content: Mapping[Any, Any], split: str, problems: list[str]) -> list[Item]:
    """Its members of a split as items of a mixture; what cannot be is added to `problems`."""
    splits = content.get("splits")
    if not isinstance(splits, Mapping) or not isinstance(chosen := splits.get(split), Mapping):
        has = ", ".join(map(str, splits)) if isinstance(splits, Mapping) else "none"
        raise ConfigError(file, got=f"splits {has}", expected=f"the split {split}", fix="set data.split or --split")
    kind = next((name for name in _SHARE if name in chosen), "")
    members = chosen[kind] if kind else [chosen]
    strange = [str(name) for name in chosen if name not in (kind, *(_IGNORED if not kind else ()))]
    if strange or not isinstance(members, list) or not members:
        got = f"a metadataset of Energon with {', '.join(strange) or 'nothing in it'}"
        raise ConfigError(file, got=got, expected=_EXPECTED, fix=_WAY)
    share = _SHARE.get(kind, "")
    folder, items = os.path.dirname(os.path.abspath(file)), []
    for number, member in enumerate(members):
        where = f"{split}.{kind}[{number}]" if kind else split
        faults = [*_problems(member, share)]
        try:
            items.append(_member(member, folder, split, share)) if not faults else None
        except ConfigError as error:
            faults = [str(error.got)]
        problems += [f"{where}: {problem}; {_WAY}" for problem in faults]
    return _weights_to_shares(items) if share == "weight" and not problems else items


def _problems(member: Any, share: str) -> Iterator[str]:
    """Problems of a member that asks for more than a path and a share."""
    if not isinstance(member, Mapping) or not isinstance(member.get("path"), str):
        yield "no path"
        return
    for name, value in member.items():
        if name not in (*_IGNORED, share) and value is not None:
            yield f"{name} is not read here"
    amount = member.get(share, 1) if share else 1
    if isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0:
        yield f"{share}: {brief(amount)} instead of a number above 0"


def _member(member: Item, folder: str, split: str, share: str) -> Item:
    path = os.path.normpath(os.path.join(folder, os.path.expanduser(member["path"])))
    item: Item = {"path": path}
    if os.path.isdir(path):
        item["name"] = os.path.basename(os.path.normpath(path))
        item |= {"path": _shards(path, str(member.get("split_part") or split)), "format": "webdataset"}
    elif path.lower().endswith((".yaml", ".yml")):
        raise ConfigError(path, got=f"{member['path']} is a metadataset inside a metadataset")
    if share:
        item["repeats" if share == "repetitions" else share] = member.get(share, 1)
    return item


def _shards(folder: str, split: str) -> str:
    """The shards of a split, as one pattern."""
    meta = Path(folder) / _META
    split_in_name, dataset = _read(meta / "split.yaml"), _read(meta / "dataset.yaml")
    if dataset.get("sample_loader"):
        raise ConfigError(folder, got=f"{folder}: its samples come from code, {dataset['sample_loader']}")
    parts = split_in_name.get("split_parts")
    listed = parts.get(split) if isinstance(parts, Mapping) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise ConfigError(folder, got=f"{folder}: {_META}/split.yaml has no shards of the split {split}")
    names = [name for pattern in listed for name in expand_braces(pattern)]
    left_out = split_in_name.get("exclude") or []
    if any(".tar/" in str(name) for name in left_out):
        raise ConfigError(folder, got=f"{folder}: {_META}/split.yaml excludes single samples")
    shards = [os.path.join(folder, name) for name in names if name not in left_out]
    inside = os.path.realpath(folder) + os.sep
    if any(not os.path.realpath(path).startswith(inside) or "," in path or "{" in path for path in shards):
        raise ConfigError(folder, got=f"{folder}: {_META}/split.yaml lists files outside of it")
    return (
        shards[0]
        if len(shards) == 1
        else f"{folder}{os.sep}{{{','.join(os.path.relpath(one, folder) for one in shards)}}}"
    )


def _read(path: Path) -> Item:
    content = read_any(path) if path.is_file() else {}
    return content if isinstance(content, dict) else {}


def _weights_to_shares(items: list[Item]) -> list[Item]:
    """Energon's weights are relative, ours are shares of all samples."""
    total = sum(item["weight"] for item in items)
    return [{**item, "weight": item["weight"] / total} for item in items]


MOST = 1 << 22  # bytes; a longer file is data
_FACTORY = ("file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_INTERNVL = ("root", "annotation")
# Columns and tags of LLaMA-Factory, by the names under which records are recognised here.
_COLUMNS: Mapping[str, tuple[str, ...]] = {
    **{"prompt": ("instruction",), "query": ("input",), "response": ("output",), "history": ("history",)},
    **{"messages": ("messages", "conversations"), "system": ("system",)},
    **{"images": ("images", "image"), "videos": ("videos", "video")},
}
_TAGS: Mapping[str, tuple[str, ...]] = {
    **{"role_tag": ("role", "from"), "content_tag": ("content", "value"), "system_tag": ("system",)},
    **{"user_tag": ("user", "human"), "assistant_tag": ("assistant", "gpt")},
}
_ONE_BY_ONE = "select sources with data.sources or --source"
# Keys that would change what is trained: why they are refused, and what to do.
_REFUSED: Mapping[str, str] = {
    "ranking": "preference data are not supported",
    "folder": "set the folder as path in a YAML mixture",
    "max_dynamic_patch": "image tiling follows the model's processor; leave it out",
    "min_dynamic_patch": "image tiling follows the model's processor; leave it out",
    "data_augment": "image augmentation is not supported; set it to false",
}


def is_registry(path: str) -> bool:
    """Is this JSON file a list of datasets? Every value of such an object is one, and says where it is."""
    return path.lower().endswith(".json") and _kind(_content(path)) is not None


def registry_items(path: str, names: Sequence[str], problems: list[str]) -> Iterator[Item]:
    """The entries as those of a YAML mixture, of these names or all; what cannot be is added to `problems`."""
    content = _content(path) or {}
    kind = _kind(content)
    assert kind is not None
    for name in names:
        if name not in content:
            problems.append(f"{name}: no such dataset. {nearest(name, content)}".rstrip())
    for name in names or content:
        if name not in content:
            continue
        num_problems = len(problems)
        item = kind(name, content[name], os.path.dirname(os.path.abspath(path)), problems)
        if len(problems) == num_problems:
            yield item
    if problems and not names and len(content) > 1:
        problems.append(_ONE_BY_ONE)


def _content(path: str) -> Item | None:
    try:
        if os.path.getsize(path) > MOST:
            return None
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    entries = isinstance(content, dict) and content and all(isinstance(one, dict) for one in content.values())
    return content if entries else None


def _kind(content: Item | None) -> Callable[[str, Any, str, list[str]], Item] | None:
    if content and all(any(key in one for key in _FACTORY) for one in content.values()):
        return _factory_item
    if content and all(all(key in one for key in _INTERNVL) for one in content.values()):
        return _internvl_item
    return None


def _factory_item(name: str, entry: Item, folder: str, problems: list[str]) -> Item:
    """An entry of dataset_info.json; media are relative to its folder."""
    known = {"formatting", "columns", "tags", "split", "subset", "num_samples", *_FACTORY}
    problems += _unknown_keys(name, entry, known)
    for part, table in (("columns", _COLUMNS), ("tags", _TAGS)):
        names = entry.get(part) or {}
        for key, value in names.items() if isinstance(names, Mapping) else ():
            if value is not None and value not in table.get(key, ()):
                way = "data.columns renames it" if key in _COLUMNS else "data.formatting_func takes your own function"
                problems.append(f"{name}.{part}.{key}: {brief(value)} is not read as {key}; {way}")
    if entry.get("formatting", "alpaca") not in ("alpaca", "sharegpt", "openai"):
        problems.append(
            f"{name}.formatting: {brief(entry['formatting'])} is not supported; use alpaca, sharegpt or openai"
        )
    shared = {key: entry[key] for key in ("split", "subset") if entry.get(key) is not None}
    shared |= {"max_samples": entry["num_samples"]} if entry.get("num_samples") else {}
    if "file_name" in entry:
        return {"name": name, "path": entry["file_name"], "media_root": folder, **shared}
    if "hf_hub_url" in entry:
        return {"name": name, "path": entry["hf_hub_url"], "format": "hf_dataset", **shared}
    problems.append(
        f"{name}: only file_name and hf_hub_url are read; download it, and list its files in a YAML mixture"
    )
    return {}


def _internvl_item(name: str, entry: Item, folder: str, problems: list[str]) -> Item:
    """An entry of a meta file; its paths are relative to the file or, as InternVL has it, to the working directory."""
    problems += _unknown_keys(name, entry, {*_INTERNVL, "repeat_time", "length"})

    def place(key: str) -> Any:
        path = entry[key]
        in_working_dir = (
            isinstance(path, str) and not os.path.exists(os.path.join(folder, path)) and os.path.exists(path)
        )
        return os.path.abspath(path) if in_working_dir else path

    item = {"name": name, "path": place("annotation"), "repeats": entry.get("repeat_time")}
    return {**item, "media_root": place("root")} if entry["root"] else item


def _unknown_keys(name: str, entry: Item, known: set[str]) -> list[str]:
    """Keys that ask for something, and are not known."""
    return [
        f"{name}.{key}: {_REFUSED.get(key, 'unknown key')}"
        for key, value in entry.items()
        if key not in known and value
    ]


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
        match = _COUNTED.fullmatch(item)  # as ms-swift writes it
        if match and not os.path.lexists(os.path.join(folder, item)):
            item = {"path": match[1], "max_samples": int(match[2])}
        else:
            item = {"path": item}
    if not isinstance(item, Mapping):
        problems.append(f"{where}: {type(item).__name__} instead of a dataset")
        return None
    num_problems = len(problems)
    values: Item = {}
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
    if len(problems) > num_problems:
        return None
    values["path"] = _resolve(values["path"], values.get("format"), folder)
    if "media_root" in values:
        values["media_root"] = os.path.join(folder, os.path.expanduser(values["media_root"]))
    return MixtureItem(**values)


def _check(values: Item, where: str, problems: list[str]) -> None:
    """Types and bounds of the values of one item."""
    for key in TEXT_KEYS:
        if key in values and (not isinstance(values[key], str) or not values[key]):
            problems.append(f"{where}.{key}: {brief(values[key])} instead of text")
    path = values.get("path")
    if path is None:
        problems.append(f"{where}: no path")
    elif isinstance(path, str) and path.lower().endswith(YAML_ENDINGS):
        problems.append(f"{where}.path: {brief(path)} is a mixture inside a mixture; list its datasets here")
    format = values.get("format")
    if isinstance(format, str) and format not in FORMATS:
        hint = nearest(format, FORMATS) or "one of " + ", ".join(FORMATS)
        problems.append(f"{where}.format: {brief(format)} is not a format. {hint}")
    for key in SHARE_KEYS:
        share = values.get(key)
        if key not in values:
            continue
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
            problems.append(f"{where}.{key}: {brief(share)} instead of a number above 0")
    most = values.get("max_samples")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        problems.append(f"{where}.max_samples: {brief(most)} instead of a positive integer")
    if all(key in values for key in SHARE_KEYS):
        problems.append(f"{where}: weight and repeats are mutually exclusive")


def _resolve(path: str, format: str | None, folder: str) -> str:
    """A path relative to the mixture file; a name on the hub stays as it is where nothing local bears it."""
    if is_remote(path):
        return path
    local = os.path.join(folder, os.path.expanduser(path))
    hub = is_hub_name(path) or (format == "hf_dataset" and "/" not in path)
    return path if hub and not os.path.lexists(local) else local
