"""Which simulation to train with, which others are worth knowing, and what to change where none fits the GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from packtrain.core.numbers import counted, exact_percent, gib, percent, signed_percent
from packtrain.planning.question import Question
from packtrain.planning.study_values import Reason, Simulation
from packtrain.planning.sweep import KEPT
from packtrain.predicting.values import Load, TrainingSetup

MOST_DROPPED = 0.005  # share of the samples that a recommended packing may leave out
TOLERATED = 0.25  # how far the samples of a step may move where the user has not set them, if that keeps GPUs busy
WORTH_MOVING = 1.1  # how much faster that must be
KEEPING = 0.05  # of the best speed: what keeping more of the samples may cost
TIE = 0.01  # speeds that are nearer than this are the same: the estimates are not better
_SHORTER = 0.8  # of the recommended length: what makes a setting conservative
_NEARLY_AS_FAST = 0.85  # a longer setting that is slower than this is no alternative
_LIMIT_STEP = 1_024  # patches: a limit that reads well
_PATCHES = "max_patches_per_pack"
_FREE = {"chunked_loss", "attn_implementation"}  # options that have no price
_DRASTIC = {"sharding", "optimizer", "method"}  # options that come after fewer patches in a pack


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the simulations, and why it is that one."""

    simulation: Simulation
    reason: str


def acceptable(
    simulations: Sequence[Simulation], samples_per_step: int, *, fixed_step: bool = False
) -> list[Simulation]:
    """Those that leave out few samples and keep the samples of a step, nearly where it is not fixed; where none
    does, the nearest to it."""
    least = min(one.dropped_share for one in simulations)
    allowed = MOST_DROPPED if least < MOST_DROPPED else least + MOST_DROPPED
    kept = [one for one in simulations if one.dropped_share < allowed]
    nearest = min(_moved(one, samples_per_step) for one in kept)
    most = max(KEPT if fixed_step else TOLERATED, nearest)
    return [one for one in kept if _moved(one, samples_per_step) <= most]


def choose(simulations: Sequence[Simulation], samples_per_step: int, *, fixed_step: bool = False) -> Choice:
    """The fastest that fits and keeps the samples of a step; unless the step is fixed, they may move for speed.

    Speeds are those of the samples in packs, and the samples that fit none are the slowest: for a little speed none is
    given up. Near ties: shorter, then nearer to the bound.
    """
    kept = acceptable(simulations, samples_per_step, fixed_step=fixed_step)
    fitting = [one for one in kept if one.fits]
    if not fitting:
        least = min(kept, key=lambda one: one.memory_bytes)
        return Choice(least, f"nothing fits this GPU; {least.name} needs least, {gib(least.memory_bytes)}")
    steady = [one for one in fitting if _moved(one, samples_per_step) <= KEPT]
    if steady and _fastest(fitting).tokens_per_second <= WORTH_MOVING * _fastest(steady).tokens_per_second:
        fitting = steady
    near = _not_slower(fitting, KEEPING)
    fewest = min(one.samples_dropped for one in near)
    tied = _not_slower([one for one in near if one.samples_dropped == fewest], TIE)
    chosen = min(tied, key=lambda one: (one.packing_length, -one.of_bound, len(one.limits)))
    return Choice(chosen, _why(chosen, fitting))


def _moved(simulation: Simulation, samples_per_step: int) -> float:
    return abs(simulation.samples_per_step / samples_per_step - 1)


def _fastest(simulations: Sequence[Simulation]) -> Simulation:
    return max(simulations, key=lambda one: one.tokens_per_second)


def _not_slower(simulations: Sequence[Simulation], share: float) -> list[Simulation]:
    """Those that are at most by this share slower than the fastest."""
    least = (1 - share) * _fastest(simulations).tokens_per_second
    return [one for one in simulations if one.tokens_per_second >= least]


def _why(mine: Simulation, fitting: Sequence[Simulation]) -> str:
    text, fastest = f"{mine.tokens_per_second:,.0f} real tokens/s predicted", _fastest(fitting)
    faster = fastest.tokens_per_second / mine.tokens_per_second - 1
    fit = "fits and drops" if len(fitting) == 1 else "fit and drop"
    others = f"{counted(len(fitting), 'packing')} that {fit} few samples"
    if fastest.samples_dropped > mine.samples_dropped:
        more = counted(fastest.samples_dropped - mine.samples_dropped, "sample")
        text += f"; {fastest.name} would be {percent(faster)} faster, but leaves out {more} more"
    elif faster > 0:
        text += f", within {exact_percent(TIE)} of the fastest of the {others}, and shorter"
    elif len(fitting) > 1:
        text += f", the fastest of the {others}"
    return f"{text} ({gib(mine.memory_bytes)}, {percent(mine.dropped_share)} of the samples dropped)"


