"""What a reader of single entries needs from a data file: its decompressed bytes, at any place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol


class Plain(Protocol):
    """The decompressed bytes of one data file."""

    path: str | None  # a local file that holds just these bytes; None where there is none

    def read_at(self, position: int, length: int) -> bytes:
        """Up to `length` bytes; fewer only where the file ends. OSError where they cannot be had."""
        ...


class Files(Protocol):
    """Where data files are read from. One object for each process; it must pickle."""

    def plain(self, file: str) -> AbstractContextManager[Plain]:
        """One data file; it stays readable until the block ends."""
        ...

    def renew(self, file: str) -> bool:
        """Forget what was copied or made from a file, so that it is fetched again; False where nothing was."""
        ...
