"""What a model needs before it is trained on packs, in one call."""

from __future__ import annotations

from typing import Any

import torch

from packtrain.core.errors import ConfigError
from packtrain.families.contracts import contract_for
from packtrain.modeling.attention import set_attention
from packtrain.modeling.load import keep_four_bits
from packtrain.modeling.vision import add_empty_media_hook


def prepare_model(
    model: Any,
    *,
    attn_implementation: str = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> str:
    """Make a model ready for packs, and return the attention that really runs.

    Its attention keeps samples apart, and its vision encoder takes part in packs without images, so that ranks agree.
    Models on which packing is known to be wrong are refused with the reason. `device` and `dtype` say where it will be
    trained, if not where its weights are now.
    """
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise ConfigError(
            "adapter",
            got=f"{type(adapter).__name__}: it prepends learned tokens to a row and drops its positions",
            expected="an adapter that does not change the model's inputs",
            fix="use LoRA, or another adapter of the model's weights",
        )
    keep_four_bits(model)
    contract = contract_for(model.config.to_dict())
    used = set_attention(model, attn_implementation, contract, device=device, dtype=dtype)
    add_empty_media_hook(model, contract)
    return used
