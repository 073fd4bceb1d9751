"""The values that estimates exchange: a model's shape, how it is trained, and what one forward pass sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from packtrain.core.errors import ConfigError, nearest
from packtrain.families.shape import LanguageShape, VisionShape

Method = Literal["full", "lora", "dora", "qlora"]
Sharding = Literal["ddp", "zero1", "zero2", "zero3", "fsdp"]
Optimizer = Literal["adamw", "adamw_8bit", "adafactor", "sgd"]
Attention = Literal["varlen", "sdpa", "eager"]
CHOICES: dict[str, tuple[str, ...]] = {
    "method": ("full", "lora", "dora", "qlora"),
    "sharding": ("ddp", "zero1", "zero2", "zero3", "fsdp"),
    "optimizer": ("adamw", "adamw_8bit", "adafactor", "sgd"),
    "attn_implementation": ("varlen", "sdpa", "eager"),
    "weights_dtype": ("bf16", "fp32"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Parameters by the parts that are trained, frozen or sharded apart."""

    embedding: int
    layers: int  # all decoder layers and the final norm
    head: int  # 0 where it is the embedding
    vision: int = 0
    projector: int = 0

    @property
    def language(self) -> int:
        """Everything of the language model."""
        return self.embedding + self.layers + self.head

    @property
    def total(self) -> int:
        """The whole model."""
        return self.language + self.vision + self.projector


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model as the estimates see it."""

    model_type: str
    language: LanguageShape
    vision: VisionShape | None
    parameters: ParameterCounts
    counted_from: Literal["config", "weights"]  # weights: the headers of safetensors files
    notes: tuple[str, ...] = ()  # what was assumed where the config does not say it


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What one forward pass of one GPU sees: a pack, a padded batch, or the worst of a plan.

    Squares are sums over what attends to itself: samples in the language model; images, tiles and video steps in the
    encoder.
    """

    tokens: int  # positions of the language model, padding included
    squared_tokens: int  # sum over samples of length squared
    longest: int  # the longest sample
    samples: int = 1
    rows: int = 1  # 1 for a pack; the batch size when padded
    supervised_tokens: int = 0
    vision_tokens: int = 0
    patches: int = 0
    squared_patches: int = 0
    largest_patches: int = 0  # the largest span that attends to itself
    images: int = 0
    frames: int = 0

    @classmethod
    def from_counts(
        cls,
        *,
        tokens: int,
        squared_tokens: int,
        longest: int,
        samples: int,
        rows: int,
        supervised_tokens: int,
        vision_tokens: int,
        patches: int,
        squared_patches: int | None,
        largest_patches: int | None,
        images: int,
        spans: int = 1,
        frames: int = 0,
    ) -> Load:
        """A load of real data, where no count may be forgotten.

        Where the squares or the largest of the patches are not known, all of the `spans` that attend to themselves are
        taken to be of one size.

        >>> load = Load.from_counts(
        ...     tokens=9, squared_tokens=41, longest=5, samples=2, rows=1, supervised_tokens=3, vision_tokens=2,
        ...     patches=8, squared_patches=None, largest_patches=None, images=2, spans=2,
        ... )
        >>> load.squared_patches, load.largest_patches
        (32, 4)
        """
        spans = max(spans, 1)
        return cls(
            tokens=tokens,
            squared_tokens=squared_tokens,
            longest=longest,
            samples=max(samples, 1),
            rows=max(rows, 1),
            supervised_tokens=supervised_tokens,
            vision_tokens=vision_tokens,
            patches=patches,
            squared_patches=patches * patches // spans if squared_patches is None else squared_patches,
            largest_patches=-(-patches // spans) if largest_patches is None else largest_patches,
            images=images,
            frames=frames,
        )

    @classmethod
    def mean(cls, loads: Sequence[Load]) -> Load:
        """The mean of every number, except the longest sample and the largest span: they stay the largest."""
        largest, average = cls.largest(loads), {}
        for one in fields(cls):
            if one.name not in ("longest", "largest_patches"):
                average[one.name] = round(sum(getattr(load, one.name) for load in loads) / len(loads))
        return replace(largest, **average)

    @classmethod
    def largest(cls, loads: Sequence[Load]) -> Load:
        """The largest of every number: none of these loads needs more."""
        return cls(**{one.name: max(getattr(load, one.name) for load in loads) for one in fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSetup:
    """How the model is trained, as far as memory and time depend on it."""

    method: Method = "full"
    lora_rank: int = 16
    train_vision: bool = True
    train_projector: bool = True
    weights_dtype: Literal["bf16", "fp32"] = "bf16"
    optimizer: Optimizer = "adamw"
    master_weights: bool = True  # the optimizer keeps and updates fp32 copies of trainable half-precision weights
    sharding: Sharding = "ddp"
    gpus: int = 1
    gradient_checkpointing: bool = True
    vision_checkpointing: bool = True
    vision_batch_patches: int | None = None  # the encoder runs in sub-batches of at most this many patches
    chunked_loss: bool = True  # logits only at supervised positions, in chunks
    loss_chunk: int = 4096  # positions at once
    attn_implementation: Attention = "varlen"
    compiled: bool = False  # layers are compiled one by one

    @property
    def has_masters(self) -> bool:
        """Are there fp32 copies of weights? fp32 weights need none, and 8-bit optimizers have none."""
        if self.sharding.startswith("zero"):
            return self.weights_dtype != "fp32"  # DeepSpeed's own
        return self.master_weights and self.weights_dtype != "fp32" and self.optimizer != "adamw_8bit"

    @property
    def half_adapters(self) -> bool:
        """Are adapters kept in the half precision of the weights? Only with masters, and not DoRA's: it needs norms."""
        if self.sharding.startswith("zero"):
            return self.has_masters  # DeepSpeed trains everything in one type
        return self.has_masters and self.method in ("lora", "qlora")

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(name, got=value, expected=", ".join(allowed), fix=nearest(str(value), allowed))
        for name in ("lora_rank", "gpus", "loss_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(name, got=getattr(self, name), expected="at least 1")
        if self.vision_batch_patches is not None and self.vision_batch_patches < 1:
            raise ConfigError("vision_batch_patches", got=self.vision_batch_patches, expected="at least 1, or none")
