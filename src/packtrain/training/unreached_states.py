"""Sharded checkpoints of a run that had not reached all parameters yet: those have no state in the optimizer.

Torch's reader first makes states of all parameters by a step without gradients, and then wants all of them to be saved.
So parameters without a state are taken out of the optimizer's groups while a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packtrain.training.masters import MASTER
from packtrain.training.sharded_files import tensors_in

_PREFIX = "optimizer.state."


@contextmanager
def reading_what_is_there(optimizer: Any, model: Any, checkpoint: Path) -> Iterator[None]:
    """For the time in which a checkpoint is read."""
    states = sorted(Path(checkpoint).glob("optimizer_*/.metadata"))
    without = _without_state(states[0], model) if states else set()
    if not without:
        yield
        return
    groups = optimizer.param_groups
    kept = [[weight for weight in group["params"] if id(weight) not in without] for group in groups]
    optimizer.param_groups = [
        {**group, "params": weights} for group, weights in zip(groups, kept, strict=True) if weights
    ]
    try:
        yield
    finally:
        read = iter(optimizer.param_groups)
        optimizer.param_groups = [
            {**next(read), "params": group["params"]} if weights else group
            for group, weights in zip(groups, kept, strict=True)
        ]


def _without_state(states: Path, model: Any) -> set[int]:
    """Parameters, by identity, that the checkpoint has nothing about, or at most a master."""
    saved: dict[str, set[str]] = {}
    for key in tensors_in(states):
        if key.startswith(_PREFIX):
            name, _, kind = key.removeprefix(_PREFIX).rpartition(".")
            saved.setdefault(name, set()).add(kind)
    stepped = {name for name, kinds in saved.items() if kinds - {MASTER}}
    own = dict(model.named_parameters())
    if not stepped or not saved.keys() <= own.keys():  # an optimizer without states, or other names: torch's to judge
        return set()
    return {id(weight) for name, weight in own.items() if weight.requires_grad and name not in stepped}
