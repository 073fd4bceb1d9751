"""From which checkpoint a run goes on: one that every rank has, or none, with what each of them has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packtrain.core.errors import ArtifactError
from packtrain.training.agreement import on_all, said_by_all, world_size
from packtrain.training.checkpoints import Checkpoint, complete_checkpoints, read_checkpoint
from packtrain.training.sharded_files import refuse_code


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """What one rank could go on from."""

    asked: bool = True  # to resume at all
    steps: tuple[int, ...] = ()  # of complete checkpoints
    fault: str | None = None

    def __str__(self) -> str:
        if not self.asked:
            return "is not to resume"
        if self.fault is not None:
            return self.fault
        return f"has steps {', '.join(map(str, self.steps))}" if self.steps else "has no complete checkpoint"


def checkpoint_to_resume(given: str | Path | bool | None, folder: Path) -> Checkpoint | None:
    """The checkpoint that was named, or the newest of the folder; all ranks call it, and all get the same step.

    Disks that are not shared may lack what others have: then it is the newest that all ranks have. Where there is none,
    all of them raise.
    """
    found, error = _own(given, folder)
    mine = _Choice(
        asked=given is not None and given is not False,
        steps=tuple(sorted(found)),
        fault=None if error is None else " ".join(str(error).split()),
    )
    all_of_them = said_by_all(mine)
    if not any(choice.asked for choice in all_of_them):
        return None
    if error is not None and world_size() == 1:
        raise error
    common = set.intersection(*(set(choice.steps) for choice in all_of_them))
    if not common:
        raise ArtifactError(
            str(folder if given is True or given is None else given),
            got="; ".join(_words(all_of_them)),
            expected="a checkpoint of this trainer" + (" that all ranks have" if len(all_of_them) > 1 else ""),
            fix="copy one to every machine, or start without resuming" if len(all_of_them) > 1 else _ANEW,
        )
    chosen = found[max(common)]
    on_all(lambda: refuse_code(chosen.path), str(chosen.path), "files that all ranks can read")
    return chosen


_ANEW = "start without resuming"


def _own(given: str | Path | bool | None, folder: Path) -> tuple[dict[int, Checkpoint], ArtifactError | None]:
    """What this rank could go on from, by step; and why not from what was named."""
    if given is None or given is False:
        return {}, None
    try:
        if given is True:
            return {one.step: one for one in complete_checkpoints(folder) if one.resumable}, None
        named = read_checkpoint(Path(given))
    except ArtifactError as error:
        return {}, error
    if not named.resumable:
        expected = "a checkpoint of this trainer"
        return {}, ArtifactError(str(given), got="weights only (save_only_model)", expected=expected, fix=_ANEW)
    return {named.step: named}, None


def _words(choices: list[_Choice]) -> list[str]:
    if len(choices) == 1:
        return ["no complete checkpoint"]
    return [f"rank {rank} {choice}" for rank, choice in enumerate(choices)]
