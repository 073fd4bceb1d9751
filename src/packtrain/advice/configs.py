"""A simulation as a config that can be trained with, and the reason for each of its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from packtrain.advice.intervals import RATES, Intervals, derive_intervals
from packtrain.advice.question import Question
from packtrain.advice.room import Change
from packtrain.advice.values import PaddedRun, Reason, Simulation
from packtrain.advice.words import counted, gib, percent, signed_percent
from packtrain.costs.table import CostTable
from packtrain.estimates.values import TrainingSetup

_OPTIMIZERS = {"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit", "adafactor": "adafactor", "sgd": "sgd"}
# Settings of a TrainingSetup that a config names only where they are not what training does by default.
_DEFAULT = TrainingSetup()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Draft:
    """What a config is written from."""

    question: Question
    table: CostTable
    simulation: Simulation
    padded: PaddedRun  # the user's own
    changes: tuple[Change, ...] = ()

    @property
    def intervals(self) -> Intervals:
        """For the packed run."""
        question, simulation = self.question, self.simulation
        return derive_intervals(
            question.baseline,
            before=question.samples_per_step,
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


def packed_config(draft: Draft) -> dict[str, Any]:
    """Sections model, data and training, for training with this packing."""
    simulation, packing = draft.simulation, draft.question.packing
    data: dict[str, Any] = {
        **_data(draft.table),
        "packing": True,
        "packing_length": simulation.packing_length,
        "packing_strategy": packing.packing_strategy,
        **simulation.limits,
        "overlong": packing.overlong,
        "packing_min_fill_ratio": packing.packing_min_fill_ratio,
        "packing_drop_last": packing.packing_drop_last,
        "packing_buffer": packing.packing_buffer,
        "eval_packing": True,
    }
    if packing.packing_window is not None:
        data["packing_window"] = packing.packing_window
    training = {
        "effective_batch_size": draft.samples_per_step,
        **_training(draft.question, draft.intervals, packed=True),
    }
    return {"model": _model(draft.question), "data": data, "training": training}


def padded_config(draft: Draft, *, group_by_length: bool) -> dict[str, Any]:
    """The same sections without packing."""
    question, size = draft.question, draft.question.baseline.per_device_batch_size
    data = {
        **_data(draft.table),
        "packing": False,
        "packing_length": draft.simulation.packing_length,
        "overlong": question.packing.overlong,
        "eval_packing": False,
    }
    training: dict[str, Any] = {
        "per_device_train_batch_size": size,
        "per_device_eval_batch_size": size,
        "effective_batch_size": question.samples_per_step,
        **({"group_by_length": True} if group_by_length else {}),
        **_training(question, draft.padded_intervals, packed=False),
    }
    return {"model": _model(question), "data": data, "training": training}


def _model(question: Question) -> dict[str, Any]:
    setup = question.setup
    found: dict[str, Any] = {"model_name_or_path": question.model}
    # Beside adapters parts learn only when that is said, otherwise unless it is said that they do not.
    usual = setup.method == "full"
    parts = {name: getattr(setup, name) for name in ("train_vision", "train_connector")}
    found |= {name: learns for name, learns in parts.items() if learns != usual}
    return found if setup.method == "full" else {**found, "method": setup.method, "lora_rank": setup.lora_rank}


def _data(table: CostTable) -> dict[str, Any]:
    """Where the data is, and the media limits that the costs hold for."""
    request = table.summary["inputs"]["request"]
    sources = table.places.sources
    found: dict[str, Any] = {"dataset_path": sources[0].path} if len(sources) == 1 else {}
    limits = {**{name: value for name, value in request.get("limits", {}).items() if value is not None}}
    limits |= table.limits.given()
    if "template_date" in request:  # another day would be other texts than these costs are of
        found["template_date"] = request["template_date"]
    return {**found, "processor_config": limits} if limits else found


def _training(question: Question, intervals: Intervals, *, packed: bool) -> dict[str, Any]:
    setup = question.setup
    compiled = setup.compiled if packed else question.baseline.compiled
    compiling = {} if compiled == packed else {"compile": compiled}  # only what training would not do by itself
    found: dict[str, Any] = {"num_train_epochs": question.epochs}
    found |= {name: rate for name in RATES if (rate := getattr(intervals, name)) is not None}
    if intervals.warmup_steps is not None:
        found["warmup_steps"] = intervals.warmup_steps
    elif intervals.warmup_ratio is not None:
        found["warmup_ratio"] = intervals.warmup_ratio
    found |= {
        name: getattr(intervals, name) for name in ("eval_steps", "save_steps", "save_delay_steps", "logging_steps")
    }
    found |= {
        "gradient_checkpointing": setup.gradient_checkpointing,
        "bf16": True,
        "optim": _OPTIMIZERS[setup.optimizer],
    }
    named = ("master_weights", "sharding", "vision_checkpointing", "vision_batch_patches", "chunked_loss", "attention")
    for name in named:
        if getattr(setup, name) != getattr(_DEFAULT, name):
            found[name] = getattr(setup, name)
    return {**found, **compiling, "seed": question.seed}


# ---- reasons


def packed_reasons(draft: Draft, why_length: str) -> tuple[Reason, ...]:
    """One line for each value of the config."""
    return (*_data_reasons(draft, why_length), *_step_reasons(draft), *_interval_reasons(draft), *_setup_reasons(draft))


def padded_reasons(draft: Draft, *, group_by_length: bool) -> tuple[Reason, ...]:
    """What there is to say when nothing is packed."""
    padded = draft.padded
    found = [Reason(parameter="packing", baseline="false", packing="false", reason="packing would not help here")]
    if group_by_length and not draft.question.baseline.group_by_length:
        reason = f"padding is {percent(padded.waste)} of what random batches compute, and nearly none by length"
        found.append(Reason(parameter="group_by_length", baseline="false", packing="true", reason=reason))
    return (*found, *_setup_reasons(draft))


def _data_reasons(draft: Draft, why_length: str) -> list[Reason]:
    one, padded, packing = draft.simulation, draft.padded, draft.question.packing
    empty = one.steps * one.packs_per_step - one.packs
    found = [
        _reason(
            "packing",
            "false",
            "true",
            f"{percent(padded.waste)} of what padded batches compute is padding; packs compute none",
        ),
        _reason("packing_length", f"{padded.worst.longest:,} at most", f"{one.packing_length:,}", why_length),
        _reason(
            "packing_strategy",
            "none",
            packing.packing_strategy,
            f"{one.packs:,} packs where no packing can have fewer than {one.bound:,}; fill {percent(one.fill)}",
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
            f"{counted(one.samples_dropped, 'sample')} fit no pack; every one is in the ledger",
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
            f"the last step has {counted(empty, 'pack')} fewer; empty packs without loss complete it"
            if empty
            else "the packs fill every step: there is nothing to drop",
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


def _step_reasons(draft: Draft) -> list[Reason]:
    question, one = draft.question, draft.simulation
    baseline, gpus = question.baseline, question.setup.gpus
    size, before = baseline.per_device_batch_size, question.samples_per_step
    packs = counted(one.packs_per_step, "pack")
    return [
        _reason(
            "effective_batch_size",
            f"{before:,}",
            f"{draft.samples_per_step:,}",
            f"samples of a step, on any number of GPUs and without packing too; here {packs} of "
            f"{one.samples_per_pack:.1f} make {one.samples_per_step:,.0f} "
            f"({signed_percent(one.samples_per_step / before - 1)})",
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
            f"{one.micro_steps} (follows)",
            f"{packs} per step on {counted(gpus, 'GPU')}",
        ),
        _reason(
            "num_train_epochs",
            str(baseline.epochs),
            str(question.epochs),
            f"every sample is seen as often as before; {one.steps:,} steps an epoch instead of {draft.padded.steps:,}",
        ),
    ]


def _interval_reasons(draft: Draft) -> list[Reason]:
    baseline, new = draft.question.baseline, draft.intervals
    found = []
    for name in RATES:
        rate = getattr(baseline, name)
        if rate is None:
            continue
        reason = "none needed: a step has about as many samples as before"
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
        reason = (
            f"a share of the steps: {round(new.steps * draft.question.epochs * baseline.warmup_ratio):,} of them now"
        )
        found.append(_reason("warmup_ratio", f"{baseline.warmup_ratio:g}", f"{baseline.warmup_ratio:g}", reason))
    for name, noun in (("eval_steps", "evaluation"), ("save_steps", "save"), ("logging_steps", "log line")):
        found.append(_interval_reason(draft, name, noun))
    delay = baseline.save_delay_steps
    found.append(
        _reason(
            "save_delay_steps",
            "not set" if delay is None else str(delay),
            str(new.save_delay_steps),
            "one interval: nothing to keep before" if delay is None else "after as many samples as before",
        )
    )
    return found


def _interval_reason(draft: Draft, name: str, noun: str) -> Reason:
    new, given = getattr(draft.intervals, name), getattr(draft.question.baseline, name)
    times = draft.simulation.steps / new
    seen = round(new * draft.simulation.samples_per_step)
    reason = f"{times:.1f} {noun}s an epoch, one every {seen:,} samples"
    if given is not None:
        reason += f" (every {given * draft.question.samples_per_step:,} before)"
    return _reason(name, "not set" if given is None else f"{given:,}", f"{new:,}", reason)


def _setup_reasons(draft: Draft) -> list[Reason]:
    setup, one = draft.question.setup, draft.simulation
    on = str(setup.gradient_checkpointing).lower()
    memory = f"{gib(one.memory_bytes)} of {gib(draft.question.gpu.memory_bytes)} with the worst pack"
    changed = [
        _reason(change.setting, change.before, change.after, change.reason)
        for change in draft.changes
        if change.setting not in one.limits
    ]
    if setup.compiled and not draft.question.baseline.compiled:
        why = "packs have one shape, for which layers are compiled on a GPU; training.compile decides it"
        changed.append(_reason("compile", "false", "true (follows)", why))
    if any(change.setting == "gradient_checkpointing" for change in draft.changes):
        return changed
    return [_reason("gradient_checkpointing", on, on, memory), *changed]


def _reason(parameter: str, baseline: str, packing: str, reason: str) -> Reason:
    return Reason(parameter=parameter, baseline=baseline, packing=packing, reason=reason)
