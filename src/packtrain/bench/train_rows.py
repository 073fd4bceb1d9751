"""The rows of the training benchmark: how samples are put into batches, and how the model is run on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from packtrain.bench.train_data import Batching
from packtrain.bench.train_shapes import BenchModel
from packtrain.predicting.values import Attention, Method, TrainingSetup

ADAPTERS: tuple[Method, ...] = ("lora", "dora", "qlora")
BASELINE, YARDSTICK = "padded, 2 a batch", "padded, sorted by length"

# As transformers trains by itself: nothing of what makes packs fast, and nothing of what it costs.
_AS_OTHERS: dict[str, Any] = {"compiled": False, "masters": False, "tuned": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One way to train; what is not said is the fast way."""

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
            attention=self.attention,
            compiled=self.compiled,
        )


def bench_rows(model: BenchModel) -> tuple[BenchRow, ...]:
    """All rows; those that leave the model as transformers has it come first."""
    if not model.sees:
        return tuple(row for method in ADAPTERS for row in _adapters(model, method))
    return (*_padded(model), *_packed(model, "full"), *_variants(model), *_packed(model, "lora"))


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


def _variants(model: BenchModel) -> tuple[BenchRow, ...]:
    """What fp32 masters cost, at the middle length."""
    size = model.capacities[len(model.capacities) // 2]
    return (BenchRow(name=f"packed {size:,}, without fp32 masters", size=size, masters=False),)


def _padded(model: BenchModel) -> tuple[BenchRow, ...]:
    limit = model.sort_limit
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
    return (
        baseline,
        replace(baseline, name=f"{BASELINE}, cuDNN's attention", cudnn=True, share=0.2),
        BenchRow(name=YARDSTICK, batching="sorted", size=8, limit=limit, attention="sdpa", **_AS_OTHERS),
        BenchRow(
            name="padded, grouped by length as in Trainer",
            batching="grouped",
            size=8,
            limit=limit,
            attention="sdpa",
            **_AS_OTHERS,
            share=0.6,
        ),
        BenchRow(
            name="padded, sorted by length, varlen",
            batching="sorted",
            size=8,
            limit=limit,
            **_AS_OTHERS,
            share=0.6,
        ),
        BenchRow(name="padded, sorted by length, compiled", batching="sorted", size=8, limit=limit, share=0.6),
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
