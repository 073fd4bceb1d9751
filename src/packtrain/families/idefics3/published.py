"""Configs of published sizes."""

from __future__ import annotations

from packtrain.families.known_shapes import decoder, last_tokens

_WORDS = 49_280

SMOLVLM = {
    "smolvlm-2.2b": {
        "model_type": "smolvlm",
        "scale_factor": 3,
        **last_tokens(_WORDS, "image_token_id"),
        "text_config": {"model_type": "llama", **decoder(2048, 8192, 24, 32, 32, 64, _WORDS)},
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
    }
}
