"""Published models as their config.json has them, and the number of parameters that their files hold."""

from __future__ import annotations

from typing import Any


def _qwen_text(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


_WINDOWS = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
_SO400M = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
_CLIP_L = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}


def _qwen2_5_vision(out: int) -> dict[str, Any]:
    return {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": out,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    }


QWEN3_VL_2B: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {"model_type": "qwen3_vl_text", "head_dim": 128, **_qwen_text(2048, 6144, 28, 16, 8, 151936)},
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen2-VL-2B": {  # the decoder's keys at the top, as the first releases had them
        "model_type": "qwen2_vl",
        **_qwen_text(1536, 8960, 28, 12, 2, 151936),
        **_WINDOWS,
        "tie_word_embeddings": True,
        "vision_config": {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "hidden_size": 1536},
    },
    "Qwen2.5-VL-3B": {
        "model_type": "qwen2_5_vl",
        **_qwen_text(2048, 11008, 36, 16, 2, 151936),
        **_WINDOWS,
        "tie_word_embeddings": True,
        "vision_config": _qwen2_5_vision(2048),
    },
    "Qwen2.5-VL-7B": {
        "model_type": "qwen2_5_vl",
        **_qwen_text(3584, 18944, 28, 28, 4, 152064),
        **_WINDOWS,
        "tie_word_embeddings": False,
        "vision_config": _qwen2_5_vision(3584),
    },
    "Qwen3-VL-2B": QWEN3_VL_2B,
    "SmolVLM-256M": {
        "model_type": "idefics3",
        "scale_factor": 4,
        "text_config": {"model_type": "llama", **_qwen_text(576, 1536, 30, 9, 3, 49280)},
        "vision_config": {
            "model_type": "idefics3_vision",
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        },
    },
    "SmolVLM-2.2B": {
        "model_type": "smolvlm",
        "scale_factor": 3,
        "text_config": {"model_type": "llama", "head_dim": 64, **_qwen_text(2048, 8192, 24, 32, 32, 49280)},
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "image_size": 384,
            "patch_size": 14,
        },
    },
    "LLaVA-1.5-7B": {  # its text_config says only what is not Llama's default
        "model_type": "llava",
        "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "vocab_size": 32064},
        "vision_config": _CLIP_L,
    },
    "LLaVA-1.6-Mistral-7B": {
        "model_type": "llava_next",
        "text_config": {"model_type": "mistral", "vocab_size": 32064, "sliding_window": None},
        "vision_config": _CLIP_L,
    },
    "LLaVA-OneVision-0.5B": {
        "model_type": "llava_onevision",
        "text_config": {"model_type": "qwen2", "tie_word_embeddings": True, **_qwen_text(896, 4864, 24, 14, 2, 152000)},
        "vision_config": {**_SO400M, "num_hidden_layers": 26, "image_size": 384},
    },
    "InternVL3-1B": {
        "model_type": "internvl",
        "tie_word_embeddings": False,
        "text_config": {"model_type": "qwen2", **_qwen_text(896, 4864, 24, 14, 2, 151674)},
        "vision_config": {"model_type": "internvl_vision", "attention_bias": True, "image_size": [448, 448]},
    },
    "Gemma-3-4B": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        "vision_config": {**_SO400M, "image_size": 896},
    },
    "PaliGemma-3B": {
        "model_type": "paligemma",
        "projection_dim": 2048,
        "text_config": {"model_type": "gemma", **_qwen_text(2048, 16384, 18, 8, 1, 257216)},
        "vision_config": {**_SO400M, "image_size": 224},
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "head_dim": 64,
        **_qwen_text(2048, 8192, 16, 32, 8, 128256),
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        **_qwen_text(896, 4864, 24, 14, 2, 151936),
    },
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        "head_dim": 128,
        **_qwen_text(1024, 3072, 28, 16, 8, 151936),
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        **_qwen_text(2048, 6144, 48, 32, 4, 151936),
    },
    "SmolLM3-3B": {"model_type": "smollm3", **_qwen_text(2048, 11008, 36, 16, 4, 128256)},
    "Mistral-7B-v0.3": {"model_type": "mistral", "vocab_size": 32768, "sliding_window": None},
    "Mixtral-8x7B": {"model_type": "mixtral"},
    "Gemma-3-1B": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "sliding_window": 512,
    },
}
TOTALS: dict[str, int] = {
    "Qwen2-VL-2B": 2_208_985_600,
    "Qwen2.5-VL-3B": 3_754_622_976,
    "Qwen2.5-VL-7B": 8_292_166_656,
    "Qwen3-VL-2B": 2_127_532_032,
    "SmolVLM-256M": 256_484_928,
    "LLaVA-1.5-7B": 7_063_427_072,
    "LLaVA-1.6-Mistral-7B": 7_566_747_648,
    "Gemma-3-4B": 4_300_079_472,
    "PaliGemma-3B": 2_923_466_480,
    "Llama-3.2-1B": 1_235_814_400,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-30B-A3B": 30_532_122_624,
    "SmolLM3-3B": 3_075_098_624,
    "Mistral-7B-v0.3": 7_248_023_552,
    "Mixtral-8x7B": 46_702_792_704,
    "Gemma-3-1B": 999_885_952,
}
