"""Configs of published sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.families.known_shapes import decoder, last_tokens

_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _qwen3_vl(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    part = text["head_dim"] // 6
    section = [text["head_dim"] // 2 - 2 * part, part, part]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_interleaved": True, "mrope_section": section}
    encoder = {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3}
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        **last_tokens(text["vocab_size"], *_IDS),
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
        **last_tokens(text["vocab_size"], *_IDS),
        "text_config": {"model_type": "qwen2_5_vl_text", **decoder, "rope_parameters": rope},
        "vision_config": {
            "model_type": "qwen2_5_vl",
            **encoder,
            "out_hidden_size": text["hidden_size"],
            **vision,
        },
    }


# `small` and `small-wide` are small enough for any machine; heads of 16, as no published model has them.
QWEN3_VL = {
    "qwen3-vl-2b": _qwen3_vl(
        decoder(2048, 6144, 28, 16, 8, 128, 151_936),
        {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    ),
    "small": _qwen3_vl(
        decoder(64, 160, 2, 4, 2, 16, 512),
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    ),
}
QWEN2_5_VL = {
    "qwen2.5-vl-3b": _qwen2_5_vl(
        decoder(2048, 11_008, 36, 16, 2, 128, 151_936),
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
    "small-wide": _qwen2_5_vl(
        decoder(128, 256, 3, 8, 2, 16, 1024),
        {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "fullatt_block_indexes": [1]},
    ),
}
