"""What a study is about: the costs, the model, the GPUs, how it is trained today (the baseline), and what is fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from packtrain.core.errors import ConfigError, nearest
from packtrain.core.seeds import stream
from packtrain.measuring.table import CostTable, SourceCodes
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.resources import Samples, Tails, samples_of, tail_runs
from packtrain.packing.source_repeats import draw_of, is_mixed, mixture_of
from packtrain.packing.windows import rows_that_fit
from packtrain.planning.clock import Clock, PassColumns
from packtrain.predicting.calibration import Fit
from packtrain.predicting.gpus import Gpu
from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, MemoryCoefficients, MemoryEstimate, estimate_memory
from packtrain.predicting.time import Coefficients
from packtrain.predicting.values import Attention, Load, ModelShape, TrainingSetup

SAMPLES_PER_STEP = 128  # of an optimizer step, by default
_COUNTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "effective_batch_size", "num_train_epochs"),
    *("warmup_steps", "eval_steps", "save_steps", "save_delay_steps", "logging_steps"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A padded run. What is None was not set: intervals and warm-up are then proposed, learning rates left alone."""

    today: bool = False  # the user trains like this; otherwise it is a default setting, and called that
    per_device_train_batch_size: int = 2  # samples of one forward pass
    gradient_accumulation_steps: int | None = None  # None: from effective_batch_size
    effective_batch_size: int | None = None  # samples per optimizer step over all GPUs; None: about 128
    group_by_length: bool = False  # batches of samples that are about equally long
    attn_implementation: Attention = (
        "sdpa"  # of padded batches; a flash kernel leaves their padding out of attention: varlen
    )
    chunked_loss: bool | None = None  # None: as with packing
    compiled: bool = False  # layers are compiled; rows of other lengths have no static shapes
    num_train_epochs: int = 1
    learning_rate: float | None = None
    vit_lr: float | None = None
    aligner_lr: float | None = None
    warmup_ratio: float | None = None
    warmup_steps: int | None = None
    eval_steps: int | None = None
    save_steps: int | None = None
    save_delay_steps: int | None = None
    logging_steps: int | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            least = 0 if name in ("warmup_steps", "save_delay_steps") else 1
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ConfigError(f"baseline.{name}", got=repr(value), expected=f"an integer from {least} on")
        for name in ("learning_rate", "vit_lr", "aligner_lr"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"baseline.{name}", got=value, expected="between 0 and 1")
        if self.warmup_ratio is not None and not 0 <= self.warmup_ratio < 1:
            raise ConfigError("baseline.warmup_ratio", got=self.warmup_ratio, expected="from 0 to below 1")

    def accumulation(self, gpus: int) -> int:
        """Forward passes of each GPU in one optimizer step."""
        if self.gradient_accumulation_steps is None:
            wanted = self.effective_batch_size or SAMPLES_PER_STEP
            return max(1, round(wanted / (self.per_device_train_batch_size * gpus)))
        samples = self.per_device_train_batch_size * gpus * self.gradient_accumulation_steps
        if self.effective_batch_size not in (None, samples):
            raise ConfigError(
                "baseline.effective_batch_size",
                got=f"{self.effective_batch_size}, but {self.per_device_train_batch_size} samples x {gpus} GPUs x "
                f"{self.gradient_accumulation_steps} micro-batches are {samples}",
                expected="numbers that agree",
                fix="leave gradient_accumulation_steps out, or effective_batch_size",
            )
        return self.gradient_accumulation_steps

    @property
    def name(self) -> str:
        """What it is called beside packing."""
        return "your current run" if self.today else "a default padded run"

    @property
    def description(self) -> str:
        """Its name and how it computes.

        >>> Baseline().description
        'a default padded run (batches of 2, random order, sdpa attention, uncompiled)'
        """
        order = "grouped by length" if self.group_by_length else "random order"
        layers = "compiled" if self.compiled else "uncompiled"
        size = self.per_device_train_batch_size
        return f"{self.name} (batches of {size}, {order}, {self.attn_implementation} attention, {layers})"

    @property
    def sets_step(self) -> bool:
        """Was the number of samples of an optimizer step given?"""
        return self.effective_batch_size is not None or self.gradient_accumulation_steps is not None

    def samples_per_step(self, gpus: int) -> int:
        """Samples of one optimizer step, over all GPUs."""
        each = self.per_device_train_batch_size * gpus * self.accumulation(gpus)
        return self.effective_batch_size or each  # rows of a step need not divide it


