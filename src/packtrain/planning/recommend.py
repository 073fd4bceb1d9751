"""The recommendation: pack or not, with which settings and why, and what else could be done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from packtrain.core.numbers import counted, decimal, duration, exact_percent, gib, percent, signed_percent
from packtrain.measuring.table import CostTable
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.packing_config import PackingConfig
from packtrain.planning.choice import Choice, Room, changes_for, conservative, efficient, shown_setting
from packtrain.planning.clock import PassColumns
from packtrain.planning.configs import RATES, ConfigDraft, packed_config, padded_config, training_section
from packtrain.planning.question import Question
from packtrain.planning.study_values import Alternative, PaddedRun, Reason, Recommendation, Simulation, Trouble
from packtrain.planning.sweep import KEPT, MediaOption

HELPS_LITTLE, HELPS = 0.70, 0.50  # mean length / packing length: rules of thumb, shown beside what was measured
WORTH_IT = 1.05  # how much faster packing has to be with the same kernels
CHEAP = 0.5  # seconds of padding, of what its share of the tokens would take: below it the verdict explains why


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Findings:
    """What the recommendation is made from."""

    question: Question
    table: CostTable
    plan: PackPlan  # of the chosen simulation
    passes: PassColumns  # its first epoch
    simulations: Sequence[Simulation]
    choice: Choice
    padded: Sequence[PaddedRun]  # the user's own first, the other order second
    best: PaddedRun  # the fastest with the kernels that packs have, over the same samples
    padding_cost: float  # share of its time that goes into padding
    mean_tokens: float  # of the samples in packs
    room: Room | None  # what was changed so that something fits
    media: Sequence[MediaOption]  # the same packing with smaller images or fewer frames

    @property
    def chosen(self) -> Simulation:
        """The recommended simulation."""
        return self.choice.simulation

    @property
    def config(self) -> PackingConfig:
        """How the recommended simulation is packed."""
        return self.question.packing.limited(self.chosen.settings)

    @property
    def changes(self) -> tuple[Reason, ...]:
        """What was changed so that the recommended simulation fits."""
        return changes_for(self.room, self.chosen) if self.room else ()

    @property
    def gain(self) -> float:
        """How much faster packing is by itself, not by the kernels that come with it."""
        return self.chosen.tokens_per_second / self.best.tokens_per_second

    @property
    def helps(self) -> bool:
        """Is packing possible and worth it, and no padding that fits predicted to be faster?"""
        if self.question.unpackable:
            return False
        one = self.chosen
        padded = max((run.tokens_per_second for run in self.padded if run.fits), default=0.0)
        return self.gain >= WORTH_IT and one.samples_per_pack > 1 and one.tokens_per_second > padded

    @property
    def recommended(self) -> Simulation | PaddedRun:
        """What to train: the chosen packing, or the best padded run."""
        return self.chosen if self.helps else self.best

    @property
    def better_padded(self) -> PaddedRun:
        """The fastest padded run that fits, with the kernels that padded batches have; else the baseline."""
        fitting = [run for run in self.padded if run.fits]
        return max(fitting, key=lambda run: run.tokens_per_second, default=self.padded[0])


def recommend(findings: Findings, advice: tuple[str, ...], trouble: tuple[Trouble, ...]) -> Recommendation:
    """The findings in words and settings."""
    own, best = findings.padded[0], findings.best
    draft = ConfigDraft(question=findings.question, simulation=findings.chosen, padded=own, changes=findings.changes)
    packed = findings.helps
    return Recommendation(
        packing=packed,
        verdict=_verdict(findings) if packed else _do_not_pack(findings),
        simulation=findings.simulations.index(findings.chosen),
        config=packed_config(draft) if packed else padded_config(draft, best),
        base=findings.question.base,
        reasons=_packed_reasons(draft, findings.choice.reason) if packed else _padded_reasons(draft, best),
        alternatives=() if findings.question.unpackable else _alternatives(findings, draft),
        advice=advice,
        trouble=trouble,
        mean_share=findings.mean_tokens / findings.chosen.packing_length,
        rule_of_thumb=_rule_of_thumb(findings),
    )


def _verdict(findings: Findings) -> str:
    """One sentence with the numbers that decide."""
    one, own, best, question = findings.chosen, findings.padded[0], findings.best, findings.question
    text = (
        f"Pack into {one.packing_length:,} tokens: {findings.gain:.2f} times as fast as {_best_padding(best)}, "
        f"{one.speedup:.2f} times as fast as {question.baseline.description}. An epoch takes about "
        f"{duration(one.seconds)} on {question.setup.gpus} x {question.gpu.name} instead of {duration(best.seconds)} "
        f"and {duration(own.seconds)}, with {counted(one.packs, 'pack')}, {percent(one.fill)} full, "
        f"{one.samples_per_step:,.0f} samples per step, and {gib(one.memory_bytes)} of "
        f"{gib(question.gpu.memory_bytes)}"
    )
    if not one.fits:
        return f"{text}; this does not fit with a tenth of it free, and no option that was tried makes it fit."
    return f"{text}{_made_room(findings)}"


def _made_room(findings: Findings) -> str:
    """What was changed so that something fits; of an optimizer without fp32 masters also the price."""
    question, changes = findings.question, findings.changes
    if not changes:
        return "."
    text = f"; that fits because of {', '.join(f'{change.parameter} {change.packing}' for change in changes)}."
    if not any(change.parameter == "optimizer" for change in changes):
        return text
    lora = question.memory_of(findings.chosen.worst, replace(question.setup, optimizer="adamw", method="lora")).total
    return (
        f"{text} The price: weights have no fp32 master copies, so updates below their precision are lost, most of "
        f"them at low learning rates; method: lora has them, trains only adapters and needs {gib(lora)}."
    )


def _do_not_pack(findings: Findings) -> str:
    one, best, padded, gain = findings.chosen, findings.best, findings.better_padded, findings.gain
    if findings.question.unpackable:
        why = f"is not possible with this model ({findings.question.unpackable})"
    elif gain >= WORTH_IT:
        share = one.tokens_per_second / padded.tokens_per_second
        why = f"would be {share:.2f} times as fast as batches of {padded.batch_size}, {_order(padded)}"
    elif gain < 1:
        why = f"would be slower than {_best_padding(best)}, {gain:.2f} times as fast"
    else:
        why = f"would be {gain:.2f} times as fast as {_best_padding(best)}, and less than {WORTH_IT} is not worth it"
    padding = f"The recommended batches of {best.batch_size} are {percent(best.waste)} padding"
    if (cost := findings.padding_cost) <= CHEAP * best.waste:
        others = "launches, fixed costs and the vision encoder" if best.worst.patches else "launches and fixed costs"
        padding += f", which takes only {percent(cost)} of the time: it goes into {others}, not into tokens"
    return (
        f"Do not pack: packing {why}. {padding}; a pack of {one.packing_length:,} tokens would hold "
        f"{decimal(one.samples_per_pack)} samples{_made_room(findings)}"
    )


def _best_padding(best: PaddedRun) -> str:
    return f"the best padding with the same kernels (batches of {best.batch_size}, {_order(best)})"


def _order(run: PaddedRun) -> str:
    return "grouped by length" if run.order == "by_length" else "random order"


def _rule_of_thumb(findings: Findings) -> str:
    """What the ratio of mean length to packing length says, beside the measured padding."""
    one, own, mean = findings.chosen, findings.padded[0], findings.mean_tokens
    length, little, helps = one.packing_length, exact_percent(HELPS_LITTLE), exact_percent(HELPS)
    waste = {run.order: percent(run.waste) for run in findings.padded[:2]}
    if mean / length > HELPS_LITTLE:
        rule = f"above {little}, so by the rule of thumb packing does not help."
    elif mean / length < HELPS:
        rule = f"below {helps}, so by the rule of thumb packing helps."
    else:
        rule = f"between {helps} and {little}, where the rule of thumb says nothing."
    return (
        f"The mean sample has {mean:,.0f} tokens, {percent(mean / length)} of {length:,}: {rule} "
        f"{waste['random']} of what random batches of {own.batch_size} compute is padding, {waste['by_length']} when "
        f"grouped by length. Predicted speed decides: packing is {findings.gain:.2f} times as fast as the best padding "
        f"with the same kernels, {one.speedup:.2f} times as fast as {findings.question.baseline.name}."
    )


def _alternatives(findings: Findings, draft: ConfigDraft) -> tuple[Alternative, ...]:
    simulations, chosen = findings.simulations, findings.chosen
    more = efficient(simulations, chosen)
    less = conservative(simulations, chosen, besides=more.simulation if more else None)
    named: tuple[tuple[Literal["efficient", "conservative"], Choice | None], ...]
    named = (("efficient", more), ("conservative", less))
    return tuple(
        Alternative(
            name=name,
            simulation=simulations.index(other.simulation),
            reason=other.reason,
            config=packed_config(replace(draft, simulation=other.simulation)),
        )
        for name, other in named
        if other is not None
    )


# ---- reasons


def _packed_reasons(draft: ConfigDraft, why_length: str) -> tuple[Reason, ...]:
    """One line for each value of the config."""
    reasons = (*_data_reasons(draft, why_length), *_step_reasons(draft), *_interval_reasons(draft))
    memory = _memory_reason(draft, draft.simulation.memory_bytes, "pack")
    compiled: tuple[Reason, ...] = ()
    if draft.question.setup.compiled and not draft.question.baseline.compiled:
        why = "packs have static shapes, so their layers are compiled on a GPU; training.compile decides it"
        compiled = (Reason("compile", "false", "true (derived)", why),)
    return _with_old_values(draft.question, (*reasons, *memory, *_changed_settings(draft), *compiled))


def _padded_reasons(draft: ConfigDraft, run: PaddedRun) -> tuple[Reason, ...]:
    """What there is to say when nothing is packed, and this run is recommended."""
    padded, baseline = draft.padded, draft.question.baseline
    longest = f"{padded.worst.longest:,}"
    over = f"longer samples would be left out, but none is: the longest has {longest} tokens"
    if run.dropped:
        over = f"longer samples are left out: {run.dropped:,} of them, with up to {longest} tokens"
    reasons = [
        Reason("packing", "false", "false", draft.question.unpackable or "packing would not help here"),
        Reason(
            "packing_length",
            f"{longest} at most",
            f"{draft.simulation.packing_length:,}",
            f"{over}; with packing: true, the tokens of a pack",
        ),
    ]
    if run.batch_size != padded.batch_size:
        sizes = str(padded.batch_size), str(run.batch_size)
        reasons.append(Reason("per_device_train_batch_size", *sizes, "the fastest that fits"))
    grouped = run.order == "by_length"
    if grouped != baseline.group_by_length:
        reason = f"{percent(run.waste)} of these batches is padding, {percent(padded.waste)} in {baseline.name}"
        reasons.append(Reason("group_by_length", shown_setting(not grouped), shown_setting(grouped), reason))
    if draft.question.setup.compiled and not baseline.compiled:
        reasons.append(Reason("compile", "false", "true", "compiled layers are faster, after the first steps"))
    memory = _memory_reason(draft, run.memory_bytes, "batch")
    return _with_old_values(draft.question, (*reasons, *memory, *_changed_settings(draft)))


def _with_old_values(question: Question, reasons: Iterable[Reason]) -> tuple[Reason, ...]:
    """The user's value beside each; a run that nobody trains has none."""
    given = {name: value for values in question.base.values() for name, value in values.items()}

    def old(reason: Reason) -> str:
        if reason.parameter in given:
            return shown_setting(given[reason.parameter])
        return reason.baseline if question.baseline.today else ""

    return tuple(replace(reason, baseline=old(reason)) for reason in reasons)


