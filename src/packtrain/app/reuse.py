"""Finding a cost table or a plan that was made before: in the cache, or in a folder that a user named."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from packtrain.core.artifacts import atomic_path
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import PacktrainError

_ELSEWHERE = "elsewhere"
_DATASET_NAME = 40  # characters
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReusableFolder:
    """Where the result for one set of settings is, or will be."""

    cached: Path  # its folder in the cache
    elsewhere: Path | None  # a user's folder that held it when it was made
    note: Path  # a file of the cache that remembers such a folder

    def open(self, use: Callable[[Path, bool], T]) -> T:
        """`use` gets the folder, and whether it may make the result there if it is missing."""
        if self.elsewhere is not None and not self.cached.exists():
            with suppress(PacktrainError, OSError):  # it holds another result by now, or is damaged
                return use(self.elsewhere, False)
        return use(self.cached, True)

    def remember(self, folder: Path) -> None:
        """The result was made in this folder; later commands look there."""
        if folder == self.cached:
            return
        with suppress(OSError):  # a cache that may only be read
            self.note.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(self.note) as path:
                path.write_text(json.dumps({"folder": str(folder.absolute())}), encoding="utf-8")


def reusable_folder(kind: str, name: str, root: Path, *, dataset: object, mode: str = "") -> ReusableFolder:
    """Where the result with this fingerprint is."""
    note = cache_dir() / _ELSEWHERE / f"{kind}-{name}.json"
    cached = cache_folder(root, kind, name, dataset=dataset, mode=mode)
    return ReusableFolder(cached=cached, elsewhere=_folder_in(note), note=note)


def cache_folder(root: Path, kind: str, name: str, *, dataset: object, mode: str = "") -> Path:
    """The folder of a fingerprint in the cache; a new one is named after dataset and mode as well, for readers."""
    existing = (path for path in sorted((root / kind).glob(f"*{name}")) if not path.name.startswith("."))
    words = re.sub(r"[^\w.]+", "-", Path(str(dataset or "")).stem).strip("-.")[:_DATASET_NAME]
    return next(existing, root / kind / "-".join(part for part in (words, mode, name) if part))


def user_folders(kind: str, name: str = "*") -> Iterator[Path]:
    """Folders outside the cache that hold results, as far as they still exist."""
    for note in sorted((cache_dir() / _ELSEWHERE).glob(f"{kind}-{name}.json")):
        if (folder := _folder_in(note)) is not None:
            yield folder


def _folder_in(note: Path) -> Path | None:
    try:
        folder = Path(json.loads(note.read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if folder.is_dir() else None
