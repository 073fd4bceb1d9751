"""How much an optimizer step holds and how long a run is, from the several ways in which configs say it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from packtrain.advice.sweep import step_shape
from packtrain.app.config.load import RunConfig
from packtrain.core.errors import ConfigError, nearest

ROWS = 2  # samples of a padded batch where nothing is said, as plans for padded runs assume
_UNITS = ("samples", "packs")
_NOT_SET = -1  # max_steps, as the trainer of transformers says it


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """Packs of an optimizer step over all processes, or the samples that they are to hold."""

    packs: int | None
    samples: int | None

    def packs_for(self, samples_per_pack: float, world: int) -> int:
        """Packs of a step, by the rule by which `plan` recommends them: as many as have the samples, and the same
        number for every process where that changes little.

        >>> [StepSize(packs=None, samples=128).packs_for(15.3, world) for world in (1, 2, 4)]
        [8, 8, 8]
        """
        if self.packs is not None:
            return self.packs
        assert self.samples is not None
        return step_shape(self.samples, max(samples_per_pack, 1e-9), world).packs


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLength:
    """Epochs, or optimizer steps."""

    epochs: float | None
    max_steps: int | None
    planned: int = 1  # epochs that a resumed run has a plan of: it stays the same where the run is made shorter

    def epochs_for(self, steps_per_epoch: int) -> int:
        """Epochs for which packs are planned; one with fewer packs than the first may need one more.

        >>> RunLength(epochs=1.0, max_steps=None, planned=3).epochs_for(10)
        3
        """
        if self.max_steps is None:
            return max(self.planned, math.ceil(self.epochs or 1))
        return max(self.planned, math.ceil(self.max_steps / max(1, steps_per_epoch)))

    def steps_of(self, by_epoch: list[int]) -> int:
        """Steps to train, of those that each planned epoch has.

        >>> RunLength(epochs=1.5, max_steps=None).steps_of([10, 8])
        14
        """
        if self.max_steps is not None:
            return min(self.max_steps, sum(by_epoch))
        whole = math.floor(self.epochs or 1)
        part = (self.epochs or 1) - whole
        last = round(part * by_epoch[whole]) if part and whole < len(by_epoch) else 0
        return max(1, sum(by_epoch[:whole]) + last)


def run_length(config: RunConfig) -> RunLength:
    """From max_steps or num_train_epochs; one epoch where neither is said."""
    steps, epochs = config.training.max_steps, config.training.num_train_epochs
    if steps is not None and not (steps > 0 or steps == _NOT_SET):
        expected = f"a whole number of steps from 1 on, or {_NOT_SET} to count epochs"
        raise ConfigError("training.max_steps", got=repr(steps), expected=expected)
    if steps is not None and steps > 0:  # as in transformers, whatever is said about epochs
        return RunLength(epochs=None, max_steps=steps)
    if epochs is not None and not 0 < epochs < 1e6:
        raise ConfigError("training.num_train_epochs", got=epochs, expected="a number above zero")
    return RunLength(epochs=float(epochs if epochs is not None else 1), max_steps=None)


def step_size(config: RunConfig, world: int) -> tuple[StepSize, int, tuple[str, ...]]:
    """The size of a step, the rows of a padded batch, and how that was understood."""
    packs = config.data.packing is not False or config.data.pad_packs
    return _packed(config, world) if packs else _padded(config, world)


def _packed(config: RunConfig, world: int) -> tuple[StepSize, int, tuple[str, ...]]:
    training = config.training
    packs, wanted = training.packs_per_step, training.effective_batch_size
    unit, passes = training.effective_batch_unit or "samples", training.gradient_accumulation_steps
    if unit not in _UNITS:
        raise ConfigError(
            "training.effective_batch_unit", got=unit, expected="samples or packs", fix=nearest(str(unit), _UNITS)
        )
    if packs is not None and wanted is not None:
        got = f"packs_per_step {packs} and effective_batch_size {wanted}"
        raise ConfigError("training", got=got, expected="one of them", fix="leave one of them out")
    if packs is not None:
        return StepSize(packs=packs, samples=None), 1, ()
    each = training.per_device_train_batch_size or 1
    if wanted is not None and unit == "samples":
        if passes is not None:
            got = f"effective_batch_size {wanted} (samples) and gradient_accumulation_steps {passes}"
            fix = "leave one of them out; effective_batch_unit: packs counts packs"
            raise ConfigError("training", got=got, expected="one of them", fix=fix)
        note = f"effective_batch_size {wanted} counts samples of a step; effective_batch_unit: packs counts packs"
        return StepSize(packs=None, samples=wanted), 1, (note,)
    if wanted is not None:
        _agree(wanted, each, passes, world, "packs")
        return StepSize(packs=wanted, samples=None), 1, ()
    found = each * (passes or 1) * world
    if training.per_device_train_batch_size is None and passes is None:
        return (
            StepSize(packs=found, samples=None),
            1,
            (f"no size of a step is set: {found} packs, one for each process",),
        )
    said = f"{each} x {passes or 1} passes x {world} processes: {found} packs in an optimizer step"
    return StepSize(packs=found, samples=None), 1, (f"one pack is one row: {said}",) if each > 1 else ()


def _padded(config: RunConfig, world: int) -> tuple[StepSize, int, tuple[str, ...]]:
    training = config.training
    if training.packs_per_step is not None or training.effective_batch_unit not in (None, "samples"):
        raise ConfigError(
            "training",
            got="a step counted in packs, and packing: false",
            expected="effective_batch_size, which counts samples whether they are packed or not",
            fix="set it instead of packs_per_step and effective_batch_unit",
        )
    rows, passes = training.per_device_train_batch_size or ROWS, training.gradient_accumulation_steps
    wanted = training.effective_batch_size
    if wanted is None:
        samples = rows * (passes or 1) * world
        return StepSize(packs=samples, samples=samples), rows, ()
    if training.per_device_train_batch_size is not None:
        _agree(wanted, rows, passes, world, "samples")
    rows = min(rows, math.ceil(wanted / world))
    return StepSize(packs=wanted, samples=wanted), rows, ()


def _agree(wanted: int, each: int, passes: int | None, world: int, unit: str) -> None:
    if passes is not None and each * passes * world != wanted:
        raise ConfigError(
            "training.effective_batch_size",
            got=f"{wanted} {unit}, but {each} x {passes} passes x {world} processes are {each * passes * world}",
            expected="numbers that agree",
            fix="leave gradient_accumulation_steps out",
        )
