"""Checksums of a checkpoint's files: ranks that see the same files share the work of reading them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from packtrain.core.checksums import Checking, FileSum
from packtrain.core.errors import PacktrainError, in_one_line
from packtrain.training.agreement import own_rank, said_by_all

_Seen = dict[str, tuple[int, int, int]]  # size, inode and time of files: on separate disks they are never all the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """The files of a folder as they are, and what kept ranks from reading others."""

    files: Mapping[str, FileSum] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    def require(self) -> None:
        """All of them could be read."""
        if self.faults:
            raise OSError("; ".join(self.faults))


def shared_sums(folder: Path, report: Callable[[Checking], None] = lambda _: None) -> Sums:
    """Of every file below a folder. All ranks call it; what one of them cannot read is said by all that see it."""
    fault = None
    seen: _Seen = {}
    try:
        seen = _files(folder)
    except OSError as error:
        fault = in_one_line(error)
    others = said_by_all(seen)
    same = [rank for rank, one in enumerate(others) if one == seen]
    mine: dict[str, FileSum] = {}
    if fault is None:
        own = _share({name: state[0] for name, state in seen.items()}, len(same))[same.index(own_rank())]
        fault = _read(folder, own, sum(seen[name][0] for name in own), mine, report)
    said = said_by_all((mine, fault))
    return Sums(
        files={name: said[rank][0][name] for rank in same for name in sorted(said[rank][0])},
        faults=tuple(words for rank in same if (words := said[rank][1]) is not None),
    )


def _read(
    folder: Path, names: Iterable[str], total: int, into: dict[str, FileSum], report: Callable[[Checking], None]
) -> str | None:
    """Add the checksums of some files; what went wrong, if anything did: ranks that wait have to hear of it."""
    done = 0

    def more(count: int) -> None:
        nonlocal done
        done += count
        report(Checking(path=folder, bytes=done, total=total))

    try:
        for name in names:
            into[name] = FileSum.of(folder / name, more)
    except (OSError, PacktrainError) as error:
        return in_one_line(error)
    return None


def _files(folder: Path) -> _Seen:
    found: _Seen = {}
    for at, _, names in os.walk(folder):
        for name in names:
            path = Path(at) / name
            state = path.lstat()
            found[path.relative_to(folder).as_posix()] = state.st_size, state.st_ino, state.st_mtime_ns
    return found


def _share(sizes: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Names by rank, about as many bytes for each.

    >>> _share({"a": 9, "b": 5, "c": 4, "d": 1}, 2)
    [['a', 'd'], ['b', 'c']]
    """
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        shares[least].append(name)
        loads[least] += sizes[name]
    return shares
