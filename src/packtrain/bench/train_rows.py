"""The models of the training benchmark, and its rows: how samples are put into batches, and how a model is run on them.

Models have random weights: the shapes of Qwen3-VL-2B and Qwen3-8B, and tiny ones for CPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from packtrain.bench.train_data import Batching
from packtrain.core.errors import ConfigError, nearest
from packtrain.families.registry import known_config
from packtrain.predicting.shapes import shape_from_config
from packtrain.predicting.values import Attention, Method, ModelShape, TrainingSetup
from packtrain.training.trial import build

# ---- models


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchModel:
    """One model by its config, and how long packs of it are."""

    name: str
    config: Mapping[str, Any]
    longest: int  # samples that are longer are left out, so that every row trains on the same ones
    capacities: tuple[int, ...]
    sort_limit: int  # tokens of a padded batch that fit without checkpointing
    tiny: bool = False  # for a CPU: lengths are divided by 24, and there are fewer samples

    @property
    def has_vision(self) -> bool:
        """Whether its samples have images."""
        return self.shape.vision is not None

    @property
    def shape(self) -> ModelShape:
        return shape_from_config(self.config)

    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model with random weights, made where it is used."""
        return build(self.config, device, dtype)


TINY, TINY_TEXT = "tiny", "tiny-text"
_MODELS = (  # those of text alone compare adapters, the others what a whole model can be trained with
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
        tiny=True,
    ),
    BenchModel(
        name=TINY_TEXT,
        config=known_config("small-text"),
        longest=256,
        capacities=(384,),
        sort_limit=1_024,
        tiny=True,
    ),
)
MODELS: Mapping[str, BenchModel] = {model.name: model for model in _MODELS}


def bench_model(name: str) -> BenchModel:
    """The model of that name."""
    if name not in MODELS:
        raise ConfigError("--model", got=name, expected=", ".join(MODELS), fix=nearest(name, MODELS))
    return MODELS[name]


# ---- rows

ADAPTERS: tuple[Method, ...] = ("lora", "dora", "qlora")
BASELINE, YARDSTICK = "padded, 2 a batch", "padded, sorted by length"

# As transformers trains by itself: nothing of what makes packs fast, and nothing of what it costs.
_AS_OTHERS: dict[str, Any] = {"compiled": False, "masters": False, "tuned": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One way to train; defaults are the fast way."""

    name: str
    batching: Batching = "packed"
    size: int  # tokens of a pack, or samples of a padded batch
    limit: int | None = None  # padded tokens of a batch: batches of long samples have fewer
    method: Method = "full"
    attention: Attention = "varlen"
    checkpointing: bool = False
    chunked_loss: bool = True
    masters: bool = True  # of weights in half precision
    compiled: bool = True
    # Positions from the collator, patch embeddings as matrix products, no waiting for the GPU; stays so for later rows.
    tuned: bool = True
    cudnn: bool = False  # let torch choose cuDNN's attention, as it does by default
    share: float = 1.0  # of the tokens that other rows are timed on

    @property
    def is_packed(self) -> bool:
        return self.batching == "packed"

    def setup(self, chunk: int) -> TrainingSetup:
        """As the estimates see it."""
        full = self.method == "full"
        return TrainingSetup(
            method=self.method,
            lora_rank=16,
            train_vision=full,
            train_projector=full,
            master_weights=self.masters,
            gradient_checkpointing=self.checkpointing,
            vision_checkpointing=self.checkpointing,
            chunked_loss=self.chunked_loss,
            loss_chunk=chunk,
            attn_implementation=self.attention,
            compiled=self.compiled,
        )


def bench_rows(model: BenchModel) -> tuple[BenchRow, ...]:
    """All rows; those that leave the model as transformers has it come first."""
    if not model.has_vision:
        return tuple(row for method in ADAPTERS for row in _adapters(model, method))
    middle = model.capacities[len(model.capacities) // 2]
    rounded = BenchRow(name=f"packed {middle:,}, without fp32 masters", size=middle, masters=False)
    return (*_padded(model), *_packed(model, "full"), rounded, *_packed(model, "lora"))


def with_method(name: str, method: Method) -> str:
    """The name of a row, when another method is used."""
    return name if method == "full" else f"{name}, {method}"


def _adapters(model: BenchModel, method: Method) -> tuple[BenchRow, ...]:
    """One kind of adapters: padded as others train, and in packs."""
    baseline, yardstick = (row for row in _padded(model) if row.name in (BASELINE, YARDSTICK))
    # Adapters in half precision with fp32 masters as in packs: what peft makes by itself is slower.
    ours: dict[str, Any] = {"method": method, "masters": True}
    padded = [replace(row, name=with_method(row.name, method), **ours) for row in (baseline, yardstick)]
    again = replace(padded[1], name=f"{padded[1].name}, checkpointing", checkpointing=True)
    return (*padded, again, *_packed(model, method))


def _padded(model: BenchModel) -> tuple[BenchRow, ...]:
    baseline = BenchRow(
        name=BASELINE,
        batching="random",
        size=2,
        attention="sdpa",
        checkpointing=True,
        chunked_loss=False,
        **_AS_OTHERS,
        share=0.4,
    )
    by_length: dict[str, Any] = {"batching": "sorted", "size": 8, "limit": model.sort_limit}
    yardstick = BenchRow(name=YARDSTICK, attention="sdpa", **by_length, **_AS_OTHERS)
    return (
        baseline,
        replace(baseline, name=f"{BASELINE}, cuDNN's attention", cudnn=True, share=0.2),
        yardstick,
        replace(yardstick, name="padded, grouped by length as in Trainer", batching="grouped", share=0.6),
        BenchRow(name=f"{YARDSTICK}, varlen", **by_length, **_AS_OTHERS, share=0.6),
        BenchRow(name=f"{YARDSTICK}, compiled", **by_length, share=0.6),
    )


def _packed(model: BenchModel, method: Method) -> tuple[BenchRow, ...]:
    return tuple(
        BenchRow(
            name=with_method(f"packed {size:,}", method) + (", checkpointing" if checkpointing else ""),
            size=size,
            method=method,
            checkpointing=checkpointing,
            share=2.0 if method == "full" and not checkpointing else 0.6,
        )
        for size in model.capacities
        for checkpointing in (False, True)
    )
