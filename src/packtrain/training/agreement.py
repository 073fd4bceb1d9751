"""Work that all ranks do together: small sums, faults of one rank that are faults of all, checksums of files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from packtrain.core.checksums import Checking, FileSum
from packtrain.core.errors import ArtifactError, PacktrainError, in_one_line

Value = TypeVar("Value")


def world_size() -> int:
    """Ranks of this run; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if world_size() > 1 else 0


def sum_over_ranks(values: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor:
    """These numbers added up over all ranks, as one float64 vector on the device; the host waits for nothing."""
    together = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True) for value in values]
    )
    if world_size() > 1:
        dist.all_reduce(together)
    return together


def any_rank(mine: Callable[[], bool], device: torch.device) -> Callable[[], bool]:
    """A question that all ranks ask again and again, in step: has any of them answered yes?

    With several ranks the answer is that of the round before, whose sum is there by now, so ranks hardly ever wait.
    """
    if world_size() == 1:
        return mine
    before: list[torch.Tensor] = []

    def ask() -> bool:
        before.append(sum_over_ranks([float(mine())], device))
        return len(before) > 1 and bool(before.pop(0).item())

    return ask


def gather_values(mine: Value) -> list[Value]:
    """The values of all ranks, in their order: the same list on all of them. Plain values: they are sent as pickles."""
    values = [mine] * world_size()
    if len(values) > 1:
        dist.all_gather_object(values, mine)
    return values


def gather_faults(fault: str | None) -> list[str]:
    """The faults of all ranks, without those that have none: the same list on all of them."""
    if world_size() == 1:
        return [] if fault is None else [fault]
    return [f"rank {rank}: {words}" for rank, words in enumerate(gather_values(fault)) if words is not None]


def fail_together(read: Callable[[], None], place: str, expected: str) -> None:
    """Every rank does it, and a fault that one of them finds is one of all."""
    fault: ArtifactError | None = None
    try:
        read()
    except ArtifactError as error:
        fault = error
    faults = gather_faults(None if fault is None else " ".join(str(fault).split()))
    if fault is not None:
        raise fault
    if faults:
        raise ArtifactError(place, got="; ".join(faults), expected=expected)


# ---- checksums of files: ranks that see the same ones share the work of reading them

_FileStates = dict[
    str, tuple[int, int, int]
]  # size, inode and time of files: on separate disks they are never all the same


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
    """Checksums of every file below a folder. All ranks call it; a file that one cannot read is reported by all."""
    fault = None
    states: _FileStates = {}
    try:
        states = _files(folder)
    except OSError as error:
        fault = in_one_line(error)
    same = [rank for rank, others in enumerate(gather_values(states)) if others == states]
    mine: dict[str, FileSum] = {}
    if fault is None:
        own = _share({name: state[0] for name, state in states.items()}, len(same))[same.index(own_rank())]
        fault = _read(folder, own, sum(states[name][0] for name in own), mine, report)
    sums = gather_values((mine, fault))
    return Sums(
        files={name: sums[rank][0][name] for rank in same for name in sorted(sums[rank][0])},
        faults=tuple(words for rank in same if (words := sums[rank][1]) is not None),
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


def _files(folder: Path) -> _FileStates:
    states: _FileStates = {}
    for at, _, names in os.walk(folder):
        for name in names:
            path = Path(at) / name
            state = path.lstat()
            states[path.relative_to(folder).as_posix()] = state.st_size, state.st_ino, state.st_mtime_ns
    return states


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
