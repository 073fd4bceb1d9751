"""The models of the training benchmark: random weights in the shapes of Qwen3-VL-2B and Qwen3-8B, tiny ones for CPUs.

Those of text alone compare adapters, the larger ones what a whole model can be trained with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from packtrain.core.errors import ConfigError, nearest
from packtrain.families.known_shapes import known_config
from packtrain.predicting.shapes import shape_from_config
from packtrain.predicting.values import ModelShape
from packtrain.training.trial import build


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchModel:
    """One model by its config, and how long packs of it are."""

    name: str
    config: Mapping[str, Any]
    longest: int  # samples that are longer are left out, so that every row trains on the same ones
    capacities: tuple[int, ...]
    sort_limit: int  # tokens of a padded batch that fit without checkpointing

    @property
    def sees(self) -> bool:
        """Do its samples have images?"""
        return self.shape.vision is not None

    @property
    def shape(self) -> ModelShape:
        return shape_from_config(self.config)

    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model with random weights, made where it is used."""
        return build(self.config, device, dtype)


TINY, TINY_TEXT = "tiny", "tiny-text"
_MODELS = (
    BenchModel(
        name="qwen3-vl-2b",
        config=known_config("qwen3-vl-2b"),
        longest=8_192,
        capacities=(8_192, 16_384, 20_000),
        sort_limit=16_384,
    ),
    BenchModel(
        name="qwen3-8b",
        config=known_config("qwen3-8b"),
        longest=8_192,
        capacities=(8_192, 16_384),
        sort_limit=8_192,
    ),
    BenchModel(
        name=TINY,
        config=known_config("small"),
        longest=256,
        capacities=(384, 512),
        sort_limit=1_024,
    ),
    BenchModel(
        name=TINY_TEXT,
        config=known_config("small-text"),
        longest=256,
        capacities=(384,),
        sort_limit=1_024,
    ),
)
MODELS: Mapping[str, BenchModel] = {model.name: model for model in _MODELS}


def bench_model(name: str) -> BenchModel:
    """The model of that name."""
    if name not in MODELS:
        raise ConfigError("--model", got=name, expected=", ".join(MODELS), fix=nearest(name, MODELS))
    return MODELS[name]
