"""A simulation as a config that can be trained with, and the reason for each of its values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from packtrain.core.numbers import about, counted, gib, percent, signed_percent
from packtrain.packing.packing_config import PackingConfig
from packtrain.planning.choice import RoomOption, shown_setting
from packtrain.planning.intervals import RATES, Intervals, derive_intervals
from packtrain.planning.question import Question
from packtrain.planning.study_values import PaddedRun, Reason, Simulation
from packtrain.planning.sweep import KEPT

_OPTIMIZERS = {"adamw": "adamw_torch_fused", "adamw_8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "sgd": "sgd"}
# Where a config says what a TrainingSetup holds.
_OF_MODEL = ("method", "lora_rank", "train_vision", "train_projector")
_OF_TRAINING = (
    *("master_weights", "sharding", "gradient_checkpointing", "vision_checkpointing", "vision_batch_patches"),
    "chunked_loss",
)
# Ways to say the size of a step that samples of a step replace.
_STEP_SIZES = ("packs_per_step", "effective_batch_unit", "gradient_accumulation_steps")
_BEST_FIT = PackingConfig(packing_length=1).packing_strategy
Sections = dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ConfigDraft:
    """What a config is written from."""

    question: Question
    simulation: Simulation
    padded: PaddedRun  # the user's own
    changes: tuple[RoomOption, ...] = ()

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
        """Samples of a step, as a config says them: the user's own, unless packs are so large that rates follow them.

        They are the same for any number of GPUs, and without packing.
        """
        return round(self.simulation.samples_per_step) if self.intervals.moved else self.question.samples_per_step

    @property
    def padded_intervals(self) -> Intervals:
        """For the padded run: the user's own, with what is missing filled in."""
        before = self.question.samples_per_step
        return derive_intervals(self.question.baseline, before=before, after=before, steps=self.padded.steps)


def packed_config(draft: ConfigDraft) -> Sections:
    """The user's config with what training with this packing changes in it."""
    simulation, packing = draft.simulation, draft.question.packing
    data: dict[str, Any] = {"packing": True, "packing_length": simulation.packing_length, **simulation.limits}
    if packing.packing_strategy != _BEST_FIT:
        data["packing_strategy"] = packing.packing_strategy
    training = {"effective_batch_size": draft.samples_per_step, **_training(draft, draft.intervals, packed=True)}
    return _changed(draft, data, training)


def padded_config(draft: ConfigDraft, run: PaddedRun) -> Sections:
    """The user's config for this padded run."""
    question, grouped = draft.question, run.order == "by_length"
    training: dict[str, Any] = {
        "per_device_train_batch_size": run.batch_size,
        "effective_batch_size": question.samples_per_step,
        **({"group_by_length": grouped} if grouped or question.baseline.group_by_length else {}),
        **_training(draft, draft.padded_intervals, packed=False),
    }
    if run.kernels == "packs" and question.setup.compiled:
        training["compile"] = True
    return _changed(draft, {"packing": False, "packing_length": draft.simulation.packing_length}, training)


