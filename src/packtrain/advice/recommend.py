"""The recommendation: pack or not, with which settings, why, and what else could be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from packtrain.advice.choice import Choice, conservative, efficient
from packtrain.advice.configs import Draft, packed_config, packed_reasons, padded_config, padded_reasons
from packtrain.advice.question import Question
from packtrain.advice.room import Change, Room, changes_for
from packtrain.advice.smaller_media import MediaOption
from packtrain.advice.values import Alternative, PaddedRun, Recommendation, Simulation
from packtrain.advice.words import duration, gib, limits_text, percent, whole_percent
from packtrain.costs.table import CostTable

HELPS_LITTLE, HELPS = 0.70, 0.50  # mean length / packing length: rules of thumb, shown beside what was measured
WORTH_IT = 1.05  # how much faster packing has to be with the same kernels
_GROUP_FROM = 0.02  # padding that grouping by length must save before it is recommended instead


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Findings:
    """What the recommendation is made from."""

    question: Question
    table: CostTable
    simulations: Sequence[Simulation]
    choice: Choice
    padded: Sequence[PaddedRun]  # the user's own first, the other order second
    gain: float  # padded seconds with the kernels that packs have, over packed seconds
    mean_tokens: float  # of the samples in packs
    room: Room | None  # what was changed so that something fits
    media: Sequence[MediaOption]  # the same packing with smaller images or fewer frames

    @property
    def chosen(self) -> Simulation:
        """The recommended simulation."""
        return self.simulations[self.choice.simulation]

    @property
    def changes(self) -> tuple[Change, ...]:
        """What was changed so that the recommended simulation fits."""
        return changes_for(self.room, self.chosen) if self.room else ()

    @property
    def helps(self) -> bool:
        """Does packing make training faster by itself, not by the kernels that come with it?"""
        return self.gain >= WORTH_IT and self.chosen.samples_per_pack > 1

    def waste(self, order: str) -> float:
        """The measured padding with the user's batch size."""
        return next(run.waste for run in self.padded if run.order == order)


def recommend(found: Findings, advice: tuple[str, ...]) -> Recommendation:
    """Put into words and settings what was found."""
    draft = Draft(
        question=found.question,
        table=found.table,
        simulation=found.chosen,
        padded=found.padded[0],
        changes=found.changes,
    )
    grouped = found.waste("random") - found.waste("by_length") > _GROUP_FROM
    if found.helps:
        config, reasons = packed_config(draft), packed_reasons(draft, found.choice.reason)
    else:
        config, reasons = padded_config(draft, group_by_length=grouped), padded_reasons(draft, group_by_length=grouped)
    return Recommendation(
        packing=found.helps,
        verdict=verdict(found),
        simulation=found.choice.simulation,
        config=config,
        reasons=reasons,
        alternatives=_alternatives(found, draft),
        advice=advice,
        mean_share=found.mean_tokens / found.chosen.packing_length,
        rule_of_thumb=rule_of_thumb(found),
    )


def verdict(found: Findings) -> str:
    """One sentence with the numbers that decide."""
    one, own, gpus = found.chosen, found.padded[0], found.question.setup.gpus
    machine = f"{gpus} x {found.question.gpu.name}"
    if not found.helps:
        return (
            f"Do not pack: with the same kernels packing would be {found.gain:.2f} times as fast as padding, and "
            f"{WORTH_IT} is the least that is worth it; padding is {percent(own.waste)} of what padded batches "
            f"compute, and a pack of {one.packing_length:,} tokens holds {one.samples_per_pack:.1f} samples."
        )
    text = (
        f"Pack into {one.packing_length:,} tokens: an epoch takes about {duration(one.seconds)} on {machine} instead "
        f"of {duration(own.seconds)} ({one.speedup:.2f} times as fast), with {one.packs:,} packs that are "
        f"{percent(one.fill)} full, {one.samples_per_step:,.0f} samples per step, and {gib(one.memory_bytes)} of "
        f"{gib(found.question.gpu.memory_bytes)}"
    )
    if not one.fits:
        return f"{text}; this does not fit with a tenth of it free, and no option that was tried makes it fit."
    if found.room is not None:
        changed = ", ".join(f"{change.setting} {change.after}" for change in found.changes)
        return f"{text}; that fits because of {changed}."
    return f"{text}."


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
        f"{found.padded[0].batch_size} compute is padding, {percent(found.waste('by_length'))} when grouped by length; "
        f"packing is {found.gain:.2f} times as fast as padding with the same kernels, "
        f"{found.chosen.speedup:.2f} times as fast as today's run. The measurement decides."
    )


def _alternatives(found: Findings, draft: Draft) -> tuple[Alternative, ...]:
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
