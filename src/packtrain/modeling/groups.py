"""Parameter groups of an optimizer: a learning rate for each part of the model, weight decay where it belongs."""

from __future__ import annotations

from typing import Any

from packtrain.core.errors import ConfigError
from packtrain.modeling.model_parts import PARTS, model_parts, part_of_weight


def parameter_groups(
    model: Any,
    *,
    learning_rate: float,
    vit_lr: float | None = None,
    aligner_lr: float | None = None,
    weight_decay: float = 0.0,
) -> list[dict[str, Any]]:
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
        f"training.{setting}", got=f"{rate}, and {why}", expected="a learning rate of a trainable part", fix=fix
    )