def _data_reasons(draft: ConfigDraft, why_length: str) -> list[Reason]:
    one, padded, packing = draft.simulation, draft.padded, draft.question.packing
    faster = f"predicted to be {one.speedup:.2f} times as fast as {draft.question.baseline.name}"
    bound = f"{counted(one.packs, 'pack')}, where any packing needs at least {one.bound:,}; {percent(one.fill)} full"
    first = ", ".join(f"{resource} in {percent(share)}" for resource, share in one.fullest.items())
    needed = {change.parameter: f"{change.reason}; " for change in draft.changes}
    limits = [
        Reason(name, "no limit", f"{value:,}", f"{needed.get(name, '')}used up first in packs: {first}")
        for name, value in one.limits.items()
    ]
    overlong = "every sample fits"
    if one.samples_dropped:
        overlong = f"{counted(one.samples_dropped, 'sample')} too long for a pack, listed in ledger.jsonl"
    refilled = "emptier packs of a window are packed again with the next one"
    if packing.packing_window is None:
        refilled = "only matters with windows: all samples are packed together here"
    return [
        Reason("packing", "false", "true", faster),
        Reason("packing_length", f"{padded.worst.longest:,} at most", f"{one.packing_length:,}", why_length),
        Reason("packing_strategy", "none", packing.packing_strategy, bound),
        *limits,
        Reason("overlong", packing.overlong, packing.overlong, overlong),
        Reason("packing_min_fill_ratio", "none", f"{packing.packing_min_fill_ratio:g}", refilled),
        Reason("packing_drop_last", "false", shown_setting(packing.packing_drop_last), _last_step(draft)),
        Reason(
            *("packing_buffer", "none", f"{packing.packing_buffer:,}"),
            "look-ahead for streams that cannot be measured first",
        ),
        Reason(
            "eval_packing", "false", "true", "evaluation saves the same padding, and its loss is summed over tokens"
        ),
    ]


