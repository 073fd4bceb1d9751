"""The settings, data and plan with which a resumed run was started and continues, or why it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packtrain.app.train.prepare import Prepared
from packtrain.config.run_config import RunConfig, load_config
from packtrain.config.sections import keys_with
from packtrain.config.setup import MULTIMODAL, model_settings, uses_deepspeed
from packtrain.config.training_section import TrainingSection
from packtrain.core.errors import ArtifactError, ConfigError, DataError
from packtrain.core.fingerprint import differences
from packtrain.core.numbers import counted
from packtrain.core.secrets import secret_settings
from packtrain.modeling.model_settings import ModelSettings
from packtrain.runs.run_folder import CONFIG, RunFolder

if TYPE_CHECKING:
    from transformers import TrainingArguments


_RATES = tuple(name for name in keys_with("rate") if name.endswith(("_lr", "learning_rate")))
_SCHEDULE = "lr_scheduler_type"
_OWN_COURSE = ("reduce_lr_on_plateau", "greedy")  # schedules whose rates depend on the losses so far
_RATE_OF = {"train_language": "learning_rate", "train_vision": "vit_lr", "train_projector": "aligner_lr"}
_PARTS: Mapping[str, Callable[[ModelSettings], bool]] = {
    "train_language": lambda model: model.train_language,
    "train_vision": lambda model: model.trains_vision,
    "train_projector": lambda model: model.trains_projector,
}
_ADAPTERS: Mapping[str, Callable[[ModelSettings], Any]] = {
    "lora_rank": lambda model: model.lora_rank,
    "lora_alpha": lambda model: model.scale,
    "lora_target_modules": lambda model: "all" if (names := model.lora_target_modules) is None else sorted(set(names)),
}


def config_of_run(folder: Path, asked: RunConfig) -> RunConfig:
    """The config that a run was started with, and the secrets of `asked`, which are not stored there."""
    config = load_config(folder / CONFIG)
    return replace(config, training=replace(config.training, **secret_settings(asked.training.given())))


def refuse_changes(before: RunConfig, asked: RunConfig) -> None:
    """Refuse settings that need other parameters or states than checkpoints have, or that would have no effect."""
    problems = [*_model_changes(before, asked), *_optimizer_changes(before, asked), *_rate_changes(before, asked)]
    if problems:
        raise ConfigError(
            "--resume",
            problems=problems,
            expected="the values of the run",
            fix="leave these out, or start a new run in another training.output_dir",
        )


def changes_note(before: RunConfig, asked: RunConfig) -> tuple[str, ...]:
    """One line with all settings of model and training that change when the run continues."""
    changes = []
    for section in ("model", "training"):
        old, new = getattr(before, section).given(), getattr(asked, section).given()
        for name in sorted({*old, *new} - {*keys_with("place")}):  # a run may be elsewhere
            if old.get(name) != new.get(name):
                changes.append(f"{section}.{name} {_value(old.get(name))} -> {_value(new.get(name))}")
    return (f"the run continues with changed settings: {'; '.join(changes)}",) if changes else ()


def _model_changes(before: RunConfig, asked: RunConfig) -> Iterator[str]:
    """Settings of which parameters exist, which are trained, and what adapters mean."""
    old, new = model_settings(before), model_settings(asked)
    if old.method != new.method:
        yield _line("model.method", old.method, new.method)
    elif old.has_adapters:
        for name, of in _ADAPTERS.items():
            if of(old) != of(new):
                yield _line(f"model.{name}", of(old), of(new))
    for name, is_trained in _PARTS.items():
        if is_trained(old) != is_trained(new):
            yield _line(f"model.{name}", is_trained(old), is_trained(new)) + _because(name, asked)


def _because(part: str, asked: RunConfig) -> str:
    """A part without a setting of its own is trained if its learning rate is set."""
    rate = _RATE_OF[part]
    if getattr(asked.model, part) is not None or getattr(asked.training, rate) is None:
        return ""
    return f", because of training.{rate} {_value(getattr(asked.training, rate))}"


def _optimizer_changes(before: RunConfig, asked: RunConfig) -> Iterator[str]:
    """Settings of the states that an optimizer keeps."""
    for name in (name for name in keys_with("refused") if name in TrainingSection.known()):
        old, new = (getattr(config.training, name) for config in (before, asked))
        if name == "optim" and old != new:
            old, new = _optimizer(old), _optimizer(new)
        if old != new:
            yield _line(f"training.{name}", old, new)


def _optimizer(given: str | None) -> str:
    """The trainer's default where none is given."""
    from transformers import TrainingArguments

    return str(TrainingArguments.__dataclass_fields__["optim"].default) if given in (None, MULTIMODAL) else str(given)


def _rate_changes(before: RunConfig, asked: RunConfig) -> Iterator[str]:
    """Settings that the checkpoint would override."""
    old, new = (config.training.lr_scheduler_type or "linear" for config in (before, asked))
    if old != new and {old, new} & {*_OWN_COURSE}:
        yield _line(f"training.{_SCHEDULE}", old, new)
        return
    kept: tuple[str, ...] = ()
    why = ""
    if uses_deepspeed(asked):
        kept, why = keys_with("rate"), "DeepSpeed restores it from the checkpoint"
    elif new in _OWN_COURSE:
        kept, why = _RATES, f"{new} continues from its current rates"
    for name in kept:
        had, asks = (getattr(config.training, name) for config in (before, asked))
        if had != asks:
            yield _line(f"training.{name}", had, asks) + f"; {why}"


