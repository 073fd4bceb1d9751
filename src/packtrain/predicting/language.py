"""Reading a config as one kind of decoder into a LanguageShape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.families.shape import BiasRule, Decoder, LanguageParts, LanguageShape, Values


def read_language(kind: Decoder, config: Mapping[str, Any], where: str) -> tuple[LanguageShape, LanguageParts]:
    """The decoder that a config describes, read as one of a kind; `where` names the config in errors."""
    values = Values(config, kind.defaults, where)
    hidden, heads, layers = (values.size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = values.get("head_dim") if kind.own_head_dim else None
    window, window_layers = _windows(kind, values, layers)
    dense = _dense_layers(values, layers) if kind.experts else 0
    intermediate = values.size("intermediate_size")
    shape = LanguageShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if values.get("num_key_value_heads") is None else values.size("num_key_value_heads"),
        head_dim=hidden // heads if head_dim is None else values.size("head_dim"),
        intermediate=values.size("moe_intermediate_size", "intermediate_size") if kind.experts else intermediate,
        vocabulary=values.size("vocab_size"),
        tied=values.flag("tie_word_embeddings"),
        context_length=values.size("max_position_embeddings"),
        window=window,
        window_layers=window_layers,
        experts=values.size("num_experts", "num_local_experts") if kind.experts else 1,
        experts_used=values.size("num_experts_per_tok") if kind.experts else 1,
    )

    def has(rule: BiasRule, key: str) -> bool:
        return rule == "always" or (rule == "config" and values.flag(key))

    parts = LanguageParts(
        query_bias=has(kind.query_bias, "attention_bias"),
        output_bias=has(kind.output_bias, "attention_bias"),
        mlp_bias=has(kind.mlp_bias, "mlp_bias"),
        head_norms=kind.head_norms,
        norms=kind.norms,
        dense_layers=dense,
        dense_intermediate=intermediate,
    )
    return shape, parts


def _dense_layers(values: Values, layers: int) -> int:
    """Layers of a mixture that have no experts."""
    plain = set(values.get("mlp_only_layers") or ())
    step = values.get("decoder_sparse_step") or 1
    return sum(index in plain or (index + 1) % step > 0 for index in range(layers))


def _windows(kind: Decoder, values: Values, layers: int) -> tuple[int | None, int]:
    """The sliding window and how many layers have it."""
    window = values.get("sliding_window")
    switch = values.get("use_sliding_window")
    if window is None or kind.windows == "never" or switch is False:
        return None, 0
    named = values.get("layer_types")
    if kind.windows == "always":
        count = layers
    elif isinstance(named, list | tuple):
        count = sum(name == "sliding_attention" for name in named)
    elif kind.windows == "period":
        period = values.get("sliding_window_pattern") or kind.window_period
        count = sum((index + 1) % period > 0 for index in range(layers))
    elif kind.windows == "no_rope":
        interval = values.size("no_rope_layer_interval")
        rope = values.get("no_rope_layers") or [(index + 1) % interval for index in range(layers)]
        count = sum(not turned for turned in rope[:layers])
    else:
        count = max(0, layers - (values.get("max_window_layers") or 0))
    return (values.size("sliding_window"), count) if count else (None, 0)
