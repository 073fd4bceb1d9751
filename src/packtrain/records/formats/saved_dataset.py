"""The layout of a folder made by `datasets.save_to_disk`: its splits, its state file, its arrow files."""

from __future__ import annotations

import json
import os

from packtrain.core.errors import ConfigError, RecordError
from packtrain.records.formats.compression import unreadable
from packtrain.records.formats.source_files import walk
from packtrain.records.formats.splits import check_split
from packtrain.records.source import SourceSpec

BAD_FOLDER = "saved dataset cannot be read"
STATE_FILE, INFO_FILE, SPLITS_FILE = "state.json", "dataset_info.json", "dataset_dict.json"


def is_saved_dataset(path: str) -> bool:
    """Was this folder made by `save_to_disk`?"""
    has = [os.path.isfile(os.path.join(path, name)) for name in (STATE_FILE, INFO_FILE, SPLITS_FILE)]
    return (has[0] and has[1]) or has[2]


def dataset_files(spec: SourceSpec) -> list[str]:
    """The local files that a source consists of; none for a dataset on the hub."""
    if not os.path.isdir(spec.path):
        return [spec.path] if os.path.exists(spec.path) else []
    return sorted(walk(split_folder(spec) if is_saved_dataset(spec.path) else spec.path))


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
