"""The splits of a dataset: as its card says, as `save_to_disk` lays them out, or by names as the Hugging Face hub does.

The card is the YAML at the head of README.md:

configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: [a.jsonl, more/*.jsonl]}
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from packtrain.core.errors import ConfigError, RecordError, nearest
from packtrain.records.shards.address import unreadable
from packtrain.records.source import SourceSpec
from packtrain.records.yaml_text import load_yaml

_HEAD = re.compile(r"---\s*\n(.*?)\n---", re.DOTALL)
_LONGEST = 1 << 20  # characters that are looked at
_WAY = "select files by a pattern, or in a YAML mixture"


def splits_of_card(folder: str, subset: str | None, names: Sequence[str]) -> dict[str, str] | None:
    """The split of each of these files that the card gives one, of one subset or of all; None without such a card."""
    subsets = dict(_subsets(_content(os.path.join(folder, "README.md"))))
    if subset is not None and subset not in subsets:
        expected = "one of " + ", ".join(subsets) if subsets else "none: no README.md in the folder has `configs`"
        raise ConfigError(f"subset of {folder}", got=subset, expected=expected, fix=nearest(subset, subsets) or _WAY)
    split_of_name: dict[str, str] = {}
    for subset_splits in [subset] if subset is not None else subsets:
        for split, pattern in subsets[subset_splits]:
            for name in names:
                if _fits(pattern.split("/"), name.split("/")) and split_of_name.setdefault(name, split) != split:
                    got = f"{name} in the splits {split_of_name[name]} and {split}"
                    raise ConfigError(f"README.md of {folder}", got=got, expected="one split per file", fix=_WAY)
    if subset is not None and not split_of_name:
        raise ConfigError(
            f"subset of {folder}", got=f"{subset}, which matches no file", expected="a subset with files", fix=_WAY
        )
    return split_of_name or None


def _content(card: str) -> Any:
    try:
        with open(card, encoding="utf-8") as file:
            head = _HEAD.match(file.read(_LONGEST))
        return load_yaml(head[1]) if head else None
    except (OSError, ValueError):  # a text about the data, and not its description
        return None


def _subsets(card: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Name, and splits with their patterns, of each subset."""
    configs = card.get("configs") if isinstance(card, Mapping) else None
    for config in configs if isinstance(configs, list) else ():
        files = config.get("data_files") if isinstance(config, Mapping) else None
        listed = files if isinstance(files, list) else [files]
        items = [one if isinstance(one, Mapping) else {"path": one} for one in listed]
        pairs = [(str(one.get("split", "train")), path) for one in items for path in _texts(one.get("path"))]
        if pairs:
            yield str(config.get("config_name", "default")), pairs


def _fits(pattern: Sequence[str], name: Sequence[str]) -> bool:
    """Does a name fit a pattern, folder by folder? `**` matches any number of folders.

    >>> [_fits(pattern.split("/"), ["data", "en", "a.jsonl"]) for pattern in ("data/*/*.jsonl", "**/a.*", "data/*")]
    [True, True, False]
    """
    if not pattern:
        return not name
    if pattern[0] == "**":
        return _fits(pattern[1:], name) or (bool(name) and _fits(pattern, name[1:]))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _fits(pattern[1:], name[1:])


def _texts(item: Any) -> list[str]:
    patterns = [one for one in (item if isinstance(item, list) else [item]) if isinstance(one, str)]
    return [re.sub(r"(\*\*/)+", "**/", one.removeprefix("./")) for one in patterns if len(one) < 1000]


BAD_FOLDER = "saved dataset cannot be read"
STATE_FILE, INFO_FILE, SPLITS_FILE = "state.json", "dataset_info.json", "dataset_dict.json"


def is_saved_dataset(path: str) -> bool:
    """Was this folder made by `save_to_disk`?"""
    has = [os.path.isfile(os.path.join(path, name)) for name in (STATE_FILE, INFO_FILE, SPLITS_FILE)]
    return (has[0] and has[1]) or has[2]