def _line(name: str, old: Any, new: Any) -> str:
    return f"{name}: the run has {_value(old)}, requested is {_value(new)}"


def _value(value: Any) -> str:
    """A value as a config shows it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(str, value))}]"
    return "nothing" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


_NAMED = 4  # differences that an error names


def check_same_data(prepared: Prepared) -> None:
    """Compare all processes before the first step: ranks with other packs would lose samples, or hang."""
    from packtrain.training.agreement import gather_values

    date = prepared.run.config.data.template_date
    mine = {"template_date": date, "schedule": prepared.dataset.schedule.hash, **asdict(prepared.numbers)}
    require_same(gather_values(mine))


def check_resumed(folder: RunFolder, inputs: Mapping[str, object]) -> None:
    """Refuse other data or another model than the run was started with, and name what differs."""
    if not folder.holds_run:
        return
    before = folder.facts().measured
    if before is None:
        raise ArtifactError(
            str(folder.path),
            got="a run that was started by an older version of packtrain",
            expected="one of this version",
            fix="resume with that version, or start a new run",
        )
    changed = differences(before, json.loads(json.dumps(inputs)))
    if changed:
        raise ArtifactError(
            str(folder.path),
            got="a run of other data or another model: " + "; ".join(changed[:_NAMED]),
            expected="what the run was started with; paths may differ",
            fix="restore it (files without checksums, such as parquet, with their times), or start a new run",
        )


def check_plan(folder: RunFolder, checkpoint: Path, prepared: Prepared, args: TrainingArguments) -> None:
    """The trainer's own check of a checkpoint's position in the plan, before anything of the run is overwritten."""
    from transformers import TrainerControl, TrainerState

    from packtrain.delivery.trainers.mixin import PlanProgress

    saved = checkpoint / "trainer_state.json"
    if not saved.is_file():  # without a shared disk, not every machine saves one
        return
    progress = PlanProgress(prepared.dataset.schedule)
    try:
        progress.on_train_begin(args, TrainerState.load_from_json(str(saved)), TrainerControl())
    except ArtifactError as error:
        facts = folder.facts()
        before = {name: getattr(facts, name) for name in _OF_PLAN}
        before |= {name: getattr(facts.derived, name, None) for name in _COUNTED}
        changed = differences(before, _plan_facts(prepared))
        raise ArtifactError(
            str(checkpoint),
            got="a checkpoint of a run over another plan" + (": " + "; ".join(changed[:_NAMED]) if changed else ""),
            expected="the plan of this run",
            fix="undo these changes; a run can be made longer within the epochs that it was planned for",
        ) from error


def check_length(trained: int, steps: int) -> None:
    """Refuse to end a run before the step that it has reached."""
    if trained > steps:
        raise ConfigError(
            "--resume",
            got=f"{counted(steps, 'step')}, and the run has trained {trained:,}",
            expected="as many or more",
            fix=f"training.max_steps={trained} ends it now",
        )


_OF_PLAN = ("mode", "packs_per_step", "seed", "balance")
_COUNTED = ("packing_length", "epochs", "steps")


def _plan_facts(prepared: Prepared) -> dict[str, object]:
    """The facts that determine a plan and its order, by the names of run.json."""
    run, numbers = prepared.run, prepared.numbers
    data = {"packs_per_step": run.data.packs_per_step, "seed": run.data.seed, "balance": run.data.order}
    return {"mode": run.mode, **data, **{name: getattr(numbers, name) for name in _COUNTED}}


def other_evaluation(folder: RunFolder, inputs: Mapping[str, object] | None) -> tuple[str, ...]:
    """A note where the evaluation data changed: that is allowed, but losses before and after do not compare."""
    before = folder.facts().evaluated if folder.holds_run else None
    if before is None or inputs is None:
        return ()
    changed = differences(before, json.loads(json.dumps(inputs)))
    differ = "; ".join(changed[:_NAMED])
    return (f"the evaluation data changed, so losses before and after do not compare: {differ}",) if changed else ()


def check_frozen(folder: RunFolder, frozen: Mapping[str, str]) -> None:
    """Refuse to continue adapters on other base weights than before: checkpoints do not have those."""
    before = folder.facts().frozen if folder.holds_run else None
    if before and any(before[dtype] != frozen[dtype] for dtype in before.keys() & frozen.keys()):
        raise ArtifactError(
            str(folder.path),
            got="adapters of another model: the same config, other weights",
            expected="the weights that the run was started with; their path may differ",
            fix="set model.model_name_or_path to that model, or start a new run",
        )


def require_same(ranks: Sequence[Mapping[str, object]]) -> None:
    """Refuse ranks whose values differ from those of rank 0, and name what differs."""
    first = ranks[0]
    for rank, other in enumerate(ranks):
        differ = [name for name in first if other.get(name) != first[name]]
        if differ:
            raise DataError(
                f"data of rank {rank}",
                got="; ".join(f"{name} {other.get(name)} instead of {first[name]}" for name in differ[:_NAMED]),
                expected="what rank 0 has",
                fix="set data.template_date: the processes were started on different days"
                if "template_date" in differ
                else "the data changed, or the caches of the nodes differ: packtrain cache clear, and start again",
            )
