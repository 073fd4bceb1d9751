"""The shape of a model that people really train, without weights, so that the demo's report has real proportions."""

from __future__ import annotations

import json
from pathlib import Path

from packtrain.core.artifacts import atomic_path

# The published sizes of a Qwen2.5-VL with three billion parameters.
SHAPE: dict[str, object] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}


def write_shape(folder: Path) -> Path:
    """A model folder with nothing but the config: enough to plan for."""
    with atomic_path(folder / "config.json") as path:
        path.write_text(json.dumps(SHAPE, indent=2) + "\n", encoding="utf-8")
    return folder
