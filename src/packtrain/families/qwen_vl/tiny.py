"""The tiny Qwen-VLs: ChatML, placeholders between vision_start and vision_end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.families.tiny.parts import (
    CLIP_PIXELS,
    HALF_PIXELS,
    QWEN_TOKENS,
    THINK,
    WEIGHTS,
    WIDTH,
    TinySpec,
    text_config,
    token_ids,
)
from packtrain.families.tiny.templates import CHATML, TemplateSpec

_TOKENS = {
    **QWEN_TOKENS,
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_IMAGE_PAD = "<|vision_start|><|image_pad|><|vision_end|>"
_VIDEO_PAD = "<|vision_start|><|video_pad|><|vision_end|>"
_HELPFUL = "You are a helpful assistant."
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_PATCH = {"temporal_patch_size": 2, "merge_size": 2, "do_resize": True, "do_convert_rgb": True, "resample": 3}
_ENCODER = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2, **WEIGHTS}


def _qwen_vl(
    model_type: str, *, system: str, rope: Mapping[str, Any], encoder: Mapping[str, Any], processor: Mapping[str, Any]
) -> TinySpec:
    return TinySpec(
        tokens=_TOKENS,
        special=("<|im_start|>",),
        added=THINK if model_type == "qwen3_vl" else (),
        template=TemplateSpec(dialect=CHATML, image=_IMAGE_PAD, video=_VIDEO_PAD, system=system),
        config={
            "model_type": model_type,
            **token_ids(_TOKENS, "image", "video", "vision_start", "vision_end"),
            "tie_word_embeddings": False,
            "text_config": text_config(f"{model_type}_text", _TOKENS, rope_parameters=rope),
            "vision_config": {"model_type": f"{model_type}_vision", **_ENCODER, **encoder},
        },
        processor=processor,
    )


def _qwen_processor(
    name: str, *, patch: int, pixels: Mapping[str, Any], image_size: Mapping[str, int], video: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "processor_class": name,
        "image_processor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": patch,
            "size": image_size,
            **_PATCH,
            **pixels,
        },
        "video_processor": {"patch_size": patch, **_PATCH, **pixels, **video},
    }


_QWEN2_VIDEO = {
    "video_processor_type": "Qwen2VLVideoProcessor",
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
    "min_frames": 4,
    "max_frames": 768,
}
_QWEN3_VIDEO = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 24576 * 32 * 32},
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
    "do_sample_frames": True,
}
_QWEN2_PIXELS = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16384 * 28 * 28}
_QWEN3_PIXELS = {"shortest_edge": 64 * 32 * 32, "longest_edge": 16384 * 32 * 32}
_QWEN2_5_ENCODER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": WIDTH,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}
_QWEN3_ENCODER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": WIDTH,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [0, 1],
}
QWEN2_VL = _qwen_vl(
    "qwen2_vl",
    system=_HELPFUL,
    rope=_MROPE,
    encoder={"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "mlp_ratio": 2, "patch_size": 14},
    processor=_qwen_processor(
        "Qwen2VLProcessor", patch=14, pixels=CLIP_PIXELS, image_size=_QWEN2_PIXELS, video=_QWEN2_VIDEO
    ),
)
QWEN2_5_VL = _qwen_vl(
    "qwen2_5_vl",
    system=_HELPFUL,
    rope=_MROPE,
    encoder=_QWEN2_5_ENCODER,
    processor=_qwen_processor(
        "Qwen2_5_VLProcessor", patch=14, pixels=CLIP_PIXELS, image_size=_QWEN2_PIXELS, video=_QWEN2_VIDEO
    ),
)
QWEN3_VL = _qwen_vl(
    "qwen3_vl",
    system="",
    rope={**_MROPE, "mrope_interleaved": True},
    encoder=_QWEN3_ENCODER,
    processor=_qwen_processor(
        "Qwen3VLProcessor", patch=16, pixels=HALF_PIXELS, image_size=_QWEN3_PIXELS, video=_QWEN3_VIDEO
    ),
)