MOST_ROWS = 2_000_000  # simulated on; of a larger table a random part of this size
_AT_ONCE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CostRows:
    """Costs by row, how much of each row's end may be cut, and which source it is of."""

    samples: Samples
    tails: Tails
    sources: SourceCodes | None  # None: every row is used once
    mixture: Mapping[str, Mapping[str, float | None]]
    scale: float = 1.0  # rows of the table for each row here

    def __len__(self) -> int:
        return len(self.tails)

    def read(self, start: int, stop: int) -> tuple[Samples, Tails]:
        """Costs and tails of a span of rows."""
        if (start, stop) == (0, len(self)):
            return self.samples, self.tails
        return self.samples.part(start, stop), self.tails.part(start, stop)

    def counts(self, config: PackingConfig) -> np.ndarray | None:
        """How often each row is used in an epoch of packs of this kind; None: every row once."""
        if self.sources is None:
            return None
        return draw_of(self.mixture, self.sources, rows_that_fit(self, config)).counts(config.seed, 0)

    def part(self, most: int, seed: int) -> CostRows:
        """At most `most` of the rows, drawn by the seed."""
        if len(self) <= most:
            return self
        chosen = np.sort(stream(seed, "part").choice(len(self), most, replace=False))
        return replace(self.take(chosen), scale=self.scale * len(self) / most)

    def take(self, chosen: np.ndarray) -> CostRows:
        """Some of the rows and no others, in increasing order."""
        return replace(
            self,
            samples=self.samples.take(chosen),
            tails=self.tails.take(chosen),
            sources=self.sources and SourceCodes(self.sources.names, self.sources.codes[chosen]),
        )


def read_rows(table: CostTable, seed: int, most: int = MOST_ROWS) -> CostRows:
    """All rows, or `most` of them drawn by the seed."""
    sources, mixture = table.source_codes() if is_mixed(table) else None, mixture_of(table)
    if len(table) <= most:
        samples, tails = samples_of(table)
        return CostRows(samples=samples, tails=tails, sources=sources, mixture=mixture)
    chosen = np.sort(stream(seed, "study").choice(len(table), most, replace=False))
    parts = []
    for start in range(0, len(table), _AT_ONCE):
        stop = min(start + _AT_ONCE, len(table))
        samples, tails = samples_of(table, start, stop)
        here = chosen[np.searchsorted(chosen, start) : np.searchsorted(chosen, stop)] - start
        parts.append((samples.take(here), tails.tokens[here]))
    columns = {name: np.concatenate([part[name] for part, _ in parts]) for name in parts[0][0].columns}
    return CostRows(
        samples=Samples(columns),
        tails=Tails(np.concatenate([tails for _, tails in parts]), lambda some: tail_runs(table, chosen[some])),
        sources=sources and SourceCodes(sources.names, sources.codes[chosen]),
        mixture=mixture,
        scale=len(table) / most,
    )


