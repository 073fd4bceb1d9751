"""How the user trains today, without packing: what a study compares with and whose intervals it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.core.errors import ConfigError
from packtrain.predicting.values import Attention

SAMPLES_PER_STEP = 128  # of an optimizer step, where nothing else is said
_COUNTS = (
    *("per_device_batch_size", "gradient_accumulation_steps", "effective_batch_size", "epochs"),
    *("warmup_steps", "eval_steps", "save_steps", "save_delay_steps", "logging_steps"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """A padded run. What is None was not set: intervals and warm-up are then proposed, learning rates left alone."""

    today: bool = False  # the user trains so; otherwise it is a stock setting, and called that
    per_device_batch_size: int = 2  # samples of one forward pass
    gradient_accumulation_steps: int | None = None  # None: from effective_batch_size
    effective_batch_size: int | None = None  # samples per optimizer step over all GPUs; None: about 128
    group_by_length: bool = False  # batches of samples that are about equally long
    attention: Attention = "sdpa"  # of padded batches; a flash kernel leaves their padding out of attention: varlen
    chunked_loss: bool | None = None  # None: as with packing
    compiled: bool = False  # layers are compiled; rows of other lengths have no static shapes
    epochs: int = 1
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
                raise ConfigError(f"baseline.{name}", got=repr(value), expected=f"a whole number from {least} on")
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
            return max(1, round(wanted / (self.per_device_batch_size * gpus)))
        samples = self.per_device_batch_size * gpus * self.gradient_accumulation_steps
        if self.effective_batch_size not in (None, samples):
            raise ConfigError(
                "baseline.effective_batch_size",
                got=f"{self.effective_batch_size}, but {self.per_device_batch_size} samples x {gpus} GPUs x "
                f"{self.gradient_accumulation_steps} micro-batches are {samples}",
                expected="numbers that agree",
                fix="leave gradient_accumulation_steps out, or effective_batch_size",
            )
        return self.gradient_accumulation_steps

    @property
    def name(self) -> str:
        """What it is called beside packing."""
        return "today's run" if self.today else "a stock padded run"

    @property
    def described(self) -> str:
        """Its name and how it computes.

        >>> Baseline().described
        'a stock padded run (batches of 2, random order, sdpa attention, eager layers)'
        """
        order = "grouped by length" if self.group_by_length else "random order"
        layers = "compiled" if self.compiled else "eager"
        size = self.per_device_batch_size
        return f"{self.name} (batches of {size}, {order}, {self.attention} attention, {layers} layers)"

    @property
    def says_step(self) -> bool:
        """Has anybody said how many samples an optimizer step has?"""
        return self.effective_batch_size is not None or self.gradient_accumulation_steps is not None

    def samples_per_step(self, gpus: int) -> int:
        """Samples of one optimizer step, over all GPUs."""
        each = self.per_device_batch_size * gpus * self.accumulation(gpus)
        return self.effective_batch_size or each  # rows of a step need not divide it
