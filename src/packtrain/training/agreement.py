"""What ranks decide together: small sums, and faults of one rank that are faults of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from packtrain.core.errors import ArtifactError

Said = TypeVar("Said")


def world_size() -> int:
    """Ranks of this run; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if world_size() > 1 else 0


def summed(values: Sequence[torch.Tensor | float], device: torch.device) -> torch.Tensor:
    """These numbers added up over all ranks, as one float64 vector on the device; the host waits for nothing."""
    together = torch.stack(
        [torch.as_tensor(value, dtype=torch.float64).to(device, non_blocking=True) for value in values]
    )
    if world_size() > 1:
        dist.all_reduce(together)
    return together


def votes_of_all(mine: Callable[[], bool], device: torch.device) -> Callable[[], bool]:
    """A question that all ranks ask again and again, in step: has any of them said yes?

    With several ranks the answer is that of the round before, whose sum is there by now, so that hardly anyone waits.
    """
    if world_size() == 1:
        return mine
    before: list[torch.Tensor] = []

    def ask() -> bool:
        before.append(summed([float(mine())], device))
        return len(before) > 1 and bool(before.pop(0).item())

    return ask


def said_by_all(mine: Said) -> list[Said]:
    """What each rank says, by rank: the same list on all of them. Plain values, since they are sent as pickles."""
    if world_size() == 1:
        return [mine]
    said: list[Said] = [mine] * world_size()
    dist.all_gather_object(said, mine)
    return said


def faults_of_all(fault: str | None) -> list[str]:
    """What every rank has to say, those without a fault left out: the same list on all of them."""
    if world_size() == 1:
        return [] if fault is None else [fault]
    return [f"rank {rank}: {words}" for rank, words in enumerate(said_by_all(fault)) if words is not None]


def on_all(read: Callable[[], None], place: str, expected: str) -> None:
    """Every rank does it, and a fault that one of them finds is one of all."""
    fault: ArtifactError | None = None
    try:
        read()
    except ArtifactError as error:
        fault = error
    said = faults_of_all(None if fault is None else " ".join(str(fault).split()))
    if fault is not None:
        raise fault
    if said:
        raise ArtifactError(place, got="; ".join(said), expected=expected)
