"""The optimizer of a run: Trainer's choice of its kind, with a group for each part of the model and fp32 masters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import Trainer, TrainingArguments

from packtrain.core.errors import ConfigError
from packtrain.modeling.model_parts import PARTS, model_parts, part_of_weight
from packtrain.modeling.model_settings import INSTEAD_OF_FP16, LEARNING_DTYPES
from packtrain.training.masters import ParameterGroup, make_optimizer
from packtrain.training.step_settings import StepSettings


def build_optimizer(
    model: Any, args: TrainingArguments, settings: StepSettings, chosen: tuple[Any, dict[str, Any]] | None = None
) -> Optimizer | None:
    """The optimizer that the arguments name, or the chosen one; None where it makes groups itself, as Trainer knows."""
    kind, options = chosen or Trainer.get_optimizer_cls_and_kwargs(args, model)
    rates = {"vit_lr": settings.vit_lr, "aligner_lr": settings.aligner_lr}
    ordinary = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    if not ordinary or {"params", "model", "optimizer_dict"} & options.keys():
        special = {**rates, "master_weights": settings.master_weights or None}
        asked = [name for name, value in special.items() if value is not None]
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
    optimizer = make_optimizer(kind, groups, options, masters=masters)
    if "bitsandbytes" in str(kind) and options.get("optim_bits") == 8:
        _keep_embeddings_wide(model)
    return optimizer


def _refuse_fp16(groups: Sequence[ParameterGroup]) -> None:
    """One gradient that is too large for fp16 would spoil masters for good, and torch does not unscale fp16 ones."""
    if any(weight.dtype == torch.float16 for group in groups for weight in group["params"]):
        raise ConfigError("model.dtype", got="trainable fp16 weights", expected=LEARNING_DTYPES, fix=INSTEAD_OF_FP16)


def _keep_embeddings_wide(model: nn.Module) -> None:
    """32-bit states for embeddings, as in Trainer: their rows have few gradients, so 8-bit states are unstable."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


# ---- groups


def parameter_groups(
    model: Any,
    *,
    learning_rate: float,
    vit_lr: float | None = None,
    aligner_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[ParameterGroup]:
    """Groups for a torch optimizer: every trained parameter in exactly one.

    A group's `name` is its part of the model. Biases and norms have a group of their own, also where nothing decays,
    so that a resumed run may change the decay. Wrapped models (DDP, FSDP2, adapters) give the same groups.
    """
    rates = {"language": learning_rate, "vision": vit_lr, "projector": aligner_lr}
    decaying = set(_decaying(model))
    members: dict[tuple[str, bool], list[Any]] = {(part, decays): [] for part in PARTS for decays in (True, False)}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            members[part_of_weight(name), name in decaying].append(weight)
    for setting, part, rate in (("vit_lr", "vision", vit_lr), ("aligner_lr", "projector", aligner_lr)):
        if rate is not None and not members[part, True] and not members[part, False]:
            raise _frozen(model, setting, part, rate)
    return [
        {
            "name": part,
            "params": weights,
            "lr": learning_rate if (rate := rates[part]) is None else rate,
            "weight_decay": weight_decay if decays else 0.0,
        }
        for (part, decays), weights in members.items()
        if weights
    ]


def _decaying(model: Any) -> list[str]:
    """Trainer's own choice of what decays, everything but biases and norms, without the vectors among it.

    Trainer knows norms by their names, and not all have one: those of Qwen2.5-VL's encoder are `norm1` and `ln_q`.
    """
    from transformers import Trainer

    chosen = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    return [name for name, weight in model.named_parameters() if name in chosen and weight.ndim > 1]


def _frozen(model: Any, setting: str, part: str, rate: float) -> ConfigError:
    if model_parts(model).vision is None:
        why, fix = "the model has no vision encoder", f"leave {setting} out"
    else:
        why, fix = f"the {part} part is frozen", f"set train_{part}: true, or leave {setting} out"
    return ConfigError(
        f"training.{setting}", got=f"{rate}, and {why}", expected="a learning rate of a part that is trained", fix=fix
    )