def efficient(simulations: Sequence[Simulation], mine: Simulation) -> Choice | None:
    """A setting that fits and gets more out of the data: faster, or else fuller or with fewer samples left out."""
    allowed = max(MOST_DROPPED, mine.dropped_share)
    others = [one for one in simulations if one.fits and one is not mine and one.dropped_share <= allowed]
    best = _fastest([*others, mine])
    if best is not mine and best.tokens_per_second > mine.tokens_per_second:
        return Choice(best, f"faster: {_compared(best, mine)}")
    longer = [
        one
        for one in others
        if one.packing_length > mine.packing_length
        and one.tokens_per_second >= _NEARLY_AS_FAST * mine.tokens_per_second
        and (one.samples_dropped, -one.fill) < (mine.samples_dropped, -mine.fill)
    ]
    if not longer:
        return None
    best = max(longer, key=lambda one: (one.tokens_per_second, -one.packing_length))
    return Choice(best, f"nothing that fits is faster; this one is longer and drops less: {_compared(best, mine)}")


def conservative(
    simulations: Sequence[Simulation], mine: Simulation, besides: Simulation | None = None
) -> Choice | None:
    """A setting that needs less memory: the fastest that is clearly shorter, else the shorter one that needs least."""
    allowed = max(MOST_DROPPED, 2 * mine.dropped_share)
    less = [
        one
        for one in simulations
        if (one.packing_length < mine.packing_length or (one.limits and one.packing_length == mine.packing_length))
        and one.memory_bytes < mine.memory_bytes
        and one is not besides
    ]
    kept = [one for one in less if one.dropped_share <= allowed] or less
    if not kept:
        return None
    clearly = [one for one in kept if one.packing_length <= _SHORTER * mine.packing_length]
    best = _fastest(clearly) if clearly else min(kept, key=lambda one: one.memory_bytes)
    return Choice(best, f"less memory: {_compared(best, mine)}")


def _compared(one: Simulation, mine: Simulation) -> str:
    """What another setting changes, in numbers."""
    speed = signed_percent(one.tokens_per_second / mine.tokens_per_second - 1)
    return (
        f"{one.name}: {one.tokens_per_second:,.0f} real tokens/s ({speed} against "
        f"{mine.tokens_per_second:,.0f}), "
        f"fill {percent(one.fill)} (against {percent(mine.fill)}), "
        f"{gib(one.memory_bytes)} on the fullest GPU ({gib(mine.memory_bytes)}), "
        f"{counted(one.samples_dropped, 'sample')} dropped ({mine.samples_dropped:,}), "
        f"{one.samples_per_step:,.0f} samples per step ({mine.samples_per_step:,.0f})"
    )


