"""Sizes of published models, for random models of a real shape: what calibration runs where no files are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.core.errors import ConfigError, nearest

_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _decoder(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, words: int) -> Any:
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


def _tokens(words: int, names: tuple[str, ...] = _IDS) -> dict[str, int]:
    """Special tokens at the end of the vocabulary."""
    return {name: words - 1 - at for at, name in enumerate(names)}


def _qwen3_vl(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    part = text["head_dim"] // 6
    section = [text["head_dim"] // 2 - 2 * part, part, part]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": section}
    encoder = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        **_tokens(text["vocab_size"]),
        "text_config": {"model_type": "qwen3_vl_text", **text, "rope_parameters": rope},
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            **encoder,
            "out_hidden_size": text["hidden_size"],
            **vision,
        },
    }


def _qwen2_5_vl(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    part = 3 * text["head_dim"] // 16
    section = [text["head_dim"] // 2 - 2 * part, part, part]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    encoder = {
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "window_size": 112,
    }
    decoder = {name: value for name, value in text.items() if name != "head_dim"}
    return {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": True,
        **_tokens(text["vocab_size"]),
        "text_config": {"model_type": "qwen2_5_vl_text", **decoder, "rope_parameters": rope},
        "vision_config": {
            "model_type": "qwen2_5_vl",
            **encoder,
            "out_hidden_size": text["hidden_size"],
            **vision,
        },
    }


def _smolvlm(text: Mapping[str, Any], vision: Mapping[str, Any], scale: int) -> dict[str, Any]:
    return {
        "model_type": "smolvlm",
        "scale_factor": scale,
        **_tokens(text["vocab_size"], ("image_token_id",)),
        "text_config": {"model_type": "llama", **text},
        "vision_config": {"model_type": "smolvlm_vision", **vision},
    }


KNOWN_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen3-vl-2b": _qwen3_vl(
        _decoder(2048, 6144, 28, 16, 8, 128, 151_936),
        {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    ),
    "qwen2.5-vl-3b": _qwen2_5_vl(
        _decoder(2048, 11_008, 36, 16, 2, 128, 151_936),
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
    "smolvlm-2.2b": _smolvlm(
        _decoder(2048, 8192, 24, 32, 32, 64, 49_280),
        {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
        scale=3,
    ),
    "llama-1b": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        **_decoder(2048, 8192, 16, 32, 8, 64, 128_256),
    },
    "qwen3-8b": {"model_type": "qwen3", **_decoder(4096, 12_288, 36, 32, 8, 128, 151_936)},
    # Small enough for any machine; heads of 16, as no published model has them.
    "small": _qwen3_vl(
        _decoder(64, 160, 2, 4, 2, 16, 512),
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    ),
    "small-wide": _qwen2_5_vl(
        _decoder(128, 256, 3, 8, 2, 16, 1024),
        {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "fullatt_block_indexes": [1]},
    ),
    "small-text": {"model_type": "llama", "tie_word_embeddings": True, **_decoder(96, 256, 3, 6, 2, 16, 768)},
}


def known_config(name: str) -> Mapping[str, Any]:
    """The config of a known shape."""
    if name not in KNOWN_SHAPES:
        fix = nearest(name, KNOWN_SHAPES) or "or name a model folder"
        raise ConfigError("model shape", got=name, expected=", ".join(KNOWN_SHAPES), fix=fix)
    return KNOWN_SHAPES[name]
