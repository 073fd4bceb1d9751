"""The splits of a folder of data files, by the names of files and folders, as the Hugging Face hub names them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from packtrain.core.errors import ConfigError, nearest
from packtrain.records.formats.card import splits_of_card
from packtrain.records.source import SourceSpec

DEFAULT = "train"
_WORDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d+-of-\d+\b.*")
_LETTERS = re.compile(r"[^\W\d_]+")


def split_of(name: str) -> str | None:
    """The split that a file's name, relative to its dataset, says; the innermost folder that says one decides.

    >>> [split_of(name) for name in ("data/train-00000-of-00002.parquet", "val2017/a.tar", "latest.jsonl")]
    ['train', 'validation', None]
    >>> split_of("data/test_sft-00000-of-00001.parquet")
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
    found: dict[str | None, list[str]] = {}
    for name in names if card is None else card:
        found.setdefault(split_of(name) if card is None else card[name], []).append(name)
    return found


def chosen_split(spec: SourceSpec, found: Mapping[str | None, Sequence[str]]) -> str | None:
    """The split that is asked for; None where a folder has none. What is not there, or unclear, is refused."""
    splits = sorted(split for split in found if split is not None)
    if not splits:
        if spec.split != DEFAULT:
            got, expected = f"{spec.split}, and no file or folder is named after a split", "such as train/, test.jsonl"
            raise ConfigError(f"split of {spec.path}", got=got, expected=expected, fix="leave it out")
        return None
    if None in found:
        others = ", ".join(found[None][:3]) + (", ..." if len(found[None]) > 3 else "")
        raise ConfigError(
            f"split of {spec.path}",
            got=f"files of {', '.join(splits)} and others that belong to no split: {others}",
            expected="a folder in which all data files belong to a split, or none",
            fix="select files by a pattern, such as folder/**/*.parquet for all, or in a YAML mixture",
        )
    if spec.split in splits:
        return spec.split
    meant = [split for split in splits if _words(split) == {_WORDS.get(spec.split.lower(), "")}]
    if len(meant) == 1:
        return meant[0]
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
