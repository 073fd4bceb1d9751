"""A resumed run learns with the settings it is given, not with those that its checkpoint was saved with.

Torch keeps learning rates, decay and the like in the state of an optimizer and of a schedule, and puts them back with
it. What was learned comes from there (moments, masters, the step of the schedule); what is asked for comes from the
arguments. Where nothing was changed, both are the same bit by bit.

Torch's reader of sharded states wants all of them to be saved. Parameters that no batch had reached have none: they are
taken out of the optimizer's groups while a checkpoint is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from packtrain.core.errors import ArtifactError
from packtrain.training.masters import MASTER
from packtrain.training.sharded_files import tensors_in

# Options of a group that are settings. Other optimizers also count in their groups, which has to be as it was.
_SETTINGS = (
    *("weight_decay", "betas", "eps", "momentum", "dampening", "nesterov", "alpha"),
    *("beta1", "decay_rate", "clip_threshold"),
)
_BASE, _RATE = "initial_lr", "lr"
# States that are as large as their weight, of optimizers whose kernels go by that and look at nothing else.
_AS_LARGE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "state1", "state2", MASTER)
_KERNELS = ("torch.", "bitsandbytes.", "packtrain.")


@contextmanager
def settings_as_asked(optimizer: Any, schedule: Any, checkpoint: str) -> Iterator[None]:
    """For the time in which their states are loaded: both keep the settings that they were made with.

    Rates are those of the schedule as it is now, at the step at which it was saved. Schedules that are no function of
    the step alone, such as reduce_lr_on_plateau, keep the rates that they have come to.
    """
    asked = [dict(group, params=()) for group in optimizer.param_groups]
    is_function = type(schedule) is LambdaLR
    rates = list(schedule.base_lrs) if is_function else []
    yield
    _refuse_other_groups(asked, optimizer.param_groups, checkpoint)
    for group, wanted in zip(optimizer.param_groups, asked, strict=True):
        kept = (*_SETTINGS, _BASE) if is_function else _SETTINGS
        group.update({name: wanted[name] for name in kept if name in wanted})
    if is_function:
        schedule.base_lrs = rates
        _set_rates(schedule, optimizer.param_groups)


def require_shapes(optimizer: Any) -> None:
    """ValueError where a state that was loaded has another shape than its weight: a kernel would write beyond it."""
    while hasattr(optimizer, "optimizer"):  # accelerate's own is around it
        optimizer = optimizer.optimizer
    if not type(optimizer).__module__.startswith(_KERNELS):
        return
    for weight, state in optimizer.state.items():
        for name, value in state.items():
            found = tuple(getattr(value, "shape", ()))
            wanted = {"step": ((), (1,))}.get(name, (tuple(weight.shape),) if name in _AS_LARGE else None)
            if isinstance(value, Tensor) and wanted is not None and found not in wanted:
                raise ValueError(f"{name} of shape {found} for a weight of shape {tuple(weight.shape)}")


def _set_rates(schedule: LambdaLR, groups: Sequence[dict[str, Any]]) -> None:
    """The rates of the step that the schedule is at, computed as it does it."""
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    found = [base * of_step(schedule.last_epoch) for base, of_step in pairs]
    for group, rate in zip(groups, found, strict=True):
        if isinstance(group[_RATE], Tensor):
            group[_RATE].fill_(rate)
        else:
            group[_RATE] = rate
    schedule._last_lr = list(found)


def _refuse_other_groups(asked: Sequence[Mapping[str, Any]], loaded: Sequence[Mapping[str, Any]], path: str) -> None:
    """Groups are known by their place: settings of one part of the model must not become those of another."""
    ours, theirs = ([group.get("name") for group in groups] for groups in (asked, loaded))
    if len(ours) == len(theirs) and all(None in (a, b) or a == b for a, b in zip(ours, theirs, strict=True)):
        return
    raise ArtifactError(
        path,
        got=f"optimizer groups {', '.join(map(str, theirs))}",
        expected=f"groups of the trainable parts now: {', '.join(map(str, ours))}",
        fix="train the same parts as when it was saved, or start a new run",
    )


# ---- states of what no batch has reached yet

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
