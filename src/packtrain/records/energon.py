"""Energon's metadatasets as mixtures: which shards of which folders, and how much of each.

A member is a folder of tar shards, of which `.nv-meta/split.yaml` says which belong to a split, or a JSON Lines file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packtrain.core.errors import ConfigError
from packtrain.records.formats.source_files import expand_braces
from packtrain.records.yaml_text import brief, read_any

_META = ".nv-meta"
_SHARE = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}
_IGNORED = ("subflavor", "subflavors", "shuffle_over_epochs_multiplier", "split_part", "path")
_EXPECTED = "datasets with a path each, mixed by blend or blend_epochized"
_WAY = "list the files in a YAML mixture: {path: coco/shard-{000..099}.tar, weight: 0.6}; weights are shares"


def is_metadataset(content: Any) -> bool:
    """Is this content of a YAML file a metadataset?"""
    return isinstance(content, Mapping) and str(content.get("__module__", "")).startswith("megatron.energon")


def metadataset_items(file: str, content: Mapping[Any, Any], split: str, problems: list[str]) -> list[dict[str, Any]]:
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
        found = [*_problems(member, share)]
        try:
            items.append(_item(member, folder, split, share)) if not found else None
        except ConfigError as error:
            found = [str(error.got)]
        problems += [f"{where}: {problem}; {_WAY}" for problem in found]
    return _shared(items) if share == "weight" and not problems else items


def _problems(member: Any, share: str) -> Iterator[str]:
    """What asks for more than a path and a share."""
    if not isinstance(member, Mapping) or not isinstance(member.get("path"), str):
        yield "no path"
        return
    for name, value in member.items():
        if name not in (*_IGNORED, share) and value is not None:
            yield f"{name} is not read here"
    given = member.get(share, 1) if share else 1
    if isinstance(given, bool) or not isinstance(given, int | float) or not given > 0:
        yield f"{share}: {brief(given)} instead of a number above 0"


def _item(member: Mapping[str, Any], folder: str, split: str, share: str) -> dict[str, Any]:
    path = os.path.normpath(os.path.join(folder, os.path.expanduser(member["path"])))
    found: dict[str, Any] = {"path": path}
    if os.path.isdir(path):
        found["name"] = os.path.basename(os.path.normpath(path))
        found |= {"path": _shards(path, str(member.get("split_part") or split)), "format": "webdataset"}
    elif path.lower().endswith((".yaml", ".yml")):
        raise ConfigError(path, got=f"{member['path']} is a metadataset inside a metadataset")
    if share:
        found["repeats" if share == "repetitions" else share] = member.get(share, 1)
    return found


def _shards(folder: str, split: str) -> str:
    """The shards of a split, as one pattern."""
    meta = Path(folder) / _META
    split_of, dataset = _read(meta / "split.yaml"), _read(meta / "dataset.yaml")
    if dataset.get("sample_loader"):
        raise ConfigError(folder, got=f"{folder}: its samples come from code, {dataset['sample_loader']}")
    parts = split_of.get("split_parts")
    listed = parts.get(split) if isinstance(parts, Mapping) else None
    if not isinstance(listed, list) or not listed or not all(isinstance(name, str) for name in listed):
        raise ConfigError(folder, got=f"{folder}: {_META}/split.yaml has no shards of the split {split}")
    names = [name for pattern in listed for name in expand_braces(pattern)]
    left_out = split_of.get("exclude") or []
    if any(".tar/" in str(name) for name in left_out):
        raise ConfigError(folder, got=f"{folder}: {_META}/split.yaml excludes single samples")
    kept = [os.path.join(folder, name) for name in names if name not in left_out]
    inside = os.path.realpath(folder) + os.sep
    if any(not os.path.realpath(path).startswith(inside) or "," in path or "{" in path for path in kept):
        raise ConfigError(folder, got=f"{folder}: {_META}/split.yaml lists files outside of it")
    return (
        kept[0] if len(kept) == 1 else f"{folder}{os.sep}{{{','.join(os.path.relpath(one, folder) for one in kept)}}}"
    )


def _read(path: Path) -> Mapping[str, Any]:
    content = read_any(path) if path.is_file() else {}
    return content if isinstance(content, Mapping) else {}


def _shared(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Energon's weights are relative, ours are shares of all samples."""
    total = sum(item["weight"] for item in items)
    return [{**item, "weight": item["weight"] / total} for item in items]
