"""Fingerprints of inputs, and the names of what changed between two of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def digest(value: Any) -> str:
    """A short stable hash of any JSON-like value.

    >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    True
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]


def differences(old: Any, new: Any, at: str = "") -> list[str]:
    """The paths at which two JSON-like values differ, each with both values.

    >>> differences({"a": {"b": 1}}, {"a": {"b": 2}})
    ['a.b: 1 -> 2']
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        changes = []
        for key in sorted({*old, *new}, key=str):
            missing = object()
            before, after = old.get(key, missing), new.get(key, missing)
            where = f"{at}.{key}" if at else str(key)
            if before is missing:
                changes.append(f"{where}: new")
            elif after is missing:
                changes.append(f"{where}: gone")
            else:
                changes.extend(differences(before, after, where))
        return changes
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [
            change for i, pair in enumerate(zip(old, new, strict=True)) for change in differences(*pair, f"{at}[{i}]")
        ]
    return [] if old == new else [f"{at}: {_short(old)} -> {_short(new)}"]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def file_state(path: str | Path, content: bool = False) -> dict[str, object]:
    """Size and modification time of a file, or its content hash on request."""
    stat = os.stat(path)
    if not content:
        return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    sha = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(1 << 20):
            sha.update(block)
    return {"size": stat.st_size, "sha256": sha.hexdigest()}


def files_state(files: Mapping[str, str | Path], content: bool = False) -> dict[str, object]:
    """The state of several files by what they are called; a file that is not there is part of the state too."""
    return {
        name: file_state(path, content) if os.path.isfile(path) else {"missing": True} for name, path in files.items()
    }
