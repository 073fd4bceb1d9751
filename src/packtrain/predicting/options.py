"""What each way to need less GPU memory would save of the worst case, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, MemoryCoefficients, estimate_memory
from packtrain.predicting.values import Load, ModelShape, TrainingSetup

# Options that train the same weights in the same way.
CHEAP = (
    *("gradient checkpointing", "vision checkpointing", "vision sub-batches"),
    *("chunked loss", "attention", "sharding"),
)
NOTHING = 0.002  # of the memory: an option that saves less saves nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """One change alone, everything else as it is; negative bytes are what it would need on top."""

    option: str
    change: str
    bytes: int
    total_after: int
    cost: str  # in time or elsewhere, or what it gives back; why it saves nothing, where it does not
    seconds: float | None = None  # an epoch with it, predicted
    lost: int = 0  # further samples that it leaves out


def savings(
    shape: ModelShape,
    setup: TrainingSetup,
    load: Load,
    coefficients: MemoryCoefficients = DEFAULT_COEFFICIENTS,
    seconds: Callable[[TrainingSetup], float | None] = lambda _: None,
) -> tuple[Saving, ...]:
    """Every option that is not in use yet, the largest saving first; `seconds` predicts an epoch of a setup."""
    now = estimate_memory(shape, setup, load, coefficients)

    def saving(option: str, change: str, cost: str, changes: dict[str, Any]) -> Saving:
        then = replace(setup, **changes)
        total = estimate_memory(shape, then, load, coefficients).total
        if total == now.total:
            cost += f"; saves nothing: memory peaks during {now.moment}, when this is not allocated"
        return Saving(
            option=option, change=change, bytes=now.total - total, total_after=total, cost=cost, seconds=seconds(then)
        )

    has_vision = shape.vision is not None and load.patches > 0
    options = (*_layer_options(setup), *(_vision_options(setup, load) if has_vision else ()), *_state_options(setup))
    return tuple(sorted((saving(*one) for one in options), key=lambda one: (-one.bytes, one.option, one.change)))


_Option = tuple[str, str, str, dict[str, Any]]  # option, change, cost, fields of the setup with it


def _layer_options(setup: TrainingSetup) -> Iterator[_Option]:
    if setup.gradient_checkpointing:
        cost = "saves about a quarter of the decoder's time"
        yield "gradient checkpointing", "on -> off", cost, {"gradient_checkpointing": False}
    else:
        cost = "each layer runs forward twice: about a third more time"
        yield "gradient checkpointing", "off -> on", cost, {"gradient_checkpointing": True}
    if not setup.chunked_loss:
        change = f"logits at supervised positions only, {setup.loss_chunk:,} at once"
        yield "chunked loss", change, "none worth mentioning; logits are not returned", {"chunked_loss": True}
    for kernel in {"eager": ("sdpa", "varlen"), "sdpa": ("varlen",), "varlen": ()}[setup.attn_implementation]:
        cost = "none, it is faster" if kernel == "varlen" else "none"
        yield "attention", f"{setup.attn_implementation} -> {kernel}", cost, {"attn_implementation": kernel}


def _vision_options(setup: TrainingSetup, load: Load) -> Iterator[_Option]:
    on = setup.vision_checkpointing
    if setup.train_vision:
        cost = "saves about a quarter of the encoder's time" if on else "the encoder runs forward twice"
        yield "vision checkpointing", "on -> off" if on else "off -> on", cost, {"vision_checkpointing": not on}
        cost = "the encoder is not trained; it also runs no backward pass"
        yield "frozen vision encoder", "trained -> frozen", cost, {"train_vision": False}
        if not on:
            return  # then everything is kept for the backward pass, in however many parts it was computed
    whole = min(load.patches, setup.vision_batch_patches or load.patches)
    for name, share in (("half", 2), ("a quarter", 4), ("an eighth", 8)):
        patches = max(whole // share, load.largest_patches, 1)
        if patches < whole:
            cost, changes = "smaller kernels, a little slower", {"vision_batch_patches": patches}
            yield "vision sub-batches", f"{name}: {patches:,} patches at once", cost, changes


def _state_options(setup: TrainingSetup) -> Iterator[_Option]:
    if setup.weights_dtype == "fp32":
        cost = "less exact updates; faster on GPUs with bf16"
        yield "weights in bf16", "fp32 -> bf16", cost, {"weights_dtype": "bf16"}
    if setup.method == "full":
        cost = f"only adapters of rank {setup.lora_rank} are trained in the decoder"
        yield "LoRA", f"full -> lora, rank {setup.lora_rank}", cost, {"method": "lora"}
    if setup.method != "qlora":
        cost = "adapters only, on 4-bit weights that are dequantized in every micro-batch: slower"
        yield "QLoRA", f"{setup.method} -> qlora, rank {setup.lora_rank}", cost, {"method": "qlora"}
    whole = setup.method == "full" or setup.train_vision or setup.train_projector
    if whole and setup.has_masters and not setup.sharding.startswith("zero"):
        cost = "updates below the precision of the weights are lost, most of them at low learning rates"
        yield "master weights", "fp32 -> none", cost, {"master_weights": False}
    if setup.optimizer == "adamw":
        cost = "needs bitsandbytes; states are quantized, and weights have no fp32 masters"
        yield "8-bit optimizer", "adamw -> adamw_8bit", cost, {"optimizer": "adamw_8bit"}
        cost = "another optimizer: tune its learning rate"
        yield "factored optimizer", "adamw -> adafactor", cost, {"optimizer": "adafactor"}
    costs = {
        "zero2": "needs DeepSpeed; about the same communication",
        "zero3": "needs DeepSpeed; weights are gathered in every micro-batch",
        "fsdp": "weights are gathered in every micro-batch",
    }
    for sharding, cost in costs.items():
        if setup.gpus > 1 and sharding != setup.sharding:
            yield "sharding", f"{setup.sharding} -> {sharding} over {setup.gpus} GPUs", cost, {"sharding": sharding}
