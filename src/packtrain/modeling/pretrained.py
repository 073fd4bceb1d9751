"""Transformers' `from_pretrained` without its leniency: a weight that a folder lacks would be drawn at random."""

from __future__ import annotations

from typing import Any

from safetensors import SafetensorError

from packtrain.core.errors import in_one_line

ADAPTER_CONFIG = "adapter_config.json"  # of peft: its folder has adapters


class WeightsError(Exception):
    """What is wrong with saved weights, in one line."""


def from_pretrained(loader: Any, source: str, *, unused: bool, **options: Any) -> Any:
    """A model with all of its weights as they were saved. `unused`: weights that it has no place for may lie beside."""
    try:
        model, found = loader.from_pretrained(
            source, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise WeightsError(in_one_line(error)) from error
    wrong = {kind: names for kind, names in found.items() if names and not (unused and kind == "unexpected_keys")}
    if wrong:
        raise WeightsError("; ".join(in_words(kind, sorted(map(str, names))) for kind, names in wrong.items()))
    return model


def in_words(kind: str, names: list[str]) -> str:
    """What is wrong with weights of these names; the first ones stand for all."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{kind.replace('_', ' ')}: {', '.join(names[:3])}{more}"