# ---- room


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How to train instead, and the limits to pack with."""

    setup: TrainingSetup
    limits: tuple[Mapping[str, int], ...]
    changes: tuple[Reason, ...]
    enough: bool  # something fits now
    worst: Load  # the heaviest pack of the packing that needs least


def make_room(question: Question, simulations: Sequence[Simulation]) -> Room:
    """Turn options on until a packing that keeps the samples fits; those that turn out not to be needed stay off."""
    fixed = question.baseline.sets_step
    kept = acceptable(simulations, question.samples_per_step, fixed_step=fixed)
    before = min(kept, key=lambda one: one.memory_bytes)
    setup = question.setup
    options: list[_Option] = []
    limits: tuple[Mapping[str, int], ...] = ()
    ladder = _ladder(question, before.worst)
    cheap = sum(option.setting not in _DRASTIC for option in ladder)
    for number, option in enumerate(ladder, start=1):
        then = _with_options(setup, [option])
        if question.memory_of(before.worst, then).total < question.memory_of(before.worst, setup).total:
            setup = then
            options.append(option)
        if _any_fits(question, kept, setup):
            break
        limits = patch_limits(question, kept, setup) if number >= cheap else ()
        if limits:
            break
    enough = bool(limits) or _any_fits(question, kept, setup)
    if enough and not limits:
        options = _needed(question, kept, options)
        setup = _with_options(question.setup, options)
    changes = _explained(question, before, options)
    if limits:
        smallest = min(limits, key=lambda one: one["packing_length"])
        changes += (_limit_change(smallest[_PATCHES], smallest["packing_length"]),)
    return Room(setup=setup, limits=limits, changes=changes, enough=enough, worst=before.worst)


def patch_limits(question: Question, kept: Sequence[Simulation], setup: TrainingSetup) -> tuple[Mapping[str, int], ...]:
    """For each length the most patches that fit, where nearly every sample stays below."""
    patches = question.rows.samples["patches"]
    floor = int(np.quantile(patches, 1 - MOST_DROPPED / 2, method="higher"))
    limit_sets = []
    for one in kept:
        low, high = floor // _LIMIT_STEP, one.worst.patches // _LIMIT_STEP
        if not floor or not question.fits(_with_patches(one.worst, (low + 1) * _LIMIT_STEP), setup):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            fits = question.fits(_with_patches(one.worst, middle * _LIMIT_STEP), setup)
            low, high = (middle, high) if fits else (low, middle)
        limit = max(low * _LIMIT_STEP, floor)
        limit_sets.append({"packing_length": one.packing_length, **one.limits, "max_patches_per_pack": limit})
    return tuple(limit_sets)


class _Option(NamedTuple):
    """An option that saves memory, and its price."""

    setting: str
    to: object
    cost: str


def _ladder(question: Question, worst: Load) -> list[_Option]:
    """Options from those that cost nothing to those that train something else; none that needs a missing package."""
    setup, gpus = question.setup, question.setup.gpus
    deepspeed, bitsandbytes = (package not in question.missing for package in ("deepspeed", "bitsandbytes"))
    full, vision = setup.method == "full", worst.patches > 0 and setup.train_vision
    quarter = max(worst.largest_patches, worst.patches // 4)
    ladder = (
        (True, "chunked_loss", True, "the loss is the same"),
        (True, "gradient_checkpointing", True, "each layer of the language model runs forward twice"),
        (True, "attn_implementation", "varlen", "needs a GPU with flash kernels"),
        (vision, "vision_checkpointing", True, "each layer of the vision encoder runs forward twice"),
        (vision, "vision_batch_patches", quarter, "the encoder runs several times with fewer patches"),
        (
            deepspeed and gpus > 1 and setup.sharding in ("ddp", "zero1"),
            *("sharding", "zero2", "gradients are reduced in every micro-batch"),
        ),
        (gpus > 1, "sharding", "fsdp", "weights are gathered in every micro-batch"),
        (
            bitsandbytes and full,
            *("optimizer", "adamw_8bit", "optimizer states are quantized, and weights have no fp32 masters"),
        ),
        (full, "method", "lora", "adapters are trained instead of the weights"),
        (bitsandbytes, "method", "qlora", "adapters are trained on 4-bit weights"),
    )
    return [_Option(name, to, cost) for usable, name, to, cost in ladder if usable and getattr(setup, name) != to]


def _needed(question: Question, kept: Sequence[Simulation], options: Sequence[_Option]) -> list[_Option]:
    """Leave out, the most costly first, what is not needed; what costs nothing stays."""
    needed = list(options)
    for option in [option for option in reversed(options) if option.setting not in _FREE]:
        fewer = [other for other in needed if other is not option]
        if _any_fits(question, kept, _with_options(question.setup, fewer)):
            needed = fewer
    return needed


def _with_options(setup: TrainingSetup, options: Sequence[_Option]) -> TrainingSetup:
    for option in options:
        setup = replace(setup, **{option.setting: option.to})  # type: ignore[arg-type]
    return setup


def _explained(question: Question, before: Simulation, options: Sequence[_Option]) -> tuple[Reason, ...]:
    reasons, setup = [], question.setup
    for option in options:
        changed = _with_options(setup, [option])
        saved = question.memory_of(before.worst, setup).total - question.memory_of(before.worst, changed).total
        reason = f"saves {gib(saved)} at packing_length {before.packing_length:,}; {option.cost}"
        old, new = shown_setting(getattr(setup, option.setting)), shown_setting(option.to)
        reasons.append(Reason(option.setting, old, new, reason))
        setup = changed
    return tuple(reasons)


def shown_setting(value: object) -> str:
    """A setting as a config would have it."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


def changes_for(room: Room, one: Simulation) -> tuple[Reason, ...]:
    """The changes as this packing has them: every length has its own limit on patches, and some need none."""
    changes = tuple(change for change in room.changes if change.parameter != _PATCHES)
    if len(changes) == len(room.changes) or _PATCHES not in one.limits:
        return changes
    return (*changes, _limit_change(one.limits[_PATCHES], one.packing_length))


def _limit_change(limit: int, length: int) -> Reason:
    why = f"keeps the vision encoder within memory at packing_length {length:,}"
    return Reason(_PATCHES, "no limit", f"{limit:,}", why)


def _any_fits(question: Question, kept: Sequence[Simulation], setup: TrainingSetup) -> bool:
    return any(question.fits(one.worst, setup) for one in kept)


def _with_patches(worst: Load, patches: int) -> Load:
    """The same load with fewer patches, and media tokens in proportion."""
    share = min(1.0, patches / worst.patches) if worst.patches else 1.0
    return replace(
        worst,
        patches=min(patches, worst.patches),
        squared_patches=round(worst.squared_patches * share),
        largest_patches=min(worst.largest_patches, patches),
        vision_tokens=round(worst.vision_tokens * share),
    )
