"""Configs of published sizes."""

from __future__ import annotations

from packtrain.families.known_shapes import decoder

PUBLISHED = {
    "llama": {
        "llama-1b": {
            "model_type": "llama",
            "tie_word_embeddings": True,
            **decoder(2048, 8192, 16, 32, 8, 64, 128_256),
        },
        "small-text": {"model_type": "llama", "tie_word_embeddings": True, **decoder(96, 256, 3, 6, 2, 16, 768)},
    },
    "qwen3": {"qwen3-8b": {"model_type": "qwen3", **decoder(4096, 12_288, 36, 32, 8, 128, 151_936)}},
}
