"""Rotary embeddings that remember the longest row: made to forget it, so that a row never depends on earlier ones."""

from __future__ import annotations

from typing import Any

from torch import nn

_ORIGINAL = "original_inv_freq"


def forget_lengths(model: nn.Module) -> None:
    """Let `dynamic` frequencies follow the row at hand alone, as in a model that has just been loaded.

    Transformers keeps those of the longest row so far, until one is shorter than the original length.
    """
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        named = kinds.values() if isinstance(kinds, dict) else [kinds]  # one for each type of layer
        if any("dynamic" in str(kind) for kind in named) and not hasattr(module, "_packtrain_forgets"):
            module._packtrain_forgets = module.register_forward_pre_hook(_forget)  # type: ignore[assignment]


def _forget(module: nn.Module, args: Any) -> None:
    """Back to the state in which the module was made."""
    known: Any = dict(module.named_buffers(recurse=False))
    for name in (name for name in known if name.endswith(_ORIGINAL)):
        prefix = name.removesuffix(_ORIGINAL)
        setattr(module, f"{prefix}inv_freq", known[name])
        setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