def _last_step(draft: ConfigDraft) -> str:
    one = draft.simulation
    tail = one.packs % one.packs_per_step
    if not tail:
        return "the packs fill every step: there is nothing to drop"
    if draft.question.packing.packing_drop_last:
        return f"the last step would have {counted(tail, 'pack')} only, which every epoch leaves out"
    return f"the last step has {counted(one.packs_per_step - tail, 'pack')} fewer; empty packs without loss complete it"


def _step_reasons(draft: ConfigDraft) -> list[Reason]:
    question, one = draft.question, draft.simulation
    baseline, gpus, before = question.baseline, question.setup.gpus, question.samples_per_step
    packs = counted(one.packs_per_step, "pack")
    source = "requested" if baseline.sets_step and not baseline.today else f"of {baseline.name}"
    size = (
        f"samples per optimizer step, on any number of GPUs, packed or not; here {packs} of "
        f"{one.samples_per_pack:,.1f} samples on average make {one.samples_per_step:,.0f} "
        f"({signed_percent(one.samples_per_step / before - 1)} against the {before:,} {source})"
    )
    steps = f"{counted(one.steps, 'step')} an epoch"
    if baseline.today and one.steps != draft.padded.steps:
        steps += f" instead of {draft.padded.steps:,}"
    return [
        Reason("effective_batch_size", f"{before:,}", f"{draft.samples_per_step:,}", size),
        Reason(
            *("per_device_train_batch_size", str(baseline.per_device_train_batch_size), "1 (derived)"),
            "one pack is one row; a longer pack replaces more rows",
        ),
        Reason(
            *("gradient_accumulation_steps", str(baseline.accumulation(gpus)), f"{one.micro_batches} (derived)"),
            f"{packs} per step on {counted(gpus, 'GPU')}",
        ),
        Reason("num_train_epochs", str(baseline.num_train_epochs), str(baseline.num_train_epochs), steps),
    ]


