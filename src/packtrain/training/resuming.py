"""From which checkpoint a run resumes, and with what: one that every rank has undamaged, and the settings asked for.

Torch keeps learning rates, decay and the like in the state of an optimizer and of a schedule, and puts them back with
it. What was learned comes from there (moments, masters, the step of the schedule); what is asked for comes from the
arguments. Where nothing was changed, both are the same bit by bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_callback import TrainerState
from transformers.trainer_pt_utils import safe_globals

from packtrain.core.checksums import Checking
from packtrain.core.errors import ArtifactError, in_one_line
from packtrain.training.agreement import fail_together, gather_values, shared_sums, world_size
from packtrain.training.checkpoints import MARKER, Checkpoint, read_checkpoint, survey
from packtrain.training.masters import MASTER, ParameterGroup, masters_of
from packtrain.training.predictions import is_memory_error
from packtrain.training.sharded_files import refuse_code, tensors_in

_START_OVER = "start without resuming"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """The checkpoints from which one rank could continue."""

    asked: bool = True  # to resume at all
    steps: tuple[int, ...] = ()  # of complete checkpoints
    fault: str | None = None

    def __str__(self) -> str:
        if not self.asked:
            return "does not resume"
        if self.fault is not None:
            return self.fault
        return f"has steps {', '.join(map(str, self.steps))}" if self.steps else "has no complete checkpoint"


def checkpoint_to_resume(
    given: str | Path | bool | None, folder: Path, report: Callable[[Checking], None] = lambda _: None
) -> Checkpoint | None:
    """The checkpoint that was named, or the newest of the folder; all ranks call it, and all get the same step.

    Disks that are not shared may lack what others have: then it is the newest that all ranks have. Its bytes are
    compared with their checksums, which takes as long as reading it; where they differ on any rank, all take the one
    before. Where there is none, all of them raise.
    """
    here, broken, error = dict[int, Checkpoint](), dict[int, str](), None
    try:
        if given is not None and given is not False:
            here, broken = _own_checkpoints(given, folder)
    except ArtifactError as fault:
        error = fault
    mine = _Choice(
        asked=given is not None and given is not False,
        steps=tuple(sorted(here)),
        fault=None if error is None else " ".join(str(error).split()),
    )
    all_of_them = gather_values(mine)
    if not any(choice.asked for choice in all_of_them):
        return None
    if error is not None and world_size() == 1:
        raise error
    common = set.intersection(*(set(choice.steps) for choice in all_of_them))
    if not common:
        raise ArtifactError(
            str(folder if given is True or given is None else given),
            got="; ".join(_choices_in_words(all_of_them)),
            expected="a checkpoint of this trainer" + (" that all ranks have" if len(all_of_them) > 1 else ""),
            fix="copy one to every machine, or start without resuming" if len(all_of_them) > 1 else _START_OVER,
        )
    chosen = _first_undamaged([here[step] for step in sorted(common, reverse=True)], report)
    newer = sorted(step for step in broken if step > chosen.step)
    chosen = replace(chosen, passed_over=(*(broken[step] for step in newer), *chosen.passed_over))
    fail_together(lambda: _refuse_unsafe(chosen), str(chosen.path), "files that all ranks can read")
    return chosen


# What the trainer goes by in its state, and what its own of the class has to be.
_STATE, _FACTS = "trainer_state.json", {"train_batch_size": int, "log_history": list, "stateful_callbacks": dict}


def _refuse_unsafe(checkpoint: Checkpoint) -> None:
    """Refuse code, and a state that is not this trainer's; machines whose disk is not shared may have none."""
    refuse_code(checkpoint.path)
    path = checkpoint.path / _STATE
    if not path.is_file():
        return
    try:
        state = TrainerState.load_from_json(str(path))
        wrong = [name for name, kind in _FACTS.items() if not isinstance(getattr(state, name), kind)]
        wrong += [] if state.global_step == checkpoint.step >= 0 else ["global_step"]
        fault = f"{', '.join(wrong)} of another kind" if wrong else None
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        fault = in_one_line(error)
    if fault is not None:
        expected = f"the trainer state of step {checkpoint.step:,}"
        raise ArtifactError(str(path), got=fault, expected=expected, fix="resume from another checkpoint")


def require_undamaged(checkpoint: Checkpoint, report: Callable[[Checking], None] = lambda _: None) -> None:
    """Refuse a checkpoint whose bytes are not those that were written. All ranks call it, and all of them raise."""
    now = shared_sums(checkpoint.path, report)
    wrong = [name for name, one in checkpoint.files.items() if now.files.get(name) != one]
    mine = [*now.faults, *(f"{name} differs from what was written" for name in wrong)]
    more = f" and {len(mine) - 3} more" if len(mine) > 3 else ""
    faults = dict.fromkeys(words for words in gather_values("; ".join(mine[:3]) + more) if words)
    if faults:
        raise ArtifactError(
            str(checkpoint.path),
            got="; ".join(faults),
            expected=f"files with the checksums in {MARKER}; a disk or a copy has damaged them",
            fix="resume from an earlier checkpoint, or restore this one from a copy",
        )


