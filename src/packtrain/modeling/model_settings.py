"""Which model is trained, which of its parts are trainable, and in what precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from packtrain.core.errors import ConfigError, nearest
from packtrain.predicting.values import CHOICES, Method

Dtype = Literal["auto", "bf16", "fp16", "fp32"]
LEARNING_DTYPES = "bf16 or fp32; fp16 only for frozen weights under adapters"
INSTEAD_OF_FP16 = "use dtype: bf16, or dtype: fp32 with training.fp16: true"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """A model and what of it is trained. Parts that are None are trained in full fine-tuning, not beside adapters."""

    name: str  # folder, hub name or tiny:FAMILY
    method: Method = "full"
    lora_rank: int = 16
    lora_alpha: float | None = None  # None: twice the rank
    lora_dropout: float = 0.0
    lora_target_modules: tuple[str, ...] | None = None  # None: every matrix of the decoder's layers
    train_language: bool = True  # with adapters: whether there are any
    train_vision: bool | None = None
    train_projector: bool | None = None
    dtype: Dtype = "auto"  # of weights; auto: bf16 on a GPU that has it, else fp32; fp16: frozen ones
    attn_implementation: str = "auto"

    def __post_init__(self) -> None:
        for name, allowed in (("method", CHOICES["method"]), ("dtype", get_args(Dtype))):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(
                    f"model.{name}", got=value, expected=", ".join(allowed), fix=nearest(str(value), allowed)
                )
        if self.lora_rank < 1:
            raise ConfigError("model.lora_rank", got=self.lora_rank, expected="at least 1")
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError("model.lora_dropout", got=self.lora_dropout, expected="from 0 to below 1")
        if not (self.train_language or self.trains_vision or self.trains_projector):
            raise ConfigError("model", got="every part frozen", expected="a trainable part")
        whole = (self.train_language and not self.has_adapters) or self.trains_vision or self.trains_projector
        if self.dtype == "fp16" and whole:
            raise ConfigError(
                "model.dtype", got="fp16 for trainable weights", expected=LEARNING_DTYPES, fix=INSTEAD_OF_FP16
            )

    @property
    def has_adapters(self) -> bool:
        return self.method != "full"

    @property
    def scale(self) -> float:
        """The alpha of adapters."""
        return 2 * self.lora_rank if self.lora_alpha is None else self.lora_alpha

    @property
    def trains_vision(self) -> bool:
        return not self.has_adapters if self.train_vision is None else self.train_vision

    @property
    def trains_projector(self) -> bool:
        return not self.has_adapters if self.train_projector is None else self.train_projector
