"""A model's name -> its folder: a tiny model made on demand, a local folder, or a hub model without its weights."""

from __future__ import annotations

import re
from pathlib import Path

from packtrain.core.errors import ConfigError, in_one_line, nearest
from packtrain.families.registry import tiny_families
from packtrain.families.tiny import cached

PREFIX = "tiny:"
# What measuring and packing read of a model on the hub: everything but its weights.
_HUB_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# How folders that are made for names are called.
_TINY_FOLDER, _HUB_FOLDER = re.compile(r"tiny-(\w+)-[0-9a-f]{12}"), re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def resolve_model(name_or_path: str, cache_dir: Path) -> Path:
    """The folder of a model: a tiny one made on demand, a local folder, or a hub model without its weights."""
    if name_or_path.startswith(PREFIX):
        return cached(name_or_path.removeprefix(PREFIX), cache_dir)
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if _HUB_NAME.fullmatch(name_or_path):
        return _download(name_or_path)
    raise ConfigError(
        f"model {name_or_path!r}",
        got="a file" if folder.exists() else _no_folder(folder),
        expected=f"a model folder, a hub name like org/name, or {PREFIX}FAMILY",
        fix=_meant(name_or_path) or _beside(folder) or "check the path",
    )


def _meant(name: str) -> str:
    return f"did you mean {PREFIX}{name}?" if name in tiny_families() else ""


def known_as(folder: str | Path) -> str:
    """The name that a folder of `resolve_model` has for users: such folders may have no weights. Other folders stay."""
    path = Path(folder)
    tiny = _TINY_FOLDER.fullmatch(path.name)
    if tiny is not None and tiny[1] in tiny_families():
        return f"{PREFIX}{tiny[1]}"
    hub = _HUB_FOLDER.fullmatch(path.parent.parent.name) if path.parent.name == "snapshots" else None
    return f"{hub[1]}/{hub[2]}" if hub is not None else str(folder)


def _no_folder(folder: Path) -> str:
    return "no folder of that name" + ("" if folder.is_absolute() else f" in {Path.cwd()}")


def _beside(folder: Path) -> str:
    """A folder of nearly this name where it was looked for."""
    parent = folder.parent
    names = sorted(path.name for path in parent.iterdir() if path.is_dir()) if parent.is_dir() else []
    return nearest(folder.name, names)


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises its own, its HTTP library's and the system's errors
        folder = Path(name)
        # Where the first part of the name is a folder here, a path was meant, and the hub has nothing to do with it.
        local = folder.parent.is_dir()
        raise ConfigError(
            f"model {name!r}",
            got=_no_folder(folder) + ("" if local else f", and not on the hub: {in_one_line(error)}"),
            expected="a model folder, or a model on the Hugging Face hub that can be reached or is in its local cache",
            fix=_beside(folder)
            or f"use a local model folder, a tiny model ({PREFIX}qwen3_vl), or check name, network and access",
        ) from error
