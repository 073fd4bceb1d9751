"""The subsets and splits of a folder as its dataset card says: the YAML at the head of README.md, as on the hub.

configs:
- config_name: default
  data_files:
  - {split: train, path: data/train-*}
  - {split: test, path: [a.jsonl, more/*.jsonl]}
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from packtrain.core.errors import ConfigError, nearest
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
    found: dict[str, str] = {}
    for chosen in [subset] if subset is not None else subsets:
        for split, pattern in subsets[chosen]:
            for name in names:
                if _fits(pattern.split("/"), name.split("/")) and found.setdefault(name, split) != split:
                    got = f"{name} in the splits {found[name]} and {split}"
                    raise ConfigError(f"README.md of {folder}", got=got, expected="one split per file", fix=_WAY)
    if subset is not None and not found:
        raise ConfigError(f"subset of {folder}", got=f"{subset}, which has no files", expected="its files")
    return found or None


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
    """Does a name fit a pattern, folder by folder? `**` stands for any number of folders.

    >>> [_fits(pattern.split("/"), ["data", "en", "a.jsonl"]) for pattern in ("data/*/*.jsonl", "**/a.*", "data/*")]
    [True, True, False]
    """
    if not pattern:
        return not name
    if pattern[0] == "**":
        return _fits(pattern[1:], name) or (bool(name) and _fits(pattern, name[1:]))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _fits(pattern[1:], name[1:])


def _texts(item: Any) -> list[str]:
    given = [one for one in (item if isinstance(item, list) else [item]) if isinstance(one, str)]
    return [re.sub(r"(\*\*/)+", "**/", one.removeprefix("./")) for one in given if len(one) < 1000]
