"""Weights in 4 bits keep the numbers they were given, in whatever mode a model runs."""

from __future__ import annotations

from functools import partial
from typing import Any

from packtrain.core.errors import ConfigError
from packtrain.modeling.patches import is_on, put

_ALLOWED = "support_avx512bf16_for_cpu"  # of bitsandbytes' layers
_CONVERTED = "packing_format_for_cpu"  # of what describes their weights


def keep_four_bits(model: Any) -> None:
    """Stop bitsandbytes from storing weights in another form when a model is run in evaluation mode on a CPU.

    It does so on CPUs with avx512_bf16. That form is for inference alone: it rounds to bf16, and backward passes read
    it as if it were the usual one.
    """
    for name, module in model.named_modules():
        if not hasattr(module, _ALLOWED):
            continue
        if getattr(getattr(module.weight, "quant_state", None), _CONVERTED, False):
            raise ConfigError(
                f"4-bit weights of {name}",
                got="weights that bitsandbytes has rounded for inference on this CPU",
                expected="unchanged 4-bit weights",
                fix="load the model again, and call prepare_model before running it",
            )
        if not is_on(module, "four_bits"):
            put(module, "four_bits", partial(setattr, module, _ALLOWED, getattr(module, _ALLOWED)))
        setattr(module, _ALLOWED, False)
