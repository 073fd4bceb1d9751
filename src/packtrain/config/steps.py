"""How much an optimizer step holds and how long a run is, from the several ways in which configs say it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from packtrain.config.run_config import RunConfig
from packtrain.config.systems import BATCHES_OF_PACKS, detect_systems
from packtrain.core.errors import ConfigError, nearest
from packtrain.core.numbers import counted
from packtrain.planning.sweep import KEPT, StepShape, step_shape

ROWS = 2  # samples of a padded batch by default, as plans for padded runs assume
_MULTIPLE = 8  # of which lengths of packs are that follow from the samples of a step
_UNITS = ("samples", "packs")
_NOT_SET = -1  # max_steps, as the trainer of transformers says it


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSize:
    """Packs of an optimizer step over all processes, or the samples that they are to hold."""

    packs: int | None
    samples: int | None

    def packs_for(self, samples_per_pack: float, world_size: int) -> int:
        """Packs of a step, by the rule by which `plan` recommends them: as many as have the samples, and the same
        number for every process where that changes little.

        >>> [StepSize(packs=None, samples=128).packs_for(15.3, world_size) for world_size in (1, 2, 4)]
        [8, 8, 8]
        """
        if self.packs is not None:
            return self.packs
        assert self.samples is not None
        return step_shape(self.samples, max(samples_per_pack, 1e-9), world_size).packs


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedStep:
    """An optimizer step of packs beside the samples that it was to have."""

    wanted: int  # samples
    world_size: int
    samples_per_pack: float
    tokens_per_sample: float
    longest: int  # sample
    samples: int | None = None  # of an epoch, where they are counted

    @property
    def shape(self) -> StepShape:
        """The packs of a step."""
        return step_shape(self.wanted, self.samples_per_pack, self.world_size)

    @property
    def moved(self) -> float:
        """By which share the samples of a step change; nothing where an epoch only ends in a step that is not full.

        >>> per_sample = {"samples_per_pack": 41 / 3, "tokens_per_sample": 9, "longest": 9}
        >>> few = PackedStep(wanted=16, world_size=1, samples=41, **per_sample)
        >>> few.moved, round(few.shape.samples)
        (0.0, 14)
        """
        moved, each = self.shape.samples / self.wanted - 1, self.shape.samples
        if moved < 0 and self.samples and math.ceil(self.samples / each) == math.ceil(self.samples / self.wanted):
            return 0.0
        return moved

    @property
    def idle(self) -> int:
        """Places of a step that no pack is left for."""
        return self.shape.micro_batches * self.world_size - self.shape.packs

    @property
    def is_kept(self) -> bool:
        """Does a step have its samples, and every process a pack?"""
        return abs(self.moved) <= KEPT and self.idle <= KEPT * self.shape.micro_batches * self.world_size

    @property
    def fewest_packs(self) -> int:
        """Packs that hold the samples between them, the same number for every process where there are enough."""
        passes = math.ceil(self.wanted / self.samples_per_pack / self.world_size - 1e-9)
        return min(max(passes, 1) * self.world_size, self.wanted)

    @property
    def kept_length(self) -> int:
        """The length at which these packs hold the samples; the longest sample fits.

        >>> step = PackedStep(wanted=16, world_size=2, samples_per_pack=50.0, tokens_per_sample=320.0, longest=900)
        >>> step.is_kept, step.kept_length
        (False, 2560)
        """
        length = max(self.longest, self.tokens_per_sample * self.wanted / self.fewest_packs)
        return math.ceil(length / _MULTIPLE) * _MULTIPLE


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
    """From max_steps or num_train_epochs; one epoch where neither is set."""
    steps, epochs = config.training.max_steps, config.training.num_train_epochs
    if steps is not None and not (steps > 0 or steps == _NOT_SET):
        expected = f"at least 1 step, or {_NOT_SET} to count epochs"
        raise ConfigError("training.max_steps", got=repr(steps), expected=expected)
    if steps is not None and steps > 0:  # as in transformers, whatever is said about epochs
        return RunLength(epochs=None, max_steps=steps)
    if epochs is not None and not 0 < epochs < 1e6:
        raise ConfigError("training.num_train_epochs", got=epochs, expected="a number above 0")
    return RunLength(epochs=float(epochs if epochs is not None else 1), max_steps=None)


def step_size(config: RunConfig, world_size: int) -> tuple[StepSize, int, tuple[str, ...]]:
    """The size of a step, the rows of a padded batch, and how that was understood."""
    packs = config.packs or config.data.pad_packs
    return _packed_step(config, world_size) if packs else _padded_step(config, world_size)


def configured_samples(config: RunConfig, world_size: int) -> int | None:
    """Samples of a step as the config sets them, in one way or the other, packed or not."""
    training = config.training
    rows, passes = training.per_device_train_batch_size, training.gradient_accumulation_steps
    if training.effective_batch_size is None:
        return None if rows is None and passes is None else (rows or ROWS) * (passes or 1) * world_size
    _agree(training.effective_batch_size, rows, passes, world_size, "samples")
    return training.effective_batch_size


def in_packs(config: RunConfig) -> bool:
    """Does the config set the packs of a step instead of its samples?"""
    unit = config.training.effective_batch_unit or "samples"
    if unit not in _UNITS:
        raise ConfigError(
            "training.effective_batch_unit", got=unit, expected="samples or packs", fix=nearest(str(unit), _UNITS)
        )
    return config.training.packs_per_step is not None or unit == "packs"


def counted_in_packs_by(config: RunConfig) -> str:
    """The system that the config is written for, where its batch size counts packs and here it counts samples."""
    training = config.training
    if not config.packs or training.effective_batch_size is not None or in_packs(config):
        return ""
    return next((name for name in detect_systems(config.written_as) if name in BATCHES_OF_PACKS), "")


def _configured_packs(config: RunConfig, world_size: int) -> int:
    """Packs of a step, where packs are asked for."""
    training = config.training
    packs, batch_size = training.packs_per_step, training.effective_batch_size
    rows, passes = training.per_device_train_batch_size, training.gradient_accumulation_steps
    if packs is not None and batch_size is not None:
        got = f"packs_per_step {packs} and effective_batch_size {batch_size}"
        raise ConfigError("training", got=got, expected="one of them", fix="leave one of them out")
    if batch_size is not None:
        _agree(batch_size, rows, passes, world_size, "packs")
    return packs or batch_size or (rows or 1) * (passes or 1) * world_size


def _packed_step(config: RunConfig, world_size: int) -> tuple[StepSize, int, tuple[str, ...]]:
    if in_packs(config):
        return StepSize(packs=_configured_packs(config, world_size), samples=None), 1, ()
    samples, training = configured_samples(config, world_size), config.training
    if samples is None:
        note = "no batch size is set: a step has one pack per process; training.effective_batch_size sets its samples"
        return StepSize(packs=world_size, samples=None), 1, (note,)
    if counted_in_packs_by(config):
        return StepSize(packs=None, samples=samples), 1, ()  # a warning says it
    settings = f"effective_batch_size {samples}"
    if training.effective_batch_size is not None and not (config.called or config.written_as):
        return StepSize(packs=None, samples=samples), 1, ()
    if training.effective_batch_size is None:
        rows, passes = training.per_device_train_batch_size or ROWS, training.gradient_accumulation_steps or 1
        by = "" if world_size == 1 else f" x {world_size} processes"
        settings = f"per_device_train_batch_size {rows} x gradient_accumulation_steps {passes}{by}"
    note = f"{settings} is in samples, packed or not; to count packs, set effective_batch_unit: packs"
    return StepSize(packs=None, samples=samples), 1, (note,)


def _padded_step(config: RunConfig, world_size: int) -> tuple[StepSize, int, tuple[str, ...]]:
    training = config.training
    if in_packs(config):
        raise ConfigError(
            "training",
            got="a step counted in packs, and packing: false",
            expected="effective_batch_size, which counts samples, packed or not",
            fix="set it instead of packs_per_step and effective_batch_unit",
        )
    samples, passes = configured_samples(config, world_size), training.gradient_accumulation_steps
    rows = training.per_device_train_batch_size or ROWS
    if samples is None:
        samples = rows * world_size
    elif training.per_device_train_batch_size is None and passes is not None:
        rows = math.ceil(samples / (passes * world_size))
    return StepSize(packs=samples, samples=samples), min(rows, math.ceil(samples / world_size)), ()


def _agree(wanted: int, rows: int | None, passes: int | None, world_size: int, unit: str) -> None:
    """Batch and accumulation beside the whole step make the same number, or leave a whole one to the other."""
    if passes is None or wanted == (each := rows or wanted // (passes * world_size)) * passes * world_size:
        return
    processes = counted(world_size, "process", "processes")
    of = f"{each} x {passes} micro-batches x {processes} are {each * passes * world_size}"
    raise ConfigError(
        "training.effective_batch_size",
        got=f"{wanted} {unit}, but {of}",
        expected="numbers that agree",
        fix="leave gradient_accumulation_steps out",
    )
