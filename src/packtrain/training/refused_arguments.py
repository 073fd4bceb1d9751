"""TrainingArguments that this trainer refuses, beside those that contradict a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainingArguments

from packtrain.core.errors import ConfigError
from packtrain.delivery.trainers.mixin import OWN_LOSS

SHARDED = "SHARDED_STATE_DICT"
_REFUSED: tuple[tuple[Callable[[TrainingArguments], Any], str], ...] = (
    (
        lambda args: args.torch_compile,
        "torch_compile: it recompiles the whole model for every shape; use `compile`, which compiles its layers",
    ),
    (
        lambda args: args.use_liger_kernel,
        "use_liger_kernel: it replaces the loss and the forward passes that were checked; leave it off",
    ),
    (
        lambda args: getattr(args, "enable_jit_checkpoint", False),
        "enable_jit_checkpoint: SIGTERM is handled here already, with a checkpoint at the end of the step",
    ),
    (
        lambda args: args.restore_callback_states_from_checkpoint,
        "restore_callback_states_from_checkpoint: everything needed is restored without it",
    ),
    (
        lambda args: args.fsdp and int((args.fsdp_config or {}).get("version", 2)) != 2,
        "fsdp_config.version: only version 2 is supported",
    ),
    (
        lambda args: args.fsdp and (args.fsdp_config or {}).get("state_dict_type", SHARDED) != SHARDED,
        f"fsdp_config.state_dict_type: only {SHARDED}, which any number of ranks can load",
    ),
    (
        lambda args: args.fp16_full_eval or args.bf16_full_eval,
        "fp16_full_eval, bf16_full_eval: they would cast the trained weights",
    ),
)
_OPTIONS = {
    "compute_metrics": "there are no logits, only a loss",
    "preprocess_logits_for_metrics": "there are no logits, only a loss",
    "model_init": "pass a model prepared for packs",
}


def refuse_arguments(
    args: TrainingArguments, *, options: dict[str, Any], weighting: str = "token", packing: bool = True
) -> None:
    """All of them at once. `weighting` is that of the loss over tokens; `packing`: rows hold several samples."""
    problems = [why for wrong, why in _REFUSED if wrong(args)]
    if packing and args.neftune_noise_alpha:
        problems.append(
            "neftune_noise_alpha: its noise shrinks with the length of a row, so packed samples get less of it; "
            "leave it out, or train padded rows (packing: false)"
        )
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