def _interval_reasons(draft: ConfigDraft) -> list[Reason]:
    baseline, new = draft.question.baseline, draft.intervals
    reasons = []
    for name in RATES:
        if (rate := getattr(baseline, name)) is None:
            continue
        reason = "unchanged: a step has about as many samples as before"
        if new.moved:
            reason = (
                f"samples per step x {new.factor:.2f}: scaled by the square root of it, for Adam; the linear rule "
                f"would give {rate * new.factor:.3g}"
            )
        reasons.append(Reason(name, f"{rate:g}", f"{getattr(new, name):g}", reason))
    if baseline.warmup_steps is not None:
        reasons.append(
            Reason("warmup_steps", str(baseline.warmup_steps), str(new.warmup_steps), "as many samples as before")
        )
    elif (ratio := baseline.warmup_ratio) is not None:
        steps = round(new.steps * baseline.num_train_epochs * ratio)
        reasons.append(Reason("warmup_ratio", f"{ratio:g}", f"{ratio:g}", f"a share of all steps: {steps:,} now"))
    written = training_section(draft, new, packed=True)
    for name, noun in (("eval_steps", "evaluation"), ("save_steps", "save"), ("logging_steps", "log line")):
        if name in written:
            reasons.append(_interval_reason(draft, name, noun))
    if (delay := baseline.save_delay_steps) is not None:
        kept = new.save_delay_steps == delay or abs(new.save_delay_steps * new.factor / delay - 1) < KEPT
        reason = (
            "after as many samples as before"
            if kept
            else f"half of the run: it has {counted(new.steps, 'step')} an epoch"
        )
        reasons.append(Reason("save_delay_steps", str(delay), str(new.save_delay_steps), reason))
    return reasons


def _interval_reason(draft: ConfigDraft, name: str, noun: str) -> Reason:
    new, given = getattr(draft.intervals, name), getattr(draft.question.baseline, name)
    one = draft.simulation
    times, whole = one.steps / new, one.samples_packed * draft.question.baseline.num_train_epochs
    every = min(round(new * one.samples_per_step), whole)
    reason = f"{times:.3g} {noun}{'' if round(times, 2) == 1 else 's'} an epoch, one every {every:,} samples"
    if given is not None:
        reason += f" (every {given * draft.question.samples_per_step:,} before)"
    return Reason(name, "not set" if given is None else f"{given:,}", f"{new:,}", reason)


def _changed_settings(draft: ConfigDraft) -> list[Reason]:
    """What was changed to make room; limits have a reason of their own."""
    return [change for change in draft.changes if change.parameter not in draft.simulation.limits]


def _memory_reason(draft: ConfigDraft, memory_bytes: int, what: str) -> tuple[Reason, ...]:
    if any(change.parameter == "gradient_checkpointing" for change in draft.changes):
        return ()
    on = shown_setting(draft.question.setup.gradient_checkpointing)
    memory = f"{gib(memory_bytes)} of {gib(draft.question.gpu.memory_bytes)} with the worst {what}"
    return (Reason("gradient_checkpointing", on, on, memory),)
