"""What to change when no packing fits the GPU: the cheapest options first, and no more of them than needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packtrain.core.numbers import gib
from packtrain.planning.choice import MOST_DROPPED, acceptable
from packtrain.planning.question import Question
from packtrain.planning.values import Simulation
from packtrain.predicting.values import Load, TrainingSetup

_LIMIT_STEP = 1_024  # patches: a limit that reads well
_PATCHES = "max_patches_per_pack"
_FREE = {"chunked_loss", "attention"}  # options that have no price
_DRASTIC = {"sharding", "optimizer", "method"}  # options that come after fewer patches in a pack


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One option that was turned on."""

    setting: str
    before: str
    after: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How to train instead, and the limits to pack with."""

    setup: TrainingSetup
    limits: tuple[Mapping[str, int], ...]
    changes: tuple[Change, ...]
    enough: bool  # something fits now
    worst: Load  # the heaviest pack of the packing that needs least


def make_room(question: Question, simulations: Sequence[Simulation]) -> Room:
    """Turn options on until a packing that keeps the samples fits; those that turn out not to be needed stay off."""
    kept = [
        simulations[at] for at in acceptable(simulations, question.samples_per_step, said=question.baseline.says_step)
    ]
    before = min(kept, key=lambda one: one.memory_bytes)
    setup, taken = question.setup, []
    limits: tuple[Mapping[str, int], ...] = ()
    ladder = _ladder(question, before.worst)
    cheap = sum(not _DRASTIC & options.keys() for options, _ in ladder)
    for number, (options, cost) in enumerate(ladder, start=1):
        found = replace(setup, **options)
        if question.memory_of(before.worst, found).total < question.memory_of(before.worst, setup).total:
            setup = found
            taken.append((options, cost))
        if _any_fits(question, kept, setup):
            break
        limits = patch_limits(question, kept, setup) if number >= cheap else ()
        if limits:
            break
    enough = bool(limits) or _any_fits(question, kept, setup)
    if enough and not limits:
        setup, taken = _without_spare(question, kept, taken)
    changes = _described(question, before, taken)
    if limits:
        smallest = min(limits, key=lambda one: one["packing_length"])
        changes += (_limit_change(smallest["max_patches_per_pack"], smallest["packing_length"]),)
    return Room(setup=setup, limits=limits, changes=changes, enough=enough, worst=before.worst)


def patch_limits(question: Question, kept: Sequence[Simulation], setup: TrainingSetup) -> tuple[Mapping[str, int], ...]:
    """For each length the most patches that fit, where nearly every sample stays below."""
    patches = question.rows.samples["patches"]
    floor = int(np.quantile(patches, 1 - MOST_DROPPED / 2, method="higher"))
    found = []
    for one in kept:
        low, high = floor // _LIMIT_STEP, one.worst.patches // _LIMIT_STEP
        if not floor or not question.fits(_with_patches(one.worst, (low + 1) * _LIMIT_STEP), setup):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            fits = question.fits(_with_patches(one.worst, middle * _LIMIT_STEP), setup)
            low, high = (middle, high) if fits else (low, middle)
        limit = max(low * _LIMIT_STEP, floor)
        found.append({"packing_length": one.packing_length, **one.limits, "max_patches_per_pack": limit})
    return tuple(found)


def _ladder(question: Question, worst: Load) -> list[tuple[dict[str, Any], str]]:
    """Options from those that cost nothing to those that train something else; none that needs a missing package."""
    setup = question.setup
    deepspeed, four_bits = ("deepspeed" not in question.missing, "bitsandbytes" not in question.missing)
    found: list[tuple[dict[str, Any], str]] = [
        ({"chunked_loss": True}, "the loss is the same"),
        ({"gradient_checkpointing": True}, "each layer of the language model is computed twice forward"),
    ]
    if setup.attention != "varlen":
        found.append(({"attention": "varlen"}, "needs a GPU with flash kernels"))
    if worst.patches and setup.train_vision:
        quarter = max(worst.largest_patches, worst.patches // 4)
        found += [
            ({"vision_checkpointing": True}, "each layer of the vision encoder is computed twice forward"),
            ({"vision_batch_patches": quarter}, "the encoder runs several times with fewer patches"),
        ]
    if deepspeed and setup.gpus > 1 and setup.sharding in ("ddp", "zero1"):
        found.append(({"sharding": "zero2"}, "gradients are exchanged in every micro-batch"))
    if setup.gpus > 1 and setup.sharding != "fsdp":
        found.append(({"sharding": "fsdp"}, "weights are gathered in every micro-batch"))
    if four_bits and setup.method == "full":
        found.append(({"optimizer": "adamw_8bit"}, "optimizer states are rounded, and weights have no fp32 masters"))
    if setup.method == "full":
        found.append(({"method": "lora"}, "adapters are trained instead of the weights"))
    if four_bits and setup.method != "qlora":
        found.append(({"method": "qlora"}, "adapters on weights of 4 bits"))
    current = {name: getattr(setup, name) for name in setup.__slots__}
    return [(options, cost) for options, cost in found if any(current[name] != to for name, to in options.items())]


def _without_spare(
    question: Question, kept: Sequence[Simulation], taken: list[tuple[dict[str, Any], str]]
) -> tuple[TrainingSetup, list[tuple[dict[str, Any], str]]]:
    """Leave out, the most costly first, what is not needed; what costs nothing stays."""
    needed = list(taken)
    for one in [one for one in reversed(taken) if not _FREE & one[0].keys()]:
        fewer = [other for other in needed if other is not one]
        if _any_fits(question, kept, _applied(question.setup, fewer)):
            needed = fewer
    return _applied(question.setup, needed), needed


def _applied(setup: TrainingSetup, taken: Sequence[tuple[dict[str, Any], str]]) -> TrainingSetup:
    for options, _ in taken:
        setup = replace(setup, **options)
    return setup


def _described(
    question: Question, before: Simulation, taken: Sequence[tuple[dict[str, Any], str]]
) -> tuple[Change, ...]:
    found, setup = [], question.setup
    for options, cost in taken:
        changed = replace(setup, **options)
        saved = question.memory_of(before.worst, setup).total - question.memory_of(before.worst, changed).total
        for name, value in options.items():
            reason = f"saves {gib(saved)} at packing_length {before.packing_length:,}; {cost}"
            found.append(
                Change(
                    setting=name, before=shown_setting(getattr(setup, name)), after=shown_setting(value), reason=reason
                )
            )
        setup = changed
    return tuple(found)


def shown_setting(value: object) -> str:
    """A setting as a config would have it."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


def changes_for(room: Room, one: Simulation) -> tuple[Change, ...]:
    """The changes as this packing has them: every length has its own limit on patches, and some need none."""
    found = tuple(change for change in room.changes if change.setting != _PATCHES)
    if len(found) == len(room.changes) or _PATCHES not in one.limits:
        return found
    return (*found, _limit_change(one.limits[_PATCHES], one.packing_length))


def _limit_change(limit: int, length: int) -> Change:
    return Change(
        setting=_PATCHES,
        before="no limit",
        after=f"{limit:,}",
        reason=f"keeps the vision encoder within memory at packing_length {length:,}",
    )


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
