"""Checkpoints that are whole or not there.

A checkpoint is written into a hidden folder beside the others; when every rank has written its part, a file that lists
all of its files is added, everything is flushed to the disk, and the folder gets its name. Whatever happens on the way,
the checkpoint before it stays as it was, and what is incomplete has another name. A folder without that list, or with
files of other sizes, is never resumed from; before one is, its bytes are compared with the checksums in that list, too.
One that cannot be read at the moment is another matter: nothing is resumed or started then, since a run that starts
over writes over what the other left.

A run that continues from an earlier step, or starts over in its folder, leaves the later checkpoints of the other in
folders `set-aside-checkpoint-<step>`: they are neither resumed from nor rotated. They go when the
run has a checkpoint of that step or a later one itself; of the others as many stay as of its own.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from packtrain.core.artifacts import free_bytes, read_json, refuse_links, remove_folder, share_files, sync, write_json
from packtrain.core.checksums import FileSum
from packtrain.core.errors import ArtifactError, in_one_line
from packtrain.core.numbers import counted
from packtrain.training.agreement import Sums, gather_faults, shared_sums, world_size

MARKER = "checkpoint.json"
KIND, VERSION = "checkpoint", 2
_OLD = (
    "resume from an earlier one; if all are of an older version, continue with that version or start a new run from "
    "the weights: packtrain train CONFIG model.model_name_or_path=CHECKPOINT"
)
_NAME = re.compile(r"checkpoint-(\d+)")
_ASIDE = "set-aside-"
_ASIDE_NAME = re.compile(r"set-aside-checkpoint-(\d+)(?:\.(\d+))?")
_LEFT = re.compile(r"\.checkpoint-\d+\.(saving|removing)")

_NOT_THERE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_FACTS: Mapping[str, type] = {"step": int, "world_size": int, "resumable": bool}

WritePart = Callable[[Path], None]  # writes one part of a checkpoint into its folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint that is complete."""

    path: Path
    step: int
    world_size: int  # ranks that wrote it
    resumable: bool  # it has more than weights
    files: Mapping[str, FileSum]
    passed_over: tuple[str, ...] = ()  # newer ones of its folder that cannot be used, and why

    @property
    def bytes(self) -> int:
        """The size of all its files."""
        return sum(one.bytes for one in self.files.values())


class UnreadableError(ArtifactError):
    """A checkpoint that may or may not be complete, as when too many files are open or one is a link."""


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the checkpoint in a folder; an incomplete one is refused."""
    path = Path(path)
    if not path.is_dir():
        raise ArtifactError(str(path), got="no such folder", expected="a checkpoint")
    _refuse_links(path)
    if not _is_file(path / MARKER):
        raise ArtifactError(
            str(path),
            got=f"a folder without {MARKER}",
            expected="a complete checkpoint of this trainer",
            fix="resume from an earlier one",
        )
    checkpoint = _read_marker(path)
    wrong = [name for name, one in checkpoint.files.items() if not _has_size(path / name, one.bytes)]
    if wrong:
        raise ArtifactError(
            str(path),
            got=f"{wrong[0]} is missing or has another size than when it was written ({counted(len(wrong), 'file')})",
            expected=f"the {counted(len(checkpoint.files), 'file')} that {MARKER} lists",
            fix="resume from an earlier one",
        )
    return checkpoint


def _read_marker(path: Path) -> Checkpoint:
    """A checkpoint as its own list describes it."""
    content = read_json(path / MARKER, KIND, VERSION, checked=True, fix=_OLD)
    try:
        files = {str(name): FileSum.from_plain(one) for name, one in content["files"].items()}
        if any(type(content[name]) is not kind for name, kind in _FACTS.items()):
            raise ValueError("invalid fields")
        return Checkpoint(path=path, files=files, **{name: content[name] for name in _FACTS})
    except (KeyError, AttributeError, ValueError) as error:
        expected = f"{', '.join(_FACTS)} and files with their sizes and checksums"
        raise ArtifactError(str(path / MARKER), got=in_one_line(error), expected=expected) from None


def survey(folder: Path) -> tuple[list[Checkpoint], dict[int, str]]:
    """The complete checkpoints of a folder, by step, and why others are not; files are looked at, not read."""
    complete, broken = [], {}
    for path in _checkpoint_folders(folder):
        try:
            complete.append(read_checkpoint(path))
        except UnreadableError:
            raise
        except ArtifactError as error:
            broken[int(_step_in(path.name))] = f"{path}: {error.got}"
    return sorted(complete, key=lambda checkpoint: checkpoint.step), broken


def complete_checkpoints(folder: Path) -> list[Checkpoint]:
    """All that are complete, by step."""
    return survey(folder)[0]


def find_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint of a run folder that a run can continue from, unless its bytes have changed."""
    return next((one for one in reversed(complete_checkpoints(folder)) if one.resumable), None)


