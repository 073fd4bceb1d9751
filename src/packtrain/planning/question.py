"""What a study is about: the data, the model, the GPUs, how it is trained today, and what is fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from packtrain.core.errors import ConfigError, nearest
from packtrain.packing.packing_config import PackingConfig
from packtrain.planning.baseline import Baseline
from packtrain.planning.clock import Clock
from packtrain.planning.passes import PassColumns
from packtrain.planning.rows import CostRows
from packtrain.predicting.calibration import Fit
from packtrain.predicting.gpus import Gpu
from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, MemoryCoefficients, MemoryEstimate, estimate_memory
from packtrain.predicting.time import Coefficients
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

HEADROOM = 0.10  # of the GPU's memory that a plan leaves free: estimates are estimates


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Question:
    """Everything that decides the answer, except the lengths and limits that are tried."""

    rows: CostRows
    shape: ModelShape
    model: str
    gpu: Gpu
    setup: TrainingSetup
    baseline: Baseline
    packing: PackingConfig  # its packing_length is replaced by those that are tried
    epochs: int
    seed: int
    time: Coefficients | None
    memory: MemoryCoefficients
    own: TrainingSetup = field(default_factory=TrainingSetup)  # how packs are trained by what the user has said
    base: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the user's config, by section
    missing: frozenset[str] = frozenset()  # packages that are not there: what needs them is not recommended
    headroom: float = HEADROOM
    asked: TrainingSetup | None = None  # what `setup` was before options that make room were turned on
    padded_fit: Fit | None = None  # of padded batches, where their layers run otherwise than those of packs

    @property
    def samples_per_step(self) -> int:
        """What an optimizer step has today, and should keep."""
        return self.baseline.samples_per_step(self.setup.gpus)

    def samples_before(self, samples: int) -> int:
        """What an optimizer step has now, where there are so many samples in all."""
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
        setup, baseline = self.asked or self.setup, self.baseline
        chunked = setup.chunked_loss if baseline.chunked_loss is None else baseline.chunked_loss
        return replace(setup, attention=baseline.attention, compiled=baseline.compiled, chunked_loss=chunked)

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
    values = {"packing_length": 2**61, "seed": seed, **given, "epochs": 1}
    return PackingConfig(**values)  # type: ignore[arg-type]  # the config checks every value itself
