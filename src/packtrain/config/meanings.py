"""The meaning of another system's key, or of a key of its dataset items: settings of ours, nothing, or an error."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from packtrain.config.keys import Raw

_COUNTED = re.compile(r"(?:HF::)?([^#]+?)(?::([\w.-]+))?(?:#(\d+))?")
_ROLES = {
    **{"user": ("user", "human"), "assistant": ("assistant", "gpt", "chatgpt", "model")},
    **{"system": ("system",), "tool": ("tool",)},
}
_PROPERTIES = {"role": ("role", "from"), "content": ("content", "value")}
_COLUMNS = "columns are named by data.columns, and data.formatting_func takes a function of your own"


@dataclass(frozen=True, slots=True)
class Means:
    """Settings of ours, or none where a key changes nothing here; and what else there is to know."""

    settings: Raw = field(default_factory=dict)
    why: str = ""
    mixture: tuple[Raw, ...] = ()  # several datasets, which are a file of their own


# A text says why it cannot be; None: the key means here what it says.
Meaning = Means | str | None
Meant = Callable[[Any, Raw], Meaning]  # of a value, and of all keys of its file
_OFF = (None, False, "", 0, 0.0, "no", "none", "None", "false", "False")


def to(name: str) -> Meant:
    """Another name of a setting, where not every system has it."""
    return lambda value, beside: Means({name: value})


def nothing(why: str) -> Meant:
    """No effect here, whatever its value."""
    return lambda value, beside: Means(why=why)


def refused(why: str) -> Meant:
    """Refused, whatever its value."""
    return lambda value, beside: why


def only_off(why: str) -> Meant:
    """A switch, a list, or a section with `enabled`, that has to be off."""

    def meaning(value: Any, beside: Raw) -> Meaning:
        on = value.get("enabled", bool(value)) if isinstance(value, Mapping) else value
        empty = on in _OFF if isinstance(on, str | int | float | None) else not on
        return Means(why="it is off") if empty else why

    return meaning


def only(usual: Any, why: str, note: str = "the same here") -> Meant:
    """A setting of which one value is known, or nothing."""
    return lambda value, beside: Means(why=note) if value == usual or not value else why


def switch(on: Raw, off: Raw | None = None, why: str = "") -> Meant:
    """true or false, and what each of them means."""

    def meaning(value: Any, beside: Raw) -> Meaning:
        if not isinstance(value, bool):
            return f"{value!r:.100} instead of true or false"
        settings = on if value else off or {}
        return Means(settings, why if settings or (value and why) else "it is off")

    return meaning


def default(usual: Any) -> Meant:
    """A value that is the default here; any other is ours."""
    return lambda value, beside: Means(why="the default here") if value == usual else None


def flag(why: str) -> Meant:
    """A switch that changes nothing here, either way."""
    return lambda value, beside: Means(why=why) if isinstance(value, bool) else None


def among(known: Mapping[str, Raw], otherwise: str = "", note: str = "the same here") -> Meant:
    """One of these words; any other cannot be."""
    otherwise = otherwise or f"instead of {' or '.join([', '.join([*known][:-1]), [*known][-1]])}"

    def meaning(value: Any, beside: Raw) -> Meaning:
        if not isinstance(value, str) or value not in known:
            return f"{value!r:.100}{'' if otherwise.startswith('instead') else ':'} {otherwise}"
        return Means(known[value], "" if known[value] else note)

    return meaning


def rows(make: Callable[[str], Meant], names: Mapping[str, str]) -> dict[str, Meant]:
    """Keys of one kind; `names` has them, separated by spaces, under the reason that applies."""
    return {name: make(why) for why, words in names.items() for name in words.split()}


def each(names: str | Iterable[str], meant: Meant) -> dict[str, Meant]:
    """Keys that mean the same."""
    return dict.fromkeys(names.split() if isinstance(names, str) else names, meant)


def read_datasets(value: Any, beside: Raw) -> Means | str:
    """The datasets of a config; a text says why they cannot be."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not isinstance(names, list) or not names:
        return f"{value!r:.100} instead of a dataset, or a list of them"
    if all(isinstance(name, str) and not _is_place(name) for name in names):
        return _registered_datasets(names, beside)
    items: list[Raw] = []
    why: list[str] = []
    for one in names:
        meaning = _counted_dataset(one) if isinstance(one, str) else _described_dataset(one)
        if isinstance(meaning, str):
            return meaning
        items.append(meaning.settings)
        why += [meaning.why] if meaning.why else []
    note = "; ".join(dict.fromkeys(why))
    return Means(items[0], note) if len(items) == 1 else Means(why=note, mixture=tuple(items))


def _is_place(name: str) -> bool:
    """Is it a file, a folder or a hub dataset? Single words are names in a registry."""
    return any(mark in name for mark in "/.#")