def lost_by_stopping(folder: Path, resume: str = "resuming") -> str:
    """A note on what a run loses that stops in the middle of a step."""
    latest = find_latest(folder)
    if latest is None:
        return f"there is no checkpoint yet: {resume} starts over"
    return f"what came after step {latest.step:,} is lost: {resume} continues from its checkpoint"


def refuse_broken(folder: Path) -> None:
    """Refuse to start over in a folder whose checkpoints are all broken: the run could still be repaired."""
    broken = []
    for path in sorted(_checkpoint_folders(folder)):
        try:
            read_checkpoint(path)
        except ArtifactError as error:
            broken.append(error)
        else:
            return
    if broken:
        raise broken[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFolder:
    """Where the checkpoints of one run are. All ranks call `save` together; one of them moves folders."""

    folder: Path
    writes: bool  # this rank moves and deletes folders
    per_machine: bool = False  # this rank does so where another machine's disk is not this one's
    limit: int | None = None  # checkpoints that are kept

    def path(self, step: int) -> Path:
        """The path of the checkpoint of a step."""
        return self.folder / f"checkpoint-{step}"

    def save(
        self, step: int, parts: Sequence[WritePart], *, needed: int, resumable: bool = True, best: Path | None = None
    ) -> Path:
        """Write a checkpoint part by part; after each all ranks know whether all of them could.

        `needed` is about how many bytes that will be. Afterwards the oldest beyond the limit are removed, but neither
        the newest nor the best; and of those set aside what the run has caught up with.
        """
        saving = self.folder / f".checkpoint-{step}.saving"
        self._part(saving, needed, lambda: self._begin(saving, needed))
        for part in parts:
            self._part(saving, needed, lambda part=part: part(saving))  # type: ignore[misc]
        sums = shared_sums(saving)
        self._part(saving, needed, lambda: self._finish(saving, step, resumable, sums))
        self._part(saving, needed, lambda: self._finish_elsewhere(saving, step, resumable, sums))
        if self.writes:
            self._rotate(keep={self.path(step), *([best] if best is not None else [])})
        if resumable and (self.writes or self.per_machine):
            self._remove_overtaken(step)
        return self.path(step)

    def clean(self) -> None:
        """Remove what killed processes have left."""
        if self.writes and self.folder.is_dir():
            for path in self.folder.iterdir():
                if _LEFT.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def set_aside(self, resumed: Path | None) -> list[Path]:
        """Rename complete checkpoints that are not of the run that continues from this one; where they are now.

        Without one, or with one of another folder, that is all of them. Machines with disks of their own do it each.
        """
        if not (self.writes or self.per_machine):
            return []
        own = resumed is not None and resumed.resolve().parent == self.folder.resolve()
        last = read_checkpoint(resumed).step if own and resumed is not None else -1
        moved = []
        for other in complete_checkpoints(self.folder):
            if other.step > last:
                with suppress(FileNotFoundError):  # of a shared disk, where another machine was first
                    moved.append(_rename(other.path, f"{_ASIDE}{other.path.name}"))
        return moved

    def _part(self, saving: Path, needed: int, write: Callable[[], None]) -> None:
        """One part on all ranks; a fault of any of them removes what there is and is raised on all."""
        fault, cause = None, None
        try:
            write()
        except Exception as error:
            fault, cause = in_one_line(error)[:300], error
        faults = gather_faults(fault)
        if not faults:
            return
        free = free_bytes(self.folder)
        if self.writes or self.per_machine:
            shutil.rmtree(saving, ignore_errors=True)
        before = None
        with suppress(UnreadableError):
            before = find_latest(self.folder)
        kept = f"{before.path} is complete: resume from it" if before is not None else "no earlier checkpoint"
        raise ArtifactError(
            f"checkpoint {self.path(int(_step_in(saving.name)))}",
            got="; ".join(faults),
            expected=f"a disk with room for about {needed:,} bytes; {free:,} were free",
            fix=f"make room, or save elsewhere. {kept}",
        ) from cause

    def _begin(self, saving: Path, needed: int) -> None:
        if self.writes:
            shutil.rmtree(saving, ignore_errors=True)
        if self.writes or self.per_machine:
            saving.mkdir(parents=True, exist_ok=True)
        if self.writes and (free := free_bytes(self.folder)) < needed:
            raise OSError(f"{free:,} bytes are free, and it needs about {needed:,}")

    def _finish(self, saving: Path, step: int, resumable: bool, sums: Sums) -> None:
        if self.writes:
            self._name(saving, step, resumable, sums)

    def _finish_elsewhere(self, saving: Path, step: int, resumable: bool, sums: Sums) -> None:
        """Where disks are shared, the folder has its name for all ranks now."""
        if self.per_machine and not self.writes and saving.is_dir():
            with suppress(OSError):  # a shared disk may show what is no longer there
                self._name(saving, step, resumable, sums)

    def _name(self, saving: Path, step: int, resumable: bool, sums: Sums) -> None:
        sums.require()
        share_files(saving)
        files = {name: one.plain() for name, one in sums.files.items()}
        facts = {"step": step, "world_size": world_size(), "resumable": resumable, "files": files}
        write_json(saving / MARKER, KIND, VERSION, facts, checked=True)
        for path in (*saving.rglob("*"), saving):
            sync(path)
        final = self.path(step)
        if final.exists():  # of a run that was resumed from before it
            remove_folder(final, ignore_errors=True)
        os.rename(saving, final)
        sync(self.folder)

    def _rotate(self, keep: set[Path]) -> None:
        """By step; a folder that is not complete counts for nothing and is left to the user."""
        if self.limit is None or self.limit <= 0:
            return
        try:
            paths = [checkpoint.path for checkpoint in complete_checkpoints(self.folder)]
        except UnreadableError:  # at the next one, then
            return
        spare = len(paths) - max(self.limit, len(keep & set(paths)))
        for path in [path for path in paths if path not in keep][: max(0, spare)]:
            remove_folder(path, ignore_errors=True)

    def _remove_overtaken(self, step: int) -> None:
        """Remove what was set aside up to this step, and of what remains the oldest beyond the limit."""
        aside = [
            (int(match[1]), int(match[2] or 1), path)
            for path in self.folder.iterdir()
            if (match := _ASIDE_NAME.fullmatch(path.name))
        ]
        later = sorted(one for one in aside if one[0] > step)
        kept = later[-self.limit :] if self.limit is not None and self.limit > 0 else later
        for _, _, path in set(aside) - set(kept):
            shutil.rmtree(path, ignore_errors=True)  # on a shared disk another machine may do it too


def bytes_to_save(model: Any, optimizer: Any, *, only_trained: bool) -> int:
    """About how large a checkpoint will be: weights, or only trainable ones, and the optimizer's states."""
    weights = [one for one in model.parameters() if one.requires_grad or not only_trained]
    states = getattr(optimizer, "state", None) or {}
    kept = [value for state in states.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*weights, *kept))