def left_out(config: Mapping[str, Mapping[str, Any]], base: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Settings of the user's config that another one stands for now."""
    return {
        f"{section}.{name}": value
        for section, values in base.items()
        for name, value in values.items()
        if name not in config.get(section, {})
    }


def _changed(draft: ConfigDraft, data: Mapping[str, Any], training: Mapping[str, Any]) -> Sections:
    """What was said, with what is recommended in its place."""
    base = draft.question.base
    said = {name: value for name, value in base.get("training", {}).items() if name not in _STEP_SIZES}
    if "sharding" in training:  # a run refuses to be told twice
        others = ("deepspeed",) if training["sharding"] == "fsdp" else ("deepspeed", "fsdp", "fsdp_config")
        said = {name: value for name, value in said.items() if name not in others}
    if not data["packing"]:  # limits of packs have no effect without them, and their order is not one of batches
        of_packs = [name for name in base.get("data", {}) if name.endswith("_per_pack") or name == "balance"]
        kept = {name: value for name, value in base.get("data", {}).items() if name not in of_packs}
    else:
        kept = dict(base.get("data", {}))
    found: Sections = {
        "model": {**base.get("model", {}), **_model(draft.question)},
        "data": {**kept, **data},
        "training": {**said, **training},
    }
    return found | {name: dict(values) for name, values in base.items() if name not in found}


def _model(question: Question) -> dict[str, Any]:
    found, said = _different(question, _OF_MODEL), question.base.get("model", {})
    for part in ("train_vision", "train_projector"):  # which follow from the method where nothing is said
        if part not in said and found.get(part) == (question.setup.method == "full"):
            del found[part]
    return {"model_name_or_path": question.model, **found}


def _different(question: Question, names: tuple[str, ...]) -> dict[str, Any]:
    """What is recommended otherwise than the user's config would train."""
    setup, own = question.setup, question.configured
    return {name: value for name in names if (value := getattr(setup, name)) != getattr(own, name)}


def _training(draft: ConfigDraft, intervals: Intervals, *, packed: bool) -> dict[str, Any]:
    question = draft.question
    setup, base = question.setup, question.base
    said, evaluates = (
        base.get("training", {}),
        any(base.get("data", {}).get(name) for name in ("eval_path", "eval_size")),
    )
    found: dict[str, Any] = {} if (said.get("max_steps") or 0) > 0 else {"num_train_epochs": question.baseline.epochs}
    found |= {name: rate for name in RATES if (rate := getattr(intervals, name)) is not None}
    if intervals.warmup_steps is not None:
        found["warmup_steps"] = intervals.warmup_steps
    elif intervals.warmup_ratio is not None and "warmup_steps" not in said:
        found["warmup_ratio"] = intervals.warmup_ratio
    if said.get("save_strategy") in (None, "steps"):
        found["save_steps"] = intervals.save_steps
    if evaluates and said.get("eval_strategy") in (None, "steps"):
        found["eval_steps"] = intervals.eval_steps
    for name in ("save_delay_steps", "logging_steps"):
        if name in said:
            found[name] = getattr(intervals, name)
    for name in ("save_steps", "eval_steps", "logging_steps", "warmup_steps"):
        if isinstance(given := said.get(name), float) and given < 1:  # a share of all steps, which holds as it is
            found[name] = given
    found |= _different(question, _OF_TRAINING)
    if setup.attention != question.configured.attention:
        found["attn_implementation"] = setup.attention
    if setup.optimizer != question.configured.optimizer:
        found["optim"] = _OPTIMIZERS[setup.optimizer]
    compiled = setup.compiled if packed else question.baseline.compiled
    if "compile" not in said and compiled != packed:  # only what training would not do by itself
        found["compile"] = compiled
    return found


# ---- reasons


def packed_reasons(draft: ConfigDraft, why_length: str) -> tuple[Reason, ...]:
    """One line for each value of the config."""
    found = (
        *_data_reasons(draft, why_length),
        *_step_reasons(draft),
        *_interval_reasons(draft),
        *_setup_reasons(draft),
    )
    return _with_what_was(draft, found)


def padded_reasons(draft: ConfigDraft, run: PaddedRun) -> tuple[Reason, ...]:
    """What there is to say when nothing is packed, and this run is recommended."""
    padded, baseline = draft.padded, draft.question.baseline
    grouped = baseline.group_by_length
    length = draft.simulation.packing_length
    over = f"longer samples would be left out, but none is: the longest has {padded.worst.longest:,} tokens"
    if run.dropped:
        over = f"longer samples are left out: {run.dropped:,} of them, with up to {padded.worst.longest:,} tokens"
    found = [
        _reason("packing", "false", "false", "packing would not help here"),
        _reason(
            "packing_length",
            f"{padded.worst.longest:,} at most",
            f"{length:,}",
            f"{over}; with packing: true, the tokens of a pack",
        ),
    ]
    if run.batch_size != padded.batch_size:
        sizes = str(padded.batch_size), str(run.batch_size)
        found.append(_reason("per_device_train_batch_size", *sizes, "the fastest that fits"))
    if grouped != (run.order == "by_length"):
        less, more = percent(run.waste), percent(padded.waste)
        reason = f"{less} of these batches is padding, {more} of those of {baseline.name}"
        found.append(_reason("group_by_length", str(grouped).lower(), str(not grouped).lower(), reason))
    if draft.question.setup.compiled and not baseline.compiled:
        found.append(_reason("compile", "false", "true", "compiled layers are faster, after the first steps"))
    return _with_what_was(draft, (*found, *_setup_reasons(replace(draft, padded=run), packed=False)))


def _with_what_was(draft: ConfigDraft, reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """What the user has said stands beside each value; of a run that nobody trains there is nothing to say."""
    question = draft.question
    said = {name: value for values in question.base.values() for name, value in values.items()}

    def was(reason: Reason) -> str:
        if reason.parameter in said:
            return shown_setting(said[reason.parameter])
        return reason.baseline if question.baseline.today else ""

    return tuple(replace(reason, baseline=was(reason)) for reason in reasons)


def _last_step(packing: PackingConfig, one: Simulation) -> str:
    tail = one.packs % one.packs_per_step
    if not tail:
        return "the packs fill every step: there is nothing to drop"
    if packing.packing_drop_last:
        return f"the last step would have {counted(tail, 'pack')} only, which every epoch leaves out"
    return f"the last step has {counted(one.packs_per_step - tail, 'pack')} fewer; empty packs without loss complete it"


def _data_reasons(draft: ConfigDraft, why_length: str) -> list[Reason]:
    one, padded, packing = draft.simulation, draft.padded, draft.question.packing
    found = [
        _reason(
            "packing",
            "false",
            "true",
            f"{percent(padded.waste)} of what {draft.question.baseline.name} computes is padding",
        ),
        _reason("packing_length", f"{padded.worst.longest:,} at most", f"{one.packing_length:,}", why_length),
        _reason(
            "packing_strategy",
            "none",
            packing.packing_strategy,
            f"{counted(one.packs, 'pack')} where no packing can have under {one.bound:,}; fill {percent(one.fill)}",
        ),
    ]
    first = ", ".join(f"{resource} in {percent(share)}" for resource, share in one.fullest.items())
    needed = {change.setting: f"{change.reason}; " for change in draft.changes}
    found += [
        _reason(name, "no limit", f"{value:,}", f"{needed.get(name, '')}used up first in packs: {first}")
        for name, value in one.limits.items()
    ]
    return [
        *found,
        _reason(
            "overlong",
            packing.overlong,
            packing.overlong,
            f"{counted(one.samples_dropped, 'sample')} too long for a pack, named in the ledger"
            if one.samples_dropped
            else "every sample fits",
        ),
        _reason(
            "packing_min_fill_ratio",
            "none",
            f"{packing.packing_min_fill_ratio:g}",
            "only matters with windows: all samples are packed together here"
            if packing.packing_window is None
            else "emptier packs of a window are packed again with the next one",
        ),
        _reason(
            "packing_drop_last",
            "false",
            str(packing.packing_drop_last).lower(),
            _last_step(packing, one),
        ),
        _reason(
            "packing_buffer",
            "none",
            f"{packing.packing_buffer:,}",
            "look-ahead for streams that cannot be measured first",
        ),
        _reason(
            "eval_packing", "false", "true", "evaluation saves the same padding, and its loss is summed over tokens"
        ),
    ]


def _step_reasons(draft: ConfigDraft) -> list[Reason]:
    question, one = draft.question, draft.simulation
    baseline, gpus = question.baseline, question.setup.gpus
    size, before = baseline.per_device_batch_size, question.samples_per_step
    packs = counted(one.packs_per_step, "pack")
    whose = "asked for" if baseline.sets_step and not baseline.today else f"of {baseline.name}"
    return [
        _reason(
            "effective_batch_size",
            f"{before:,}",
            f"{draft.samples_per_step:,}",
            f"samples per optimizer step, on any number of GPUs, packed or not; here {packs} of "
            f"{about(one.samples_per_pack)} samples make {one.samples_per_step:,.0f} "
            f"({signed_percent(one.samples_per_step / before - 1)} against the {before:,} {whose})",
        ),
        _reason(
            "per_device_train_batch_size",
            str(size),
            "1 (follows)",
            "one pack is one row; a longer pack replaces more rows",
        ),
        _reason(
            "gradient_accumulation_steps",
            str(baseline.accumulation(gpus)),
            f"{one.micro_batches} (follows)",
            f"{packs} per step on {counted(gpus, 'GPU')}",
        ),
        _reason(
            "num_train_epochs",
            str(baseline.epochs),
            str(question.baseline.epochs),
            f"{counted(one.steps, 'step')} an epoch"
            + (f" instead of {draft.padded.steps:,}" if baseline.today and one.steps != draft.padded.steps else ""),
        ),
    ]


def _interval_reasons(draft: ConfigDraft) -> list[Reason]:
    baseline, new = draft.question.baseline, draft.intervals
    found = []
    for name in RATES:
        rate = getattr(baseline, name)
        if rate is None:
            continue
        reason = "unchanged: a step has about as many samples as before"
        if new.moved:
            reason = (
                f"samples per step x {new.factor:.2f}: the square root of it for Adam; at most {rate * new.factor:.3g} "
                "by the linear rule"
            )
        found.append(_reason(name, f"{rate:g}", f"{getattr(new, name):g}", reason))
    if baseline.warmup_steps is not None:
        reason = "as many samples as before"
        found.append(_reason("warmup_steps", str(baseline.warmup_steps), str(new.warmup_steps), reason))
    elif baseline.warmup_ratio is not None:
        steps = round(new.steps * baseline.epochs * baseline.warmup_ratio)
        reason = f"a share of the steps: {steps:,} of them now"
        found.append(_reason("warmup_ratio", f"{baseline.warmup_ratio:g}", f"{baseline.warmup_ratio:g}", reason))
    written = _training(draft, new, packed=True)
    for name, noun in (("eval_steps", "evaluation"), ("save_steps", "save"), ("logging_steps", "log line")):
        if name in written:
            found.append(_interval_reason(draft, name, noun))
    if (delay := baseline.save_delay_steps) is not None:
        kept = new.save_delay_steps == delay or abs(new.save_delay_steps * new.factor / delay - 1) < KEPT
        reason = "after as many samples as before" if kept else f"half of the run: it has {new.steps:,} steps an epoch"
        found.append(_reason("save_delay_steps", str(delay), str(new.save_delay_steps), reason))
    return found


def _interval_reason(draft: ConfigDraft, name: str, noun: str) -> Reason:
    new, given = getattr(draft.intervals, name), getattr(draft.question.baseline, name)
    one = draft.simulation
    times, whole = one.steps / new, one.samples_packed * draft.question.baseline.epochs
    seen = min(round(new * one.samples_per_step), whole)
    reason = f"{times:.3g} {noun}{'' if round(times, 2) == 1 else 's'} an epoch, one every {seen:,} samples"
    if given is not None:
        reason += f" (every {given * draft.question.samples_per_step:,} before)"
    return _reason(name, "not set" if given is None else f"{given:,}", f"{new:,}", reason)


def _setup_reasons(draft: ConfigDraft, *, packed: bool = True) -> list[Reason]:
    setup, one = draft.question.setup, draft.simulation
    on = str(setup.gradient_checkpointing).lower()
    used, what = (one.memory_bytes, "pack") if packed else (draft.padded.memory_bytes, "batch")
    memory = f"{gib(used)} of {gib(draft.question.gpu.memory_bytes)} with the worst {what}"
    changed = [
        _reason(change.setting, change.before, change.after, change.reason)
        for change in draft.changes
        if change.setting not in one.limits
    ]
    if packed and setup.compiled and not draft.question.baseline.compiled:
        why = "packs have one shape, for which layers are compiled on a GPU; training.compile decides it"
        changed.append(_reason("compile", "false", "true (follows)", why))
    if any(change.setting == "gradient_checkpointing" for change in draft.changes):
        return changed
    return [_reason("gradient_checkpointing", on, on, memory), *changed]


def _reason(parameter: str, baseline: str, packing: str, reason: str) -> Reason:
    return Reason(parameter=parameter, baseline=baseline, packing=packing, reason=reason)
