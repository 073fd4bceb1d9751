"""The models of the training benchmark: random weights in the shape of Qwen3-VL-2B, and a tiny one for CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from packtrain.core.errors import ConfigError, nearest
from packtrain.estimates.shapes import shape_from_config
from packtrain.estimates.values import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchModel:
    """One model by its config, and how long packs of it are."""

    name: str
    config: Mapping[str, Any]
    longest: int  # samples that are longer are left out, so that every row trains on the same ones
    capacities: tuple[int, ...]
    sort_limit: int  # tokens of a padded batch that fit without checkpointing

    @property
    def shape(self) -> ModelShape:
        return shape_from_config(self.config)

    def build(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The model with random weights, made where it is used."""
        from transformers import AutoConfig, AutoModelForImageTextToText

        values = {name: value for name, value in self.config.items() if name != "model_type"}
        config = AutoConfig.for_model(self.config["model_type"], **values)
        torch.manual_seed(0)
        with device:
            model = AutoModelForImageTextToText.from_config(config, dtype=dtype)
        return model.to(device).train()


def _config(text: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 5_000_000.0, "mrope_interleaved": True}
    section = [text["head_dim"] // 2 - 2 * (text["head_dim"] // 6), *(2 * [text["head_dim"] // 6])]
    return {
        "model_type": "qwen3_vl",
        "tie_word_embeddings": True,
        "image_token_id": text["vocab_size"] - 1,
        "video_token_id": text["vocab_size"] - 2,
        "vision_start_token_id": text["vocab_size"] - 3,
        "vision_end_token_id": text["vocab_size"] - 4,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "max_position_embeddings": 262_144,
            "rope_parameters": {**rope, "mrope_section": section},
            **text,
        },
        "vision_config": {
            "model_type": "qwen3_vl_vision",
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "out_hidden_size": text["hidden_size"],
            **vision,
        },
    }


_QWEN3_VL_2B = BenchModel(
    name="qwen3-vl-2b",
    config=_config(
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151_936,
        },
        {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [5, 11, 17],
        },
    ),
    longest=8_192,
    capacities=(8_192, 16_384, 20_000),
    sort_limit=16_384,
)
TINY = "tiny"
_TINY = BenchModel(
    name=TINY,
    config=_config(
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 512,
        },
        {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
        },
    ),
    longest=256,
    capacities=(384, 512),
    sort_limit=1_024,
)
MODELS: Mapping[str, BenchModel] = {model.name: model for model in (_QWEN3_VL_2B, _TINY)}


def bench_model(name: str) -> BenchModel:
    """The model of that name."""
    if name not in MODELS:
        raise ConfigError("--model", got=name, expected=", ".join(MODELS), fix=nearest(name, MODELS))
    return MODELS[name]
