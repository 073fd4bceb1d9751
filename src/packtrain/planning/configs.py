"""A simulation as a config that can be trained with: the user's own, with what packing changes in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packtrain.packing.packing_config import PackingConfig
from packtrain.planning.question import Baseline, Question, Sections
from packtrain.planning.study_values import PaddedRun, Reason, Simulation

MOVED = 0.05  # by how much the samples of a step may change before learning rates are looked at
_EVALUATIONS, _LOGS = 4, 100  # of an epoch, where the user has no interval
_LEAST = 10  # steps between evaluations or saves, unless an epoch is shorter
RATES = ("learning_rate", "vit_lr", "aligner_lr")
_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "sgd": "sgd"}
# Keys of a config that a TrainingSetup has under the same name.
_OF_MODEL = ("method", "lora_rank", "train_vision", "train_projector")
_OF_TRAINING = (
    *("master_weights", "sharding", "gradient_checkpointing", "vision_checkpointing", "vision_batch_patches"),
    "chunked_loss",
)
# Keys for the size of a step that effective_batch_size replaces.
_STEP_SIZES = ("packs_per_step", "effective_batch_unit", "gradient_accumulation_steps")
_BEST_FIT = PackingConfig(packing_length=1).packing_strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Intervals:
    """Settings that follow from the number of samples per step; rates are None where the user gave none."""

    steps: int  # an epoch
    factor: float  # samples per step, over those of the baseline
    eval_steps: int
    save_steps: int
    save_delay_steps: int
    logging_steps: int
    warmup_steps: int | None
    learning_rate: float | None
    vit_lr: float | None
    aligner_lr: float | None

    @property
    def moved(self) -> bool:
        """Do learning rates need a look?"""
        return abs(self.factor - 1) > MOVED


def derive_intervals(baseline: Baseline, *, before: float, after: float, steps: int) -> Intervals:
    """Intervals that cover as many samples as before; rates by the square root of the change, where it matters.

    `before` and `after` are samples per step, `steps` those of one epoch with `after`.
    """
    moved = abs(after / before - 1) > MOVED
    factor = after / before if moved else 1.0  # steps of about as many samples keep their intervals

    def interval(given: int | None, parts: int, least: int) -> int:
        wanted = steps / parts if given is None else given / factor
        return max(min(least, steps), round(wanted))

    def rate(given: float | None) -> float | None:
        return given if given is None or not moved else float(f"{given * math.sqrt(factor):.3g}")

    whole = steps * baseline.num_train_epochs  # beyond it nothing would be evaluated or saved
    evaluate = min(interval(baseline.eval_steps, _EVALUATIONS, _LEAST), whole)
    save = evaluate if baseline.save_steps is None else interval(baseline.save_steps, _EVALUATIONS, _LEAST)
    save = min(save, whole)
    if baseline.eval_steps and baseline.save_steps and baseline.save_steps % baseline.eval_steps == 0:
        # The best checkpoint can only be kept where it was evaluated.
        save = evaluate * min(baseline.save_steps // baseline.eval_steps, max(1, whole // evaluate))
    delay, warmup = baseline.save_delay_steps, baseline.warmup_steps
    return Intervals(
        steps=steps,
        factor=after / before,
        eval_steps=evaluate,
        save_steps=save,
        save_delay_steps=save if delay is None else min(round(delay / factor), whole // 2),
        logging_steps=interval(baseline.logging_steps, _LOGS, 1),
        warmup_steps=None if warmup is None else round(warmup / factor),
        learning_rate=rate(baseline.learning_rate),
        vit_lr=rate(baseline.vit_lr),
        aligner_lr=rate(baseline.aligner_lr),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConfigDraft:
    """What a config is written from."""

    question: Question
    simulation: Simulation
    padded: PaddedRun  # the user's own
    changes: tuple[Reason, ...] = ()  # what was changed to make room

    @property
    def intervals(self) -> Intervals:
        """For the packed run."""
        question, simulation = self.question, self.simulation
        return derive_intervals(
            question.baseline,
            before=question.samples_before(simulation.samples_packed),
            after=simulation.samples_per_step,
            steps=simulation.steps,
        )

    @property
    def samples_per_step(self) -> int:
        """effective_batch_size: the user's own, unless packs are so large that rates follow them.

        It is the same on any number of GPUs, and without packing.
        """
        return round(self.simulation.samples_per_step) if self.intervals.moved else self.question.samples_per_step

    @property
    def padded_intervals(self) -> Intervals:
        """For the padded run: the user's own, with what is missing filled in."""
        before = self.question.samples_per_step
        return derive_intervals(self.question.baseline, before=before, after=before, steps=self.padded.steps)


