"""Where something was made: in the cache by its name, or in a folder of the user's that the cache remembers."""

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
_WORDS = 40  # characters of the name of a dataset
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One thing that is made of the same settings always: a cost table, or a plan."""

    usual: Path  # where it is made in the cache
    elsewhere: Path | None  # a folder of the user's that held it
    note: Path  # of the cache, that names such a folder

    def opened(self, use: Callable[[Path, bool], T]) -> T:
        """What is there, or is made in the cache: `use` gets the folder, and whether it may make it again."""
        if self.elsewhere is not None and not self.usual.exists():
            with suppress(PacktrainError, OSError):  # it is another one by now, or damaged
                return use(self.elsewhere, False)
        return use(self.usual, True)

    def remember(self, folder: Path) -> None:
        """It was made in this folder: the next who needs it looks there."""
        if folder == self.usual:
            return
        with suppress(OSError):  # a cache that may only be read
            self.note.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(self.note) as path:
                path.write_text(json.dumps({"folder": str(folder.absolute())}), encoding="utf-8")


def in_cache(root: Path, kind: str, name: str, *, of: object, mode: str = "") -> Path:
    """The folder of a name in the cache; a new one also says of which data it is, and in which mode, for who looks."""
    known = (path for path in sorted((root / kind).glob(f"*{name}")) if not path.name.startswith("."))
    words = re.sub(r"[^\w.]+", "-", Path(str(of or "")).stem).strip("-.")[:_WORDS]
    return next(known, root / kind / "-".join(part for part in (words, mode, name) if part))


def made_of(kind: str, name: str, root: Path, *, of: object, mode: str = "") -> Made:
    """What is known by this name."""
    note = cache_dir() / _ELSEWHERE / f"{kind}-{name}.json"
    return Made(usual=in_cache(root, kind, name, of=of, mode=mode), elsewhere=_named_in(note), note=note)


def of_users(kind: str, name: str = "*") -> Iterator[Path]:
    """Folders that users named for what was made, as far as they are there."""
    for note in sorted((cache_dir() / _ELSEWHERE).glob(f"{kind}-{name}.json")):
        if (folder := _named_in(note)) is not None:
            yield folder


def _named_in(note: Path) -> Path | None:
    try:
        there = Path(json.loads(note.read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return there if there.is_dir() else None