def _first_undamaged(candidates: Sequence[Checkpoint], report: Callable[[Checking], None]) -> Checkpoint:
    """The first of them whose bytes are as they were written, on all ranks."""
    passed: list[str] = []
    for number, candidate in enumerate(candidates):
        try:
            require_undamaged(candidate, report)
            return replace(candidate, passed_over=tuple(passed))
        except ArtifactError as error:
            if number == len(candidates) - 1:
                raise
            passed.append(f"{candidate.path}: {error.got}")
    raise AssertionError("there is one")


def _own_checkpoints(given: str | Path | bool, folder: Path) -> tuple[dict[int, Checkpoint], dict[int, str]]:
    """The checkpoints from which this rank could resume, by step, and why it could not from others."""
    if given is True:
        complete, broken = survey(folder)
        return {one.step: one for one in complete if one.resumable}, broken
    named = read_checkpoint(Path(str(given)))
    if not named.resumable:
        expected = "a checkpoint of this trainer"
        raise ArtifactError(str(given), got="weights only (save_only_model)", expected=expected, fix=_START_OVER)
    return {named.step: named}, {}


def _choices_in_words(choices: list[_Choice]) -> list[str]:
    if len(choices) == 1:
        return ["no complete checkpoint"]
    return [f"rank {rank} {choice}" for rank, choice in enumerate(choices)]


# ---- states of the optimizer

_STATES = ("optimizer*.pt", "scheduler.pt", "scaler.pt", "rng_state*.pth")  # what is read by torch.load
OTHER_STATES = "states of another optimizer or of other parameters"


@contextmanager
def states_in_words(checkpoint: str | None, other: str) -> Iterator[None]:
    """Errors about states that cannot or may not be read, or are `other` ones, name where they are."""
    try:
        yield
    except Exception as error:
        if checkpoint is None or isinstance(error, ArtifactError) or is_memory_error(error):
            raise
        for path in sorted(one for name in _STATES for one in Path(checkpoint).glob(name)):
            _refuse_unreadable(path)
        raise ArtifactError(
            checkpoint,
            got=f"{other} ({in_one_line(error)})",
            expected="optimizer states for this run's trainable parameters",
            fix="resume with the settings and version it was saved with, or start a new run from its weights",
        ) from error


def _refuse_unreadable(path: Path) -> None:
    try:
        with safe_globals():
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # whose words say how to run it
        raise ArtifactError(
            str(path),
            got="a file that torch cannot load as tensors and plain values",
            expected="states saved by this trainer",
            fix="resume from another checkpoint that you trust",
        ) from None


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
            shape = tuple(getattr(value, "shape", ()))
            allowed = {"step": ((), (1,))}.get(name, (tuple(weight.shape),) if name in _AS_LARGE else None)
            if isinstance(value, Tensor) and allowed is not None and shape not in allowed:
                raise ValueError(f"{name} of shape {shape} for a weight of shape {tuple(weight.shape)}")


def _set_rates(schedule: LambdaLR, groups: Sequence[dict[str, Any]]) -> None:
    """The rates of the step that the schedule is at, computed as it does it."""
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    rates = [base * of_step(schedule.last_epoch) for base, of_step in pairs]
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(group[_RATE], Tensor):
            group[_RATE].fill_(rate)
        else:
            group[_RATE] = rate
    schedule._last_lr = list(rates)


def _refuse_other_groups(asked: Sequence[ParameterGroup], loaded: Sequence[ParameterGroup], path: str) -> None:
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


# ---- sharded states: torch's reader wants all that is asked for to be saved

_PREFIX = "optimizer.state."


@contextmanager
def reading_sharded_states(optimizer: Any, model: Any, checkpoint: Path) -> Iterator[None]:
    """For the time in which a checkpoint is read: nothing is asked for that it does not have.

    Parameters that no batch had reached have no states: they are taken out of the optimizer's groups. Checkpoints of
    optimizers without masters have none.
    """
    states = sorted(Path(checkpoint).glob("optimizer_*/.metadata"))
    if not states:
        yield
        return
    saved, masters = tensors_in(states[0]), masters_of(optimizer)
    has_masters = any(name.endswith(f".{MASTER}") for name in saved)
    if has_masters and masters is None:
        warnings.warn(
            "the checkpoint has fp32 masters, which are ignored: the run continues from weights", stacklevel=2
        )
    shown = masters.as_before_masters() if masters is not None and not has_masters else nullcontext()
    with _only_parameters_with_states(optimizer, _without_state(saved, model)), shown:
        yield


@contextmanager
def _only_parameters_with_states(optimizer: Any, without: set[int]) -> Iterator[None]:
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


def _without_state(tensors: set[str], model: Any) -> set[int]:
    """Parameters, by identity, that the checkpoint has nothing about, or at most a master."""
    saved: dict[str, set[str]] = {}
    for key in tensors:
        if key.startswith(_PREFIX):
            name, _, kind = key.removeprefix(_PREFIX).rpartition(".")
            saved.setdefault(name, set()).add(kind)
    stepped = {name for name, kinds in saved.items() if kinds - {MASTER}}
    own = dict(model.named_parameters())
    if not stepped or not saved.keys() <= own.keys():  # an optimizer without states, or other names: torch's to judge
        return set()
    return {id(weight) for name, weight in own.items() if weight.requires_grad and name not in stepped}
