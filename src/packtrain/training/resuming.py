"""From which checkpoint a run goes on: one that every rank has undamaged, or none, with what each of them has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers.trainer_callback import TrainerState

from packtrain.core.checksums import Checking
from packtrain.core.errors import ArtifactError, in_one_line
from packtrain.training.agreement import on_all, said_by_all, world_size
from packtrain.training.checkpoints import MARKER, Checkpoint, read_checkpoint, survey
from packtrain.training.sharded_files import refuse_code
from packtrain.training.shared_sums import shared_sums

_ANEW = "start without resuming"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What one rank could go on from."""

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
    found = _own(given, folder)
    mine = _Choice(
        asked=given is not None and given is not False,
        steps=tuple(sorted(found.by_step)),
        fault=None if found.error is None else " ".join(str(found.error).split()),
    )
    all_of_them = said_by_all(mine)
    if not any(choice.asked for choice in all_of_them):
        return None
    if found.error is not None and world_size() == 1:
        raise found.error
    common = set.intersection(*(set(choice.steps) for choice in all_of_them))
    if not common:
        raise ArtifactError(
            str(folder if given is True or given is None else given),
            got="; ".join(_words(all_of_them)),
            expected="a checkpoint of this trainer" + (" that all ranks have" if len(all_of_them) > 1 else ""),
            fix="copy one to every machine, or start without resuming" if len(all_of_them) > 1 else _ANEW,
        )
    chosen = _undamaged([found.by_step[step] for step in sorted(common, reverse=True)], report)
    newer = sorted(step for step in found.broken if step > chosen.step)
    chosen = replace(chosen, passed_over=(*(found.broken[step] for step in newer), *chosen.passed_over))
    on_all(lambda: _look_through(chosen), str(chosen.path), "files that all ranks can read")
    return chosen


# What the trainer goes by in its state, and what its own of the class has to be.
_STATE, _FACTS = "trainer_state.json", {"train_batch_size": int, "log_history": list, "stateful_callbacks": dict}


def _look_through(checkpoint: Checkpoint) -> None:
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
    faults = dict.fromkeys(words for words in said_by_all("; ".join(mine[:3]) + more) if words)
    if faults:
        raise ArtifactError(
            str(checkpoint.path),
            got="; ".join(faults),
            expected=f"files with the checksums in {MARKER}; a disk or a copy has damaged them",
            fix="resume from an earlier checkpoint, or restore this one from a copy",
        )


def _undamaged(candidates: Sequence[Checkpoint], report: Callable[[Checking], None]) -> Checkpoint:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Own:
    """What this rank has."""

    by_step: dict[int, Checkpoint]  # what it could go on from
    broken: dict[int, str]
    error: ArtifactError | None = None  # why not from what was named


def _own(given: str | Path | bool | None, folder: Path) -> _Own:
    if given is None or given is False:
        return _Own(by_step={}, broken={})
    try:
        if given is True:
            found = survey(folder)
            return _Own(by_step={one.step: one for one in found.complete if one.resumable}, broken=dict(found.broken))
        named = read_checkpoint(Path(given))
    except ArtifactError as error:
        return _Own(by_step={}, broken={}, error=error)
    if not named.resumable:
        expected = "a checkpoint of this trainer"
        refused = ArtifactError(str(given), got="weights only (save_only_model)", expected=expected, fix=_ANEW)
        return _Own(by_step={}, broken={}, error=refused)
    return _Own(by_step={named.step: named}, broken={})


def _words(choices: list[_Choice]) -> list[str]:
    if len(choices) == 1:
        return ["no complete checkpoint"]
    return [f"rank {rank} {choice}" for rank, choice in enumerate(choices)]
