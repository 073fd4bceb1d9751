"""Sizes of published models, for random models of a real shape: what calibration runs where no files are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.core.errors import ConfigError, nearest
from packtrain.families.registry import all_families


def decoder(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, words: int
) -> dict[str, Any]:
    """A decoder of these sizes."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": words,
        "max_position_embeddings": 131_072,
        # Of models with other words; kept inside the vocabulary, whatever its size.
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def last_tokens(words: int, *names: str) -> dict[str, int]:
    """Special tokens at the end of the vocabulary."""
    return {name: words - 1 - at for at, name in enumerate(names)}


def known_shapes() -> dict[str, Mapping[str, Any]]:
    """The configs that families have of published sizes, by name."""
    return {name: config for family in all_families().values() for name, config in family.published.items()}


def known_config(name: str) -> Mapping[str, Any]:
    """The config of a known shape."""
    known = known_shapes()
    if name not in known:
        fix = nearest(name, known) or "or name a model folder"
        raise ConfigError("model shape", got=name, expected=", ".join(known), fix=fix)
    return known[name]