Sections = Mapping[str, Mapping[str, Any]]  # a config as its YAML has it: model, data, training
UNDECIDED = 2**61  # packing_length where none was given
HEADROOM = 0.10  # of the GPU's memory that a plan leaves free: estimates are estimates


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Question:
    """Everything that decides the answer, except the lengths and limits that are tried."""

    rows: CostRows
    shape: ModelShape
    model: str
    gpu: Gpu
    setup: TrainingSetup  # of the packed run
    baseline: Baseline
    packing: PackingConfig  # its packing_length is replaced by those that are tried
    time: Coefficients | None = None
    memory: MemoryCoefficients = DEFAULT_COEFFICIENTS
    padded_fit: Fit | None = None  # of padded batches, where their layers run otherwise than those of packs
    configured: TrainingSetup = field(default_factory=TrainingSetup)  # how the user's config would train packs
    base: Sections = field(default_factory=dict)  # the user's config, which is recommended with changes
    missing: frozenset[str] = frozenset()  # packages that are not there: what needs them is not recommended
    unpackable: str = ""  # why the model is trained on padded rows only
    headroom: float = HEADROOM
    requested: TrainingSetup | None = None  # what `setup` was before options that make room were turned on

    @property
    def seed(self) -> int:
        """Of everything that is drawn."""
        return self.packing.seed

    @property
    def samples_per_step(self) -> int:
        """What an optimizer step has today, and should keep."""
        return self.baseline.samples_per_step(self.setup.gpus)

    def samples_before(self, samples: int) -> int:
        """What an optimizer step has today, with this many samples in all."""
        return max(1, min(self.samples_per_step, samples))

    @property
    def usable_bytes(self) -> int:
        """Memory of one GPU less the headroom."""
        return int(self.gpu.memory_bytes * (1 - self.headroom))

    @property
    def clock(self) -> Clock:
        """Seconds of packed passes."""
        return Clock(shape=self.shape, setup=self.setup, gpu=self.gpu, coefficients=self.time)

    @property
    def padded_setup(self) -> TrainingSetup:
        """How padded batches are trained: without what was changed to make room for packs."""
        setup, baseline = self.requested or self.setup, self.baseline
        chunked = setup.chunked_loss if baseline.chunked_loss is None else baseline.chunked_loss
        return replace(
            setup, attn_implementation=baseline.attn_implementation, compiled=baseline.compiled, chunked_loss=chunked
        )

    @property
    def padded_clock(self) -> Clock:
        """Seconds of padded passes."""
        return replace(self.clock, setup=self.padded_setup, coefficients=self._of_padded()[0])

    def epoch_of_packs(self, passes: PassColumns, length: int, per_step: int) -> float:
        """Seconds of an epoch of packs; compiled layers compute all of a pack's length, however full it is."""
        computed = passes.filled(length) if self.setup.compiled else passes
        return self.clock.epoch_of_packs(computed, per_step, self.seed)

    def padded_memory_of(self, load: Load) -> MemoryEstimate:
        """The peak of one GPU with such a padded batch."""
        return estimate_memory(self.shape, self.padded_setup, load, self._of_padded()[1])

    def _of_padded(self) -> tuple[Coefficients | None, MemoryCoefficients]:
        """What padded batches are predicted with: their own fit, that of packs where layers run alike, or defaults."""
        if self.padded_fit is not None:
            return self.padded_fit.time, self.padded_fit.memory
        alike = self.baseline.compiled == self.setup.compiled
        return (self.time, self.memory) if alike else (None, DEFAULT_COEFFICIENTS)

    def memory_of(self, load: Load, setup: TrainingSetup | None = None) -> MemoryEstimate:
        """The peak of one GPU with such a pass."""
        return estimate_memory(self.shape, setup or self.setup, load, self.memory)

    def fits(self, load: Load, setup: TrainingSetup | None = None) -> bool:
        """Is there room for such a pass, with headroom?"""
        return self.memory_of(load, setup).total <= self.usable_bytes


def packing_from(given: Mapping[str, object], *, seed: int) -> PackingConfig:
    """The fixed choices as a config; the length is a placeholder unless it is given."""
    names = [one.name for one in fields(PackingConfig)]
    for name in given:
        if name not in names:
            raise ConfigError(f"packing.{name}", got=name, expected=", ".join(names), fix=nearest(name, names))
    values = {"packing_length": UNDECIDED, "seed": seed, **given, "epochs": 1}
    return PackingConfig(**values)  # type: ignore[arg-type]  # the config checks every value itself