def _rename(path: Path, name: str) -> Path:
    """In the same folder, with a number after the name where that is taken."""
    names = (name if number == 1 else f"{name}.{number}" for number in count(1))
    target = next(path.parent / one for one in names if not (path.parent / one).exists())
    os.rename(path, target)
    return target


def _checkpoint_folders(folder: Path) -> list[Path]:
    if not Path(folder).is_dir():
        return []
    named = [path for path in Path(folder).iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    for path in named:
        if path.is_symlink():  # one that is named by the user may be one
            raise UnreadableError(
                str(path), got="a link", expected="a folder", fix="replace the link with a copy of its target"
            )
    return named


def _refuse_links(path: Path) -> None:
    """A link in a checkpoint leads to files that were not checked."""
    try:
        with _readable(path):
            refuse_links(path)
    except ArtifactError as error:
        raise UnreadableError(error.where, got=error.got, expected=error.expected, fix=error.fix) from None
    except _NOT_THERE:  # another machine has renamed or removed it meanwhile
        raise ArtifactError(str(path), got="a deleted folder", expected="a checkpoint") from None


def _is_file(path: Path) -> bool:
    """Is there such a file? One that is there and cannot be opened is an error."""
    with suppress(*_NOT_THERE), _readable(path), open(path, "rb"):
        return True
    return False


def _has_size(path: Path, size: int) -> bool:
    with suppress(*_NOT_THERE), _readable(path):
        return path.stat().st_size == size
    return False


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Refuse files that cannot be read, since then nobody can tell whether a checkpoint is complete."""
    try:
        yield
    except _NOT_THERE:
        raise
    except OSError as error:
        expected, fix = "files that can be read", "fix the permissions or the disk, or move the checkpoint away"
        raise UnreadableError(str(path), got=error.strerror or str(error), expected=expected, fix=fix) from None


def _step_in(name: str) -> str:
    return re.sub(r"\D", "", name)
