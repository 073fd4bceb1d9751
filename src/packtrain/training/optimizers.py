"""The optimizer of a run: Trainer's choice of its kind, with a group for each part of the model and fp32 masters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from packtrain.core.errors import ConfigError
from packtrain.modeling.groups import parameter_groups
from packtrain.modeling.model_settings import INSTEAD_OF_FP16, LEARNING_DTYPES
from packtrain.training.masters import make_optimizer
from packtrain.training.step_settings import StepSettings


def optimizer_of(
    model: Any, args: TrainingArguments, settings: StepSettings, chosen: tuple[Any, dict[str, Any]] | None = None
) -> Optimizer | None:
    """The optimizer that the arguments name, or the chosen one; None where it makes groups itself, as Trainer knows."""
    kind, options = chosen or Trainer.get_optimizer_cls_and_kwargs(args, model)
    rates = {"vit_lr": settings.vit_lr, "aligner_lr": settings.aligner_lr}
    ordinary = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if not ordinary or {"params", "model", "optimizer_dict"} & options.keys():
        wanted = {**rates, "master_weights": settings.master_weights or None}
        asked = [name for name, value in wanted.items() if value is not None]
        if asked:
            raise ConfigError(
                f"training.{', '.join(asked)}",
                got=f"optimizer {args.optim}, which builds its own parameter groups",
                expected="an optimizer that accepts parameter groups",
                fix="leave them out, or use adamw_torch_fused",
            )
        return None
    groups = parameter_groups(model, learning_rate=args.learning_rate, weight_decay=args.weight_decay, **rates)
    if not args.deepspeed:
        _refuse_fp16(groups)
    masters = False if args.deepspeed else settings.master_weights  # DeepSpeed keeps its own
    made = make_optimizer(kind, groups, options, masters=masters)
    if "bitsandbytes" in str(kind) and options.get("optim_bits") == 8:
        _keep_embeddings_wide(model)
    return made


def _refuse_fp16(groups: Sequence[Mapping[str, Any]]) -> None:
    """One gradient that is too large for fp16 would spoil masters for good, and torch does not unscale fp16 ones."""
    if any(weight.dtype == torch.float16 for group in groups for weight in group["params"]):
        raise ConfigError("model.dtype", got="trainable fp16 weights", expected=LEARNING_DTYPES, fix=INSTEAD_OF_FP16)


def _keep_embeddings_wide(model: nn.Module) -> None:
    """As Trainer does it: 8-bit states of embeddings, whose rows have few gradients, are unstable."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
