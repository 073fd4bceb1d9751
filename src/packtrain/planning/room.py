"""What to change when no packing fits the GPU: the cheapest options first, and no more of them than needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from packtrain.core.numbers import gib
from packtrain.planning.choice import MOST_DROPPED, acceptable
from packtrain.planning.question import Question
from packtrain.planning.study_values import Simulation
from packtrain.predicting.values import Load, TrainingSetup

_LIMIT_STEP = 1_024  # patches: a limit that reads well
_PATCHES = "max_patches_per_pack"
_FREE = {"chunked_loss", "attention"}  # options that have no price
_DRASTIC = {"sharding", "optimizer", "method"}  # options that come after fewer patches in a pack


@dataclass(frozen=True, kw_only=True, slots=True)
class RoomOption:
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
    changes: tuple[RoomOption, ...]
    enough: bool  # something fits now
    worst: Load  # the heaviest pack of the packing that needs least


def make_room(question: Question, simulations: Sequence[Simulation]) -> Room:
    """Turn options on until a packing that keeps the samples fits; those that turn out not to be needed stay off."""
    kept = [
        simulations[at] for at in acceptable(simulations, question.samples_per_step, said=question.baseline.says_step)
    ]
    before = min(kept, key=lambda one: one.memory_bytes)
    setup = question.setup
    taken: list[_Saving] = []
    limits: tuple[Mapping[str, int], ...] = ()
    ladder = _ladder(question, before.worst)
    cheap = sum(one.setting not in _DRASTIC for one in ladder)
    for number, saving in enumerate(ladder, start=1):
        found = saving.applied(setup)
        if question.memory_of(before.worst, found).total < question.memory_of(before.worst, setup).total:
            setup = found
            taken.append(saving)
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


@dataclass(frozen=True, slots=True)
class _Saving:
    """An option that saves memory, and its price."""

    setting: str
    to: object
    cost: str

    def applied(self, setup: TrainingSetup) -> TrainingSetup:
        """The setup with this option."""
        return replace(setup, **{self.setting: self.to})  # type: ignore[arg-type]


def _ladder(question: Question, worst: Load) -> list[_Saving]:
    """Options from those that cost nothing to those that train something else; none that needs a missing package."""
    setup = question.setup
    deepspeed, four_bits = ("deepspeed" not in question.missing, "bitsandbytes" not in question.missing)
    found = [
        _Saving("chunked_loss", True, "the loss is the same"),
        _Saving("gradient_checkpointing", True, "each layer of the language model is computed twice forward"),
    ]
    if setup.attention != "varlen":
        found.append(_Saving("attention", "varlen", "needs a GPU with flash kernels"))
    if worst.patches and setup.train_vision:
        quarter = max(worst.largest_patches, worst.patches // 4)
        found += [
            _Saving("vision_checkpointing", True, "each layer of the vision encoder is computed twice forward"),
            _Saving("vision_batch_patches", quarter, "the encoder runs several times with fewer patches"),
        ]
    if deepspeed and setup.gpus > 1 and setup.sharding in ("ddp", "zero1"):
        found.append(_Saving("sharding", "zero2", "gradients are exchanged in every micro-batch"))
    if setup.gpus > 1 and setup.sharding != "fsdp":
        found.append(_Saving("sharding", "fsdp", "weights are gathered in every micro-batch"))
    if four_bits and setup.method == "full":
        found.append(
            _Saving("optimizer", "adamw_8bit", "optimizer states are rounded, and weights have no fp32 masters")
        )
    if setup.method == "full":
        found.append(_Saving("method", "lora", "adapters are trained instead of the weights"))
    if four_bits and setup.method != "qlora":
        found.append(_Saving("method", "qlora", "adapters on weights of 4 bits"))
    return [one for one in found if getattr(setup, one.setting) != one.to]


def _without_spare(
    question: Question, kept: Sequence[Simulation], taken: Sequence[_Saving]
) -> tuple[TrainingSetup, list[_Saving]]:
    """Leave out, the most costly first, what is not needed; what costs nothing stays."""
    needed = list(taken)
    for one in [one for one in reversed(taken) if one.setting not in _FREE]:
        fewer = [other for other in needed if other is not one]
        if _any_fits(question, kept, _applied(question.setup, fewer)):
            needed = fewer
    return _applied(question.setup, needed), needed


def _applied(setup: TrainingSetup, taken: Sequence[_Saving]) -> TrainingSetup:
    for one in taken:
        setup = one.applied(setup)
    return setup


def _described(question: Question, before: Simulation, taken: Sequence[_Saving]) -> tuple[RoomOption, ...]:
    found, setup = [], question.setup
    for one in taken:
        changed = one.applied(setup)
        saved = question.memory_of(before.worst, setup).total - question.memory_of(before.worst, changed).total
        reason = f"saves {gib(saved)} at packing_length {before.packing_length:,}; {one.cost}"
        was, now = shown_setting(getattr(setup, one.setting)), shown_setting(one.to)
        found.append(RoomOption(setting=one.setting, before=was, after=now, reason=reason))
        setup = changed
    return tuple(found)


def shown_setting(value: object) -> str:
    """A setting as a config would have it."""
    if value is None or isinstance(value, bool):
        return "none" if value is None else str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value)


def changes_for(room: Room, one: Simulation) -> tuple[RoomOption, ...]:
    """The changes as this packing has them: every length has its own limit on patches, and some need none."""
    found = tuple(change for change in room.changes if change.setting != _PATCHES)
    if len(found) == len(room.changes) or _PATCHES not in one.limits:
        return found
    return (*found, _limit_change(one.limits[_PATCHES], one.packing_length))


def _limit_change(limit: int, length: int) -> RoomOption:
    return RoomOption(
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
