"""The recommendation: pack or not, with which settings, why, and what else could be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from packtrain.core.numbers import about, counted, duration, gib, limits_text, percent, whole_percent
from packtrain.measuring.table import CostTable
from packtrain.planning.choice import Choice, Room, RoomOption, changes_for, conservative, efficient
from packtrain.planning.configs import ConfigDraft, packed_config, packed_reasons, padded_config, padded_reasons
from packtrain.planning.question import Question
from packtrain.planning.study_values import Alternative, PaddedRun, Recommendation, Simulation, Trouble
from packtrain.planning.sweep import MediaOption

HELPS_LITTLE, HELPS = 0.70, 0.50  # mean length / packing length: rules of thumb, shown beside what was measured
WORTH_IT = 1.05  # how much faster packing has to be with the same kernels
CHEAP = 0.5  # seconds of padding, of what its share of the tokens would take: below it the reason is said


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Findings:
    """What the recommendation is made from."""

    question: Question
    table: CostTable
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
        return self.simulations[self.choice.simulation]

    @property
    def changes(self) -> tuple[RoomOption, ...]:
        """What was changed so that the recommended simulation fits."""
        return changes_for(self.room, self.chosen) if self.room else ()

    @property
    def gain(self) -> float:
        """How much faster packing is by itself, not by the kernels that come with it."""
        return self.chosen.tokens_per_second / self.best.tokens_per_second

    @property
    def helps(self) -> bool:
        """Is packing worth it, and no padding that fits predicted to be faster?"""
        one = self.chosen
        padded = max((run.tokens_per_second for run in self.padded if run.fits), default=0.0)
        return self.gain >= WORTH_IT and one.samples_per_pack > 1 and one.tokens_per_second > padded

    @property
    def better_padded(self) -> PaddedRun:
        """The fastest padded run that fits, with the kernels that padded batches have; else the baseline."""
        fitting = [run for run in self.padded if run.fits]
        return max(fitting, key=lambda run: run.tokens_per_second, default=self.padded[0])

    def waste(self, order: str) -> float:
        """The measured padding with the user's batch size."""
        return next(run.waste for run in self.padded if run.order == order)


def recommend(found: Findings, advice: tuple[str, ...], trouble: tuple[Trouble, ...]) -> Recommendation:
    """Put into words and settings what was found."""
    draft = ConfigDraft(
        question=found.question,
        simulation=found.chosen,
        padded=found.padded[0],
        changes=found.changes,
    )
    if found.helps:
        config, reasons = packed_config(draft), packed_reasons(draft, found.choice.reason)
    else:
        config, reasons = padded_config(draft, found.best), padded_reasons(draft, found.best)
    return Recommendation(
        packing=found.helps,
        verdict=verdict(found),
        simulation=found.choice.simulation,
        config=config,
        base=found.question.base,
        reasons=reasons,
        alternatives=_alternatives(found, draft),
        advice=advice,
        trouble=trouble,
        mean_share=found.mean_tokens / found.chosen.packing_length,
        rule_of_thumb=rule_of_thumb(found),
    )


def verdict(found: Findings) -> str:
    """One sentence with the numbers that decide."""
    one, own, question = found.chosen, found.padded[0], found.question
    best = f"the best padding with the same kernels (batches of {found.best.batch_size}, {_order(found.best)})"
    if not found.helps:
        return _do_not_pack(found, best)
    text = (
        f"Pack into {one.packing_length:,} tokens: {found.gain:.2f} times as fast as {best}, {one.speedup:.2f} times "
        f"as fast as {question.baseline.described}. An epoch takes about {duration(one.seconds)} on "
        f"{question.setup.gpus} x {question.gpu.name} instead of {duration(found.best.seconds)} and "
        f"{duration(own.seconds)}, with {counted(one.packs, 'pack')}, {percent(one.fill)} full, "
        f"{one.samples_per_step:,.0f} samples per step, and {gib(one.memory_bytes)} of "
        f"{gib(question.gpu.memory_bytes)}"
    )
    if not one.fits:
        return f"{text}; this does not fit with a tenth of it free, and no option that was tried makes it fit."
    return f"{text}{_made_room(found)}"