def _registered_datasets(names: list[str], beside: Raw) -> Means | str:
    """Names in LLaMA-Factory's dataset_info.json."""
    folder = beside.get("dataset_dir", "data")
    if not isinstance(folder, str) or folder == "ONLINE":
        return "dataset names are looked up in the dataset_info.json of dataset_dir"
    return Means({"dataset_path": os.path.join(folder, "dataset_info.json"), "sources": names})


def _counted_dataset(name: str) -> Means | str:
    """ms-swift's `path`, `path:subset` and `path#500`."""
    if os.path.lexists(name):
        return Means({"dataset_path": name})
    match = _COUNTED.fullmatch(name)
    if match is None or name.startswith("MS::"):
        return f"{name!r:.100} is not a file, folder or hub dataset"
    path, subset, count = match.groups()
    item: dict[str, object] = {"dataset_path": path} | ({"subset": subset} if subset else {})
    if count is None:
        return Means(item)
    return Means({**item, "max_samples": int(count)}, "a number of samples is drawn once, at random with the seed")


def _described_dataset(given: Any) -> Means | str:
    """An item of axolotl or lmms-engine."""
    if not isinstance(given, Mapping) or not (given.get("path") or given.get("json_path")):
        return "a dataset without a path"
    item: dict[str, Any] = {}
    why: list[str] = []
    for name, value in given.items():
        if value is None or value == "":
            continue
        meaning = _ITEM[name](value, given) if name in _ITEM else _COLUMNS
        if not isinstance(meaning, Means):
            return f"{name}: {meaning}"
        item |= meaning.settings
        why += [meaning.why] if meaning.why else []
    return Means(item, "; ".join(why))


def _path(value: Any, given: Raw) -> Meaning:
    """axolotl names files as data_files, of a folder or of a format."""
    files = given.get("data_files")
    if not files:
        return Means({"dataset_path": value})
    if isinstance(files, list) and len(files) == 1:
        files = files[0]
    if not isinstance(files, str):
        return "list each of data_files as a dataset"
    inside = os.path.isdir(str(value)) or "/" in str(value)
    return Means({"dataset_path": os.path.join(str(value), files) if inside else files})


def _type(value: Any, given: Raw) -> Meaning:
    if value == "completion":
        field = given.get("field") or "text"
        named = {} if field == "text" else {"columns": {field: "text"}}
        return Means({"dataset_type": "fineweb_edu", **named})
    if value in ("alpaca", "alpaca_chat.load_qa", "alpaca_w_system"):
        return Means(why=f"type {value}: chats use the model's chat template, without ### Instruction")
    if value in ("chat_template", "sharegpt", "chatml", "chat", "conversation"):
        return Means()
    return f"{value!r:.60}: {_COLUMNS}"


def _messages(value: Any, given: Raw) -> Meaning:
    usual = value in ("messages", "conversations", "conversation")
    return Means({} if usual else {"columns": {value: "messages"}})


def _names(known: Mapping[str, tuple[str, ...]]) -> Meant:
    """Names that are recognised anyway, one or a list for each of ours."""

    def meaning(value: Any, given: Raw) -> Meaning:
        pairs = value.items() if isinstance(value, Mapping) else [("", value)]
        fits = all(
            set(names if isinstance(names, list) else [names]) <= {*known.get(ours, ())} for ours, names in pairs
        )
        return Means() if fits else f"{value!r:.100}: {_COLUMNS}"

    return meaning


def _among(words: str, why: str) -> Meant:
    return among({word: {} for word in words.split()}, why, note="")


_ITEM: Mapping[str, Meant] = {
    "path": _path,
    "json_path": _path,
    "data_files": nothing(""),  # with the path
    "name": to("subset"),
    "split": to("split"),
    "data_folder": to("media_root"),
    "type": _type,
    "ds_type": _among("json parquet arrow csv text", "an unknown format"),
    "data_type": _among("json jsonl csv arrow parquet hf_dataset", "an unknown kind of data"),
    "field": nothing(""),  # with the type
    "field_messages": _messages,
    "message_property_mappings": _names(_PROPERTIES),
    "message_field_role": _among("role from", _COLUMNS),
    "message_field_content": _among("content value", _COLUMNS),
    "roles": _names(_ROLES),
    "roles_to_train": only(["assistant"], "loss is on assistant answers only, or on all: data.loss_on", ""),
    "train_on_eos": _among("turn all", "the EOS token of every trained answer carries loss"),
    "chat_template": only("tokenizer_default", "data.chat_template takes a file", ""),
    "sampling_strategy": only("all", "in a mixture, repeats takes a share of a source", ""),
    "trust_remote_code": only(False, "dataset code is never run", ""),
}
