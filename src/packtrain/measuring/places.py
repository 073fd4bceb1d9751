"""Where a measurement found model and data: kept so that they can be read again, never compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePlace:
    """Where one source is."""

    path: str
    media_root: str
    root: str | None = None  # what names in it are relative to; None for what is remote or on the hub
    in_files: bool = True  # its rows stand in files of ours to read

    def name_of(self, file: str) -> str:
        """A file of it as it is called wherever the source lies."""
        return os.path.relpath(file, self.root) if self.root is not None and self.in_files else file

    def file(self, name: str) -> str:
        """The file of such a name."""
        moves = self.root is not None and self.in_files
        return os.path.normpath(os.path.join(str(self.root), name)) if moves else name


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Folders of model and tokenizer, the file of the user's function, every source in the order of the request."""

    model: str = ""
    tokenizer: str | None = None
    formatting_func: str | None = None
    sources: tuple[SourcePlace, ...] = ()

    def plain(self) -> dict[str, Any]:
        """For a JSON file."""
        return {**asdict(self), "sources": [asdict(source) for source in self.sources]}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Places:
        """What `plain` tells of."""
        return cls(**{**plain, "sources": tuple(SourcePlace(**source) for source in plain.get("sources", ()))})