def _made_room(found: Findings) -> str:
    """What was changed so that something fits; of an optimizer without fp32 masters also the price."""
    question = found.question
    if not found.changes:
        return "."
    text = "; that fits because of " + ", ".join(f"{change.setting} {change.after}" for change in found.changes) + "."
    if not any(change.setting == "optimizer" for change in found.changes):
        return text
    lora = question.memory_of(found.chosen.worst, replace(question.setup, optimizer="adamw", method="lora")).total
    return (
        f"{text} The price: weights have no fp32 master copies, so updates below their precision are lost, most of "
        f"them at low learning rates; method: lora has them, trains only adapters and needs {gib(lora)}."
    )


def _do_not_pack(found: Findings, best: str) -> str:
    one, padded = found.chosen, found.better_padded
    why = f"packing would be {found.gain:.2f} times as fast as {best}, and less than {WORTH_IT} is not worth it"
    if found.gain < 1:
        why = f"packing would be slower than {best}, {found.gain:.2f} times as fast"
    if found.gain >= WORTH_IT:
        share = one.tokens_per_second / padded.tokens_per_second
        why = f"packing would be {share:.2f} times as fast as batches of {padded.batch_size}, {_order(padded)}"
    return (
        f"Do not pack: {why}. {_padding(found)}; a pack of {one.packing_length:,} tokens would hold "
        f"{about(one.samples_per_pack)} samples{_made_room(found)}"
    )


def _padding(found: Findings) -> str:
    """The padding of the batches that are recommended, and why it may be there."""
    waste, cost = found.best.waste, found.padding_cost
    text = f"The recommended batches of {found.best.batch_size} are {percent(waste)} padding"
    if cost > CHEAP * waste:
        return text
    sees = found.best.worst.patches > 0
    others = "launches, fixed costs and the vision encoder" if sees else "launches and fixed costs"
    return f"{text}, which takes only {percent(cost)} of the time: it goes into {others}, not into tokens"


def _order(run: PaddedRun) -> str:
    return "grouped by length" if run.order == "by_length" else "random order"


def rule_of_thumb(found: Findings) -> str:
    """What the ratio of mean length to packing length says, beside the measured padding."""
    share = found.mean_tokens / found.chosen.packing_length
    text = f"The mean sample has {found.mean_tokens:,.0f} tokens, {percent(share)} of {found.chosen.packing_length:,}: "
    if share > HELPS_LITTLE:
        text += f"above {whole_percent(HELPS_LITTLE)}, so by the rule of thumb packing does not help."
    elif share < HELPS:
        text += f"below {whole_percent(HELPS)}, so by the rule of thumb packing helps."
    else:
        text += (
            f"between {whole_percent(HELPS)} and {whole_percent(HELPS_LITTLE)}, where the rule of thumb says nothing."
        )
    return (
        f"{text} Measured: {percent(found.waste('random'))} of what random batches of "
        f"{found.padded[0].batch_size} compute is padding, {percent(found.waste('by_length'))} when grouped by "
        f"length; packing is {found.gain:.2f} times as fast as the best padding with the same kernels, "
        f"{found.chosen.speedup:.2f} times as fast as {found.question.baseline.name}. The measurement decides."
    )


def _alternatives(found: Findings, draft: ConfigDraft) -> tuple[Alternative, ...]:
    chosen = found.choice.simulation
    more = efficient(found.simulations, chosen)
    less = conservative(found.simulations, chosen, besides=more[0] if more else None)

    def alternative(name: Literal["efficient", "conservative"], other: tuple[int, str]) -> Alternative:
        at, reason = other
        config = packed_config(replace(draft, simulation=found.simulations[at]))
        return Alternative(name=name, simulation=at, reason=reason, config=config)

    return (
        *((alternative("efficient", more),) if more else ()),
        *((alternative("conservative", less),) if less else ()),
    )


def described(simulation: Simulation) -> str:
    """A simulation by its settings."""
    return limits_text(simulation.packing_length, simulation.limits)
