"""Decoders: the known ones as data, and reading a config as one of them into a LanguageShape.

A key that a config lacks takes the default of the class that transformers would build; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from packtrain.predicting.parameters import LanguageParts
from packtrain.predicting.sizes import Values
from packtrain.predicting.values import LanguageShape

# How a decoder says which layers attend within a sliding window only.
#   never      it has none
#   always     every layer, where a window is set (and use_sliding_window, where there is such a key, is on)
#   optional   layers from max_window_layers on, where use_sliding_window is on
#   no_rope    layers without rotary positions, where use_sliding_window is on
#   period     all but every n-th layer
WindowRule = Literal["never", "always", "optional", "no_rope", "period"]
BiasRule = Literal["never", "always", "config"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextKind:
    """What one decoder class has beside matrix sizes."""

    defaults: Mapping[str, Any]
    query_bias: BiasRule = "config"  # of query, key and value projections
    output_bias: BiasRule = "config"
    mlp_bias: BiasRule = "never"
    head_norms: bool = False  # a norm over each head's queries and keys
    norms: int = 2  # of a layer
    own_head_dim: bool = True  # head_dim is read; else it is always hidden / heads
    windows: WindowRule = "never"
    window_period: int = 0
    experts: bool = False


def _sizes(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    vocabulary: int,
    context: int,
    **more: Any,
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "sliding_window": None,
        **more,
    }


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN_VL_TEXT = TextKind(
    defaults=_sizes(8192, 29568, 80, 64, 8, 152064, 32768, **_QWEN_WINDOW, max_window_layers=80),
    query_bias="always",
    output_bias="never",
    own_head_dim=False,
    windows="optional",
)
_MISTRAL_SIZES = (4096, 14336, 32, 32, 8, 32000, 131072)
TEXT_KINDS: Mapping[str, TextKind] = {
    "llama": TextKind(defaults=_sizes(4096, 11008, 32, 32, None, 32000, 2048), mlp_bias="config"),
    "mistral": TextKind(
        defaults=_sizes(*_MISTRAL_SIZES, sliding_window=4096),
        query_bias="never",
        output_bias="never",
        windows="always",
    ),
    "mixtral": TextKind(
        defaults=_sizes(*_MISTRAL_SIZES, num_local_experts=8, num_experts_per_tok=2),
        query_bias="never",
        output_bias="never",
        windows="always",
        experts=True,
    ),
    "smollm3": TextKind(
        defaults=_sizes(
            2048,
            11008,
            36,
            16,
            4,
            128256,
            32768,
            tie_word_embeddings=True,
            use_sliding_window=False,
            no_rope_layer_interval=4,
        ),
        mlp_bias="config",
        windows="no_rope",
    ),
    "qwen2": TextKind(
        defaults=_sizes(4096, 22016, 32, 32, 32, 151936, 32768, **_QWEN_WINDOW, max_window_layers=28),
        query_bias="always",
        output_bias="never",
        windows="optional",
    ),
    "qwen3": TextKind(
        defaults=_sizes(4096, 22016, 32, 32, 32, 151936, 32768, **_QWEN_WINDOW, max_window_layers=28, head_dim=128),
        head_norms=True,
        windows="optional",
    ),
    "qwen3_moe": TextKind(
        defaults=_sizes(
            2048,
            6144,
            24,
            32,
            4,
            151936,
            32768,
            **_QWEN_WINDOW,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            decoder_sparse_step=1,
        ),
        head_norms=True,
        windows="always",
        experts=True,
    ),
    "qwen2_vl_text": _QWEN_VL_TEXT,
    "qwen2_5_vl_text": _QWEN_VL_TEXT,
    "qwen3_vl_text": TextKind(defaults=_sizes(4096, 22016, 32, 32, 32, 151936, 128000, head_dim=128), head_norms=True),
    "qwen3_vl_moe_text": TextKind(
        defaults=_sizes(
            2048,
            5632,
            24,
            16,
            16,
            151936,
            128000,
            moe_intermediate_size=1408,
            num_experts=60,
            num_experts_per_tok=4,
            decoder_sparse_step=1,
        ),
        head_norms=True,
        experts=True,
    ),
    "gemma": TextKind(defaults=_sizes(3072, 24576, 28, 16, 16, 256000, 8192, head_dim=256, tie_word_embeddings=True)),
    "gemma2": TextKind(
        defaults=_sizes(
            2304, 9216, 26, 8, 4, 256000, 8192, head_dim=256, tie_word_embeddings=True, sliding_window=4096
        ),
        norms=4,
        windows="period",
        window_period=2,
    ),
    "gemma3_text": TextKind(
        defaults=_sizes(
            2304, 9216, 26, 8, 4, 262208, 131072, head_dim=256, tie_word_embeddings=True, sliding_window=4096
        ),
        head_norms=True,
        norms=4,
        windows="period",
        window_period=6,
    ),
}
# For a decoder that is not known: a Llama. What a config must then say itself has no default.
GENERIC_TEXT = TextKind(
    defaults={
        "num_key_value_heads": None,
        "max_position_embeddings": 8192,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "sliding_window": None,
    },
    mlp_bias="config",
)


def read_language(kind: TextKind, config: Mapping[str, Any], where: str) -> tuple[LanguageShape, LanguageParts]:
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


def _windows(kind: TextKind, values: Values, layers: int) -> tuple[int | None, int]:
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
