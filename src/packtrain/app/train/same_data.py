"""All processes of a run must have prepared the same, and a resumed run what it was begun with, wherever that lies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from packtrain.app.train.prepared import Prepared
from packtrain.core.errors import ArtifactError, ConfigError, DataError
from packtrain.core.fingerprint import differences
from packtrain.runs.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import TrainingArguments

_NAMED = 4  # numbers that are told


def check_same_data(prepared: Prepared) -> None:
    """Ask all processes before the first step; ranks with other packs would lose samples and wait for each other."""
    from packtrain.training.agreement import said_by_all

    date = prepared.run.config.data.template_date
    mine = {"template_date": date, "schedule": prepared.dataset.schedule.hash, **asdict(prepared.numbers)}
    require_same(said_by_all(mine))


def check_resumed(folder: RunFolder, inputs: Mapping[str, object]) -> None:
    """Refuse to go on with other data or another model than the run was begun with, and name what differs."""
    if not folder.holds_run:
        return
    before = folder.facts().measured
    if before is None:  # its plan is known by other things than ours
        raise ArtifactError(
            str(folder.path),
            got="a run that an older version of packtrain began",
            expected="one of this version",
            fix="go on with that version, or start a new run",
        )
    changed = differences(before, json.loads(json.dumps(inputs)))
    if changed:
        raise ArtifactError(
            str(folder.path),
            got="a run of other data or another model: " + "; ".join(changed[:_NAMED]),
            expected="what the run was begun with; it may lie elsewhere",
            fix="bring that back (files without checksums, as parquet, with their times), or start a new run",
        )


def check_plan(folder: RunFolder, checkpoint: Path, prepared: Prepared, args: TrainingArguments) -> None:
    """The trainer's own check of a checkpoint's place in the plan, before anything of the run is written over."""
    from transformers import TrainerControl, TrainerState

    from packtrain.delivery.trainers.mixin import PlanProgress

    saved = checkpoint / "trainer_state.json"
    if not saved.is_file():  # on a machine that saves none, where disks are not shared
        return
    progress = PlanProgress(prepared.dataset.schedule)
    try:
        progress.on_train_begin(args, TrainerState.load_from_json(str(saved)), TrainerControl())
    except ArtifactError as error:
        facts = folder.facts()
        before = {**facts.derived, **{name: getattr(facts, name) for name in _OF_PLAN}}
        changed = differences({name: before.get(name) for name in (*_OF_PLAN, *_COUNTED)}, _of_plan(prepared))
        raise ArtifactError(
            str(checkpoint),
            got="a checkpoint of a run over another plan" + (": " + "; ".join(changed[:_NAMED]) if changed else ""),
            expected="the plan of this run",
            fix="leave out what changes it; a run can be made longer within the epochs that it was planned for",
        ) from error


def check_length(trained: int, steps: int) -> None:
    """A run can be made shorter, but not than it is already."""
    if trained > steps:
        raise ConfigError(
            "--resume",
            got=f"{steps:,} steps, and the run has trained {trained:,}",
            expected="as many or more",
            fix=f"training.max_steps={trained} ends it where it stands",
        )


_OF_PLAN = ("mode", "packs_per_step", "seed", "balance")
_COUNTED = ("packing_length", "epochs", "steps")


def _of_plan(prepared: Prepared) -> dict[str, object]:
    """What a plan and its order follow from, by the names of run.json."""
    run, numbers = prepared.run, prepared.numbers
    data = {"packs_per_step": run.data.packs_per_step, "seed": run.data.seed, "balance": run.data.order}
    return {"mode": run.mode, **data, **{name: getattr(numbers, name) for name in _COUNTED}}


def other_evaluation(folder: RunFolder, inputs: Mapping[str, object] | None) -> tuple[str, ...]:
    """A note where a run goes on with other evaluation data: it may, but losses before and after do not compare."""
    before = folder.facts().evaluated if folder.holds_run else None
    if before is None or inputs is None:
        return ()
    changed = differences(before, json.loads(json.dumps(inputs)))
    told = "; ".join(changed[:_NAMED])
    return (f"other evaluation data than before, so that its losses do not compare: {told}",) if changed else ()


def check_frozen(folder: RunFolder, frozen: Mapping[str, str]) -> None:
    """Refuse to go on with adapters beside other weights than they were begun with: no checkpoint has those."""
    before = folder.facts().frozen if folder.holds_run else None
    if isinstance(before, Mapping) and any(before[dtype] != frozen[dtype] for dtype in before.keys() & frozen.keys()):
        raise ArtifactError(
            str(folder.path),
            got="adapters of another model: its config is the same, its weights are others",
            expected="the weights that the run was begun with; they may lie elsewhere",
            fix="name that model by model.model_name_or_path, or start a new run",
        )


def require_same(said: Sequence[Mapping[str, object]]) -> None:
    """An error that names a rank which says something else than the first, and what."""
    for rank, other in enumerate(said):
        differ = [name for name in said[0] if other.get(name) != said[0][name]]
        if differ:
            raise DataError(
                f"data of rank {rank}",
                got="; ".join(f"{name} {other.get(name)} instead of {said[0][name]}" for name in differ[:_NAMED]),
                expected="what rank 0 has",
                fix="set data.template_date: the processes were started on different days"
                if "template_date" in differ
                else "the data changed meanwhile, or the nodes' caches differ: packtrain cache clear, and start again",
            )