def packed_config(draft: ConfigDraft) -> Sections:
    """The user's config with what training with this packing changes in it."""
    simulation, strategy = draft.simulation, draft.question.packing.packing_strategy
    data = {"packing": True, **simulation.settings, **({"packing_strategy": strategy} if strategy != _BEST_FIT else {})}
    training = {"effective_batch_size": draft.samples_per_step, **training_section(draft, draft.intervals, packed=True)}
    return _merged(draft.question, data, training)


def padded_config(draft: ConfigDraft, run: PaddedRun) -> Sections:
    """The user's config for this padded run."""
    question, grouped = draft.question, run.order == "by_length"
    training: dict[str, Any] = {
        "per_device_train_batch_size": run.batch_size,
        "effective_batch_size": question.samples_per_step,
        **({"group_by_length": grouped} if grouped or question.baseline.group_by_length else {}),
        **training_section(draft, draft.padded_intervals, packed=False),
    }
    if run.kernels == "packs" and question.setup.compiled:
        training["compile"] = True
    return _merged(question, {"packing": False, "packing_length": draft.simulation.packing_length}, training)


def left_out(config: Sections, base: Sections) -> dict[str, Any]:
    """Settings of the user's config that others replace."""
    return {
        f"{section}.{name}": value
        for section, values in base.items()
        for name, value in values.items()
        if name not in config.get(section, {})
    }


def _merged(question: Question, data: Mapping[str, Any], training: Mapping[str, Any]) -> Sections:
    """The user's config with what is recommended in its place."""
    base, replaced = question.base, {"training": {*_STEP_SIZES}}
    if "sharding" in training:  # a run refuses it beside these
        others = {"deepspeed"} if training["sharding"] == "fsdp" else {"deepspeed", "fsdp", "fsdp_config"}
        replaced["training"] |= others
    if not data["packing"]:  # limits of packs have no effect without them, and their order is not one of batches
        replaced["data"] = {name for name in base.get("data", {}) if name.endswith("_per_pack") or name == "balance"}
    sections = {"model": _model_section(question), "data": data, "training": training}
    for section, values in sections.items():
        given = base.get(section, {}).items()
        kept = {name: value for name, value in given if name not in replaced.get(section, ())}
        sections[section] = {**kept, **values}
    return sections | {name: values for name, values in base.items() if name not in sections}


def _model_section(question: Question) -> dict[str, Any]:
    changed, given = _changed(question, _OF_MODEL), question.base.get("model", {})
    for part in ("train_vision", "train_projector"):  # which follow from the method unless they are given
        if part not in given and changed.get(part) == (question.setup.method == "full"):
            del changed[part]
    return {"model_name_or_path": question.model, **changed}


def _changed(question: Question, names: tuple[str, ...]) -> dict[str, Any]:
    """What differs from how the user's config would train."""
    setup, configured = question.setup, question.configured
    return {name: value for name in names if (value := getattr(setup, name)) != getattr(configured, name)}


def training_section(draft: ConfigDraft, intervals: Intervals, *, packed: bool) -> dict[str, Any]:
    """What is recommended in the section `training`, beside the sizes of a step and a batch."""
    question = draft.question
    setup, baseline = question.setup, question.baseline
    given, data = (question.base.get(section, {}) for section in ("training", "data"))
    settings: dict[str, Any] = (
        {} if (given.get("max_steps") or 0) > 0 else {"num_train_epochs": baseline.num_train_epochs}
    )
    settings |= {name: rate for name in RATES if (rate := getattr(intervals, name)) is not None}
    if intervals.warmup_steps is not None:
        settings["warmup_steps"] = intervals.warmup_steps
    elif baseline.warmup_ratio is not None and "warmup_steps" not in given:
        settings["warmup_ratio"] = baseline.warmup_ratio
    if given.get("save_strategy") in (None, "steps"):
        settings["save_steps"] = intervals.save_steps
    if (data.get("eval_path") or data.get("eval_size")) and given.get("eval_strategy") in (None, "steps"):
        settings["eval_steps"] = intervals.eval_steps
    settings |= {name: getattr(intervals, name) for name in ("save_delay_steps", "logging_steps") if name in given}
    for name in ("save_steps", "eval_steps", "logging_steps", "warmup_steps"):
        if isinstance(value := given.get(name), float) and value < 1:  # a share of all steps, which holds as it is
            settings[name] = value
    settings |= _changed(question, _OF_TRAINING)
    if setup.attn_implementation != question.configured.attn_implementation:
        settings["attn_implementation"] = setup.attn_implementation
    if setup.optimizer != question.configured.optimizer:
        settings["optim"] = _OPTIMIZERS[setup.optimizer]
    compiled = setup.compiled if packed else baseline.compiled
    if "compile" not in given and compiled != packed:  # only what training would not do by itself
        settings["compile"] = compiled
    return settings
