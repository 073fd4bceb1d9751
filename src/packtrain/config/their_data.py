"""Lists of datasets as other systems write them into a config: the items of a mixture, or why they cannot be."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

_COUNTED = re.compile(r"(?:HF::)?([^#]+?)(?::([\w.-]+))?(?:#(\d+))?")
_ROLES = {"role": ("role", "from"), "content": ("content", "value")}
_TEMPLATE = "columns are named by data.columns, and data.formatting takes a function of your own"


@dataclass(frozen=True, slots=True)
class Datasets:
    """The datasets, by settings of section `data`, and what there is to know about them."""

    items: tuple[Mapping[str, Any], ...]
    why: str = ""


def datasets_of(value: Any, beside: Mapping[str, object]) -> Datasets | str:
    """The datasets of a config; a text says why they cannot be."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        return f"{value!r:.100} instead of a dataset, or a list of them"
    if all(isinstance(name, str) and not _is_place(name) for name in names):
        return _registered(names, beside)
    items: list[Mapping[str, Any]] = []
    why: list[str] = []
    for one in names:
        found = _counted(one) if isinstance(one, str) else _described(one)
        if isinstance(found, str):
            return found
        items.append(found.items[0])
        why += [found.why] if found.why else []
    return Datasets(tuple(items), "; ".join(dict.fromkeys(why)))


def _is_place(name: str) -> bool:
    """Is it a file, a folder or a hub dataset? Single words are names in a registry."""
    return any(mark in name for mark in "/.#")


def _registered(names: list[str], beside: Mapping[str, object]) -> Datasets | str:
    """Names in LLaMA-Factory's dataset_info.json."""
    folder = beside.get("dataset_dir", "data")
    if not isinstance(folder, str) or folder == "ONLINE":
        return "names of datasets are looked for in the dataset_info.json of dataset_dir"
    return Datasets(({"dataset_path": os.path.join(folder, "dataset_info.json"), "sources": names},))


def _counted(name: str) -> Datasets | str:
    """ms-swift's `path`, `path:subset` and `path#500`."""
    if os.path.lexists(name):
        return Datasets(({"dataset_path": name},))
    found = _COUNTED.fullmatch(name)
    if found is None or name.startswith("MS::"):
        return f"{name!r:.100} is no file, folder or hub dataset"
    path, subset, count = found.groups()
    item: dict[str, object] = {"dataset_path": path} | ({"subset": subset} if subset else {})
    if count is None:
        return Datasets((item,))
    return Datasets(({**item, "max_samples": int(count)},), "a number of samples is drawn once, at random by the seed")


def _described(given: Any) -> Datasets | str:
    """An item of axolotl or lmms-engine."""
    if not isinstance(given, Mapping) or not (given.get("path") or given.get("json_path")):
        return "a dataset without a path"
    item: dict[str, Any] = {}
    why: list[str] = []
    for name, value in given.items():
        if value is None or value == "":
            continue
        meaning = _ITEM.get(str(name))
        found = meaning(value, given) if meaning else f"{name}: {_TEMPLATE}"
        if isinstance(found, str):
            return found
        item |= found.items[0]
        why += [found.why] if found.why else []
    return Datasets((item,), "; ".join(why))


Read = Callable[[Any, Mapping[str, object]], Datasets | str]


def _as(name: str) -> Read:
    return lambda value, given: Datasets(({name: value},))


def _only(known: tuple[Any, ...], why: str) -> Read:
    return lambda value, given: Datasets(({},)) if value in known else f"{value!r:.100}: {why}"


def _path(value: Any, given: Mapping[str, object]) -> Datasets | str:
    """axolotl names files as data_files, of a folder or of a format."""
    files = given.get("data_files")
    if not files:
        return Datasets(({"dataset_path": value},))
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if not isinstance(files, str):
        return "data_files: name each file as a dataset"
    inside = os.path.isdir(str(value)) or "/" in str(value)
    return Datasets(({"dataset_path": os.path.join(str(value), files) if inside else files},))


def _type(value: Any, given: Mapping[str, object]) -> Datasets | str:
    if value == "completion":
        field = given.get("field") or "text"
        named = {} if field == "text" else {"columns": {field: "text"}}
        return Datasets(({"dataset_type": "fineweb_edu", **named},))
    if value in ("alpaca", "alpaca_chat.load_qa", "alpaca_w_system"):
        return Datasets(
            ({},), f"type {value}: chats are written with the model's chat template, without ### Instruction"
        )
    if value in ("chat_template", "sharegpt", "chatml", "chat", "conversation"):
        return Datasets(({},))
    return f"type {value!r:.60}: {_TEMPLATE}"


def _messages(value: Any, given: Mapping[str, object]) -> Datasets | str:
    known = value in ("messages", "conversations", "conversation")
    return Datasets(({} if known else {"columns": {value: "messages"}},))


def _properties(value: Any, given: Mapping[str, object]) -> Datasets | str:
    if isinstance(value, Mapping) and all(name in _ROLES.get(key, ()) for key, name in value.items()):
        return Datasets(({},))
    return f"message_property_mappings: {_TEMPLATE}"


_ITEM: Mapping[str, Read] = {
    "path": _path,
    "json_path": _path,
    "data_files": lambda value, given: Datasets(({},)),  # with the path
    "name": _as("subset"),
    "split": _as("split"),
    "data_folder": _as("media_root"),
    "type": _type,
    "ds_type": _only(("json", "parquet", "arrow", "csv", "text"), "a format that is not known"),
    "data_type": _only(("json", "jsonl", "csv", "arrow", "parquet", "hf_dataset"), "a kind of data that is not known"),
    "field": lambda value, given: Datasets(({},)),  # with the type
    "field_messages": _messages,
    "message_property_mappings": _properties,
    "message_field_role": _only(_ROLES["role"], _TEMPLATE),
    "message_field_content": _only(_ROLES["content"], _TEMPLATE),
    "roles_to_train": _only((["assistant"],), "only answers of the assistant carry loss, or all: data.loss_on"),
    "train_on_eos": _only(("turn", "all"), "the end token of every trained answer carries loss"),
    "chat_template": _only(("tokenizer_default",), "data.chat_template names a file"),
    "sampling_strategy": _only(("all",), "repeats of a mixture take a share of a source"),
    "trust_remote_code": _only((False,), "no code of datasets is run"),
}
