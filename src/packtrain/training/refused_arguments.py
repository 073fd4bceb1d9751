"""TrainingArguments that this trainer refuses, beside those that contradict a schedule."""

from __future__ import annotations

from typing import Any

from transformers import TrainingArguments

from packtrain.core.errors import ConfigError
from packtrain.delivery.trainers.refused_arguments import OWN_LOSS, refused_arguments

_OPTIONS = {
    "compute_metrics": "there are no logits, only a loss",
    "preprocess_logits_for_metrics": "there are no logits, only a loss",
    "model_init": "pass a model prepared for packs",
}


def refuse_arguments(
    args: TrainingArguments, *, options: dict[str, Any], weighting: str = "token", packing: bool = True
) -> None:
    """All of them at once. `weighting` is that of the loss over tokens; `packing`: rows hold several samples."""
    problems = refused_arguments(args, "trainer", packing=packing)
    problems += [f"{name}: {why}" for name, why in _OPTIONS.items() if options.get(name) is not None]
    if options.get("compute_loss_func") is not None and weighting != "token":
        problems.append(
            f"compute_loss_func with loss_weighting {weighting!r}: a custom loss does not get the weights, yet would "
            "be divided by their sum; use loss_weighting 'token', or leave compute_loss_func out"
        )
    if options.get("compute_loss_func") is not None and args.label_smoothing_factor:
        problems.append(f"label_smoothing_factor: {args.label_smoothing_factor} ({OWN_LOSS})")
    if problems:
        raise ConfigError(
            "training arguments",
            problems=problems,
            expected="arguments that PackedTrainer supports",
            fix="leave these out",
        )


def refuse_unsharded(args: TrainingArguments, *, is_sharded: bool) -> None:
    """Accelerate shards on GPUs only; elsewhere it would train whole copies and say nothing."""
    if args.fsdp and args.world_size > 1 and not is_sharded:
        raise ConfigError(
            "training.sharding fsdp",
            got=f"{args.world_size} processes on {args.device.type}, on which accelerate does not shard weights",
            expected="processes with a GPU each",
            fix="leave out sharding or deepspeed: each process then has a full copy (ddp)",
        )
