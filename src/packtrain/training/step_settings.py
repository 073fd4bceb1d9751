"""How an optimizer step is computed, as far as it is not one of Trainer's own arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from packtrain.core.errors import ConfigError, nearest
from packtrain.delivery.collate.batch_values import LossWeighting

LOSS_CHUNK = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """Learning rates by part of the model, how its encoders run, and how the loss is taken."""

    vit_lr: float | None = None  # None: Trainer's learning_rate
    aligner_lr: float | None = None
    vision_checkpointing: bool | None = None  # None: as gradient_checkpointing
    vision_batch_patches: int | None = None  # the encoder runs on at most this many patches at once
    chunked_loss: bool = True  # logits at supervised positions only, in chunks; False: the whole row at once
    loss_chunk: int = LOSS_CHUNK
    loss_weighting: LossWeighting = "token"
    master_weights: bool | None = None  # fp32 copies that are updated; None: of half-precision weights that learn
    compile: bool | None = None  # decoder layers for static shapes; None: on a GPU, when packs are trained
    save_delay_steps: int = 0  # no checkpoint before this step
    early_stopping_patience: int | None = None  # evaluations without a better loss
    early_stopping_threshold: float = 0.0

    def __post_init__(self) -> None:
        if self.loss_weighting not in get_args(LossWeighting):
            names = get_args(LossWeighting)
            raise ConfigError(
                "training.loss_weighting",
                got=self.loss_weighting,
                expected=", ".join(names),
                fix=nearest(str(self.loss_weighting), names),
            )
        for name, least in (("loss_chunk", 1), ("vision_batch_patches", 1), ("early_stopping_patience", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"training.{name}", got=value, expected=f"at least {least}")
        for name in ("vit_lr", "aligner_lr", "save_delay_steps", "early_stopping_threshold"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"training.{name}", got=value, expected="0 or more")
