"""Lists of datasets as other systems keep them in JSON: LLaMA-Factory's dataset_info.json and InternVL's meta file.

Each is a mixture here. What an entry says beyond where its data are is taken as it is meant, or refused by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from packtrain.core.errors import nearest
from packtrain.records.yaml_text import brief

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


def registry_items(path: str, names: Sequence[str], problems: list[str]) -> Iterator[dict[str, Any]]:
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
        before = len(problems)
        item = kind(name, content[name], os.path.dirname(os.path.abspath(path)), problems)
        if len(problems) == before:
            yield item
    if problems and not names and len(content) > 1:
        problems.append(_ONE_BY_ONE)


def _content(path: str) -> dict[str, Any] | None:
    try:
        if os.path.getsize(path) > MOST:
            return None
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except (OSError, ValueError, RecursionError):
        return None
    entries = isinstance(content, dict) and content and all(isinstance(one, dict) for one in content.values())
    return content if entries else None


def _kind(content: dict[str, Any] | None) -> Callable[[str, Any, str, list[str]], dict[str, Any]] | None:
    if content and all(any(key in one for key in _FACTORY) for one in content.values()):
        return _of_factory
    if content and all(all(key in one for key in _INTERNVL) for one in content.values()):
        return _of_internvl
    return None


def _of_factory(name: str, entry: Mapping[str, Any], folder: str, problems: list[str]) -> dict[str, Any]:
    """An entry of dataset_info.json; media are relative to its folder."""
    known = {"formatting", "columns", "tags", "split", "subset", "num_samples", *_FACTORY}
    problems += _strange(name, entry, known)
    for part, table in (("columns", _COLUMNS), ("tags", _TAGS)):
        given = entry.get(part) or {}
        for key, value in given.items() if isinstance(given, Mapping) else ():
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


def _of_internvl(name: str, entry: Mapping[str, Any], folder: str, problems: list[str]) -> dict[str, Any]:
    """An entry of a meta file; its paths are relative to the file or, as InternVL has it, to the working directory."""
    problems += _strange(name, entry, {*_INTERNVL, "repeat_time", "length"})

    def place(key: str) -> Any:
        given = entry[key]
        here = isinstance(given, str) and not os.path.exists(os.path.join(folder, given)) and os.path.exists(given)
        return os.path.abspath(given) if here else given

    found = {"name": name, "path": place("annotation"), "repeats": entry.get("repeat_time")}
    return {**found, "media_root": place("root")} if entry["root"] else found


def _strange(name: str, entry: Mapping[str, Any], known: set[str]) -> list[str]:
    """Keys that ask for something, and are not known."""
    return [
        f"{name}.{key}: {_REFUSED.get(key, 'unknown key')}"
        for key, value in entry.items()
        if key not in known and value
    ]