def split_folder(spec: SourceSpec) -> str:
    """The folder of one split of a saved dataset; a dataset saved without splits is its own folder."""
    manifest = os.path.join(spec.path, SPLITS_FILE)
    if not os.path.isfile(manifest):
        return spec.path
    try:
        with open(manifest, encoding="utf-8") as file:
            splits = [str(split) for split in json.load(file)["splits"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        fix = "save the dataset again with save_to_disk"
        raise ConfigError(manifest, got=repr(error), expected='{"splits": [...]}', fix=fix) from error
    check_split(spec, splits)
    return os.path.join(spec.path, spec.split)


def saved_files(folder: str) -> list[str]:
    """The arrow files of a saved dataset in their order, as its state file lists them."""
    try:
        with open(os.path.join(folder, STATE_FILE), encoding="utf-8") as file:
            state = json.load(file)
        names = [item["filename"] for item in state["_data_files"]]
        reordered = bool(state.get("_indices_data_files") or state.get("_indices_files"))
    except OSError as error:
        raise unreadable(error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RecordError("read", BAD_FOLDER, f"{STATE_FILE}: {error!r}") from error
    if reordered:  # a list of row numbers of an old version, by which some rows may be left out
        raise RecordError("read", BAD_FOLDER, "it has an index of rows: call flatten_indices() and save it again")
    if not all(isinstance(name, str) and name and os.path.basename(name) == name for name in names):
        raise RecordError("read", BAD_FOLDER, f"{STATE_FILE} lists files outside the folder")
    return [os.path.join(folder, name) for name in names]


DEFAULT = "train"
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d+-of-\d+\b.*")
_LETTERS = re.compile(r"[^\W\d_]+")


def split_in_name(name: str) -> str | None:
    """The split that a file's name, relative to its dataset, says; the innermost folder that says one decides.

    >>> [split_in_name(name) for name in ("data/train-00000-of-00002.parquet", "val2017/a.tar", "latest.jsonl")]
    ['train', 'validation', None]
    >>> split_in_name("data/test_sft-00000-of-00001.parquet")
    'test_sft'
    """
    for part in reversed(name.split("/")):
        shard = _SHARD.fullmatch(part)
        words = _words(shard.group(1) if shard else part)
        if len(words) == 1:
            return shard.group(1) if shard and shard.group(1).lower() not in _WORDS else words.pop()
    return None


def by_split(spec: SourceSpec, names: Sequence[str]) -> dict[str | None, list[str]]:
    """The names of each split, by the folder's card or by themselves, and those that belong to none."""
    card = splits_of_card(spec.path, spec.subset, names)
    names_by_split: dict[str | None, list[str]] = {}
    for name in names if card is None else card:
        names_by_split.setdefault(split_in_name(name) if card is None else card[name], []).append(name)
    return names_by_split


def choose_split(spec: SourceSpec, names: Mapping[str | None, Sequence[str]]) -> str | None:
    """The split that is asked for; None where a folder has none. What is not there, or unclear, is refused."""
    splits = sorted(split for split in names if split is not None)
    if not splits:
        if spec.split != DEFAULT:
            got, expected = f"{spec.split}, and no file or folder is named after a split", "such as train/, test.jsonl"
            raise ConfigError(f"split of {spec.path}", got=got, expected=expected, fix="leave it out")
        return None
    if None in names:
        others = ", ".join(names[None][:3]) + (", ..." if len(names[None]) > 3 else "")
        raise ConfigError(
            f"split of {spec.path}",
            got=f"files of {', '.join(splits)} and others that belong to no split: {others}",
            expected="a folder in which all data files belong to a split, or none",
            fix="select files by a pattern, such as folder/**/*.parquet for all, or in a YAML mixture",
        )
    if spec.split in splits:
        return spec.split
    matches = [split for split in splits if _words(split) == {_WORDS.get(spec.split.lower(), "")}]
    if len(matches) == 1:
        return matches[0]
    check_split(spec, splits)
    return None


def check_split(spec: SourceSpec, splits: Sequence[str]) -> None:
    """Refuse a split that is not there, and name those that are."""
    if spec.split not in splits or os.path.basename(spec.split) != spec.split:
        raise ConfigError(
            f"split of {spec.path}",
            got=spec.split,
            expected="one of " + ", ".join(splits),
            fix=nearest(spec.split, splits) or "set `split` to one of them",
        )


def _words(name: str) -> set[str]:
    """The splits whose words a name has."""
    return {_WORDS[word] for word in _LETTERS.findall(name.lower()) if word in _WORDS}
