"""Qwen's vision models: sizes and parameters, published sizes, and tiny models.

Encoders have mergers inside, decoders are their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from packtrain.families.shape import (
    ENCODER_WHERE,
    Composition,
    Config,
    Decoder,
    EncoderParts,
    Projector,
    Values,
    VisionEncoder,
    VisionShape,
    VisionTraits,
    decoder,
    decoder_sizes,
    last_tokens,
    ones,
)
from packtrain.families.text.model import QWEN_WINDOW
from packtrain.families.tiny import (
    CHATML,
    CLIP_PIXELS,
    HALF_PIXELS,
    QWEN_TOKENS,
    THINK,
    WEIGHTS,
    WIDTH,
    TemplateSpec,
    TinySpec,
    text_config,
    token_ids,
)

_QWEN = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_heads": 16}
_QWEN2_VL = {**_QWEN, "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "mlp_ratio": 4, "patch_size": 14}
_QWEN2_5_VL = {
    **_QWEN,
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "out_hidden_size": 3584,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": (7, 15, 23, 31),
}
_QWEN3_VL = {
    **_QWEN,
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 3584,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}


def _qwen_shape(values: Values, *, hidden: int, intermediate: int, gated: bool, full: int, window: int) -> VisionShape:
    elements = values.size("in_channels") * values.size("temporal_patch_size") * prod(values.sides("patch_size"))
    return VisionShape(
        hidden=hidden,
        layers=values.size("depth"),
        heads=values.size("num_heads", "num_attention_heads"),
        intermediate=intermediate,
        gated=gated,
        patch_elements=elements,
        full_attention_layers=full,
        window_patches=window,
        patches_per_token=values.size("spatial_merge_size") ** 2,
    )


def _mergers(shape: VisionShape, outputs: int, *, count: int, others: int) -> Projector:
    """Each merger joins a square of patches by two matrices."""
    joined = shape.hidden * shape.patches_per_token
    return Projector(matrices=((joined, joined, True), (joined, outputs, True)) * count, others=others)


def _qwen2_vl(config: Config) -> VisionEncoder:
    values = Values(config, _QWEN2_VL, ENCODER_WHERE)
    hidden = values.size("embed_dim")
    ratio = values.size("mlp_ratio")
    full = values.size("depth")
    shape = _qwen_shape(values, hidden=hidden, intermediate=hidden * ratio, gated=False, full=full, window=0)
    projector = _mergers(shape, values.size("hidden_size"), count=1, others=2 * hidden)
    return VisionEncoder(shape=shape, parts=EncoderParts(patch_bias=False, positions=0), grid=0, projector=projector)


def _qwen2_5_vl(config: Config) -> VisionEncoder:
    values = Values(config, _QWEN2_5_VL, ENCODER_WHERE)
    hidden = values.size("hidden_size")
    shape = _qwen_shape(
        values,
        hidden=hidden,
        intermediate=values.size("intermediate_size"),
        gated=True,
        full=sum(0 <= index < values.size("depth") for index in set(values.get("fullatt_block_indexes") or ())),
        window=prod(values.size("window_size") // side for side in values.sides("patch_size")),
    )
    parts = EncoderParts(patch_bias=False, positions=0, norm_size=1)
    projector = _mergers(shape, values.size("out_hidden_size"), count=1, others=hidden)
    return VisionEncoder(shape=shape, parts=parts, grid=0, projector=projector)


def _qwen3_vl(config: Config) -> VisionEncoder:
    values = Values(config, _QWEN3_VL, ENCODER_WHERE)
    hidden = values.size("hidden_size")
    deepstack = len(values.get("deepstack_visual_indexes") or ())
    shape = _qwen_shape(
        values,
        hidden=hidden,
        intermediate=values.size("intermediate_size"),
        gated=False,
        full=values.size("depth"),
        window=0,
    )
    # The last merger norms patches, those of deepstack norm squares of them.
    norms = 2 * hidden * (1 + deepstack * shape.patches_per_token)
    projector = _mergers(shape, values.size("out_hidden_size"), count=1 + deepstack, others=norms)
    parts = EncoderParts(patch_bias=True, positions=values.size("num_position_embeddings"))
    return VisionEncoder(shape=shape, parts=parts, grid=0, projector=projector)


def _merger(config: Config, encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    assert encoder.projector is not None, "Qwen's encoders come with their mergers"
    return encoder.projector, encoder.shape.patches_per_token


QWEN2_VL = Composition(
    text="qwen2_vl_text",
    encoder="qwen2_vl_vision",
    encoders={"qwen2_vl_vision": _qwen2_vl},
    flat_text=True,
    tied_by_text=True,
    fixed=True,
    projector=_merger,
    traits=VisionTraits(fused=True, sigmoid=True, kernels=(24, 39), image_by_image=True, asks_sizes=True),
)
QWEN2_5_VL = replace(
    QWEN2_VL,
    text="qwen2_5_vl_text",
    encoder="qwen2_5_vl_vision",
    encoders={"qwen2_5_vl_vision": _qwen2_5_vl},
    traits=VisionTraits(fused=True, rms_norms=True, kernels=(40, 75), image_by_image=True, asks_sizes=True),
)
QWEN3_VL = Composition(
    text="qwen3_vl_text",
    encoder="qwen3_vl_vision",
    encoders={"qwen3_vl_vision": _qwen3_vl},
    fixed=True,
    projector=_merger,
    traits=VisionTraits(fused=True, kernels=(24, 39), image_by_image=True, asks_sizes=True),
)
QWEN3_VL_MOE = replace(QWEN3_VL, text="qwen3_vl_moe_text")

QWEN2_TEXT = Decoder(
    defaults=decoder_sizes(8192, 29568, 80, 64, 8, 152064, 32768, **QWEN_WINDOW, max_window_layers=80),
    query_bias="always",
    output_bias="never",
    own_head_dim=False,
    windows="optional",
)
QWEN3_TEXT = Decoder(defaults=decoder_sizes(4096, 22016, 32, 32, 32, 151936, 128000, head_dim=128), head_norms=True)
QWEN3_MOE_TEXT = Decoder(
    defaults=decoder_sizes(
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
)


def small_image(config: Any) -> dict[str, np.ndarray]:
    """One block of patches that merge into one token."""
    vision = config.vision_config
    side = vision.spatial_merge_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {"pixel_values": ones(side * side, width), "image_grid_thw": np.array([[1, side, side]])}


_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _qwen3_config(text: Config, vision: Config) -> Config:
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


def _qwen2_5_config(text: Config, vision: Config) -> Config:
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
PUBLISHED_QWEN3_VL = {
    "qwen3-vl-2b": _qwen3_config(
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
    "small": _qwen3_config(
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
PUBLISHED_QWEN2_5_VL = {
    "qwen2.5-vl-3b": _qwen2_5_config(
        decoder(2048, 11_008, 36, 16, 2, 128, 151_936),
        {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ),
    "small-wide": _qwen2_5_config(
        decoder(128, 256, 3, 8, 2, 16, 1024),
        {"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "fullatt_block_indexes": [1]},
    ),
}

_TINY_TOKENS = {
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
_TINY_ENCODER = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_heads": 2, **WEIGHTS}


def _qwen_vl(model_type: str, *, system: str, rope: Config, encoder: Config, processor: Config) -> TinySpec:
    return TinySpec(
        tokens=_TINY_TOKENS,
        special=("<|im_start|>",),
        added=THINK if model_type == "qwen3_vl" else (),
        template=TemplateSpec(dialect=CHATML, image=_IMAGE_PAD, video=_VIDEO_PAD, system=system),
        config={
            "model_type": model_type,
            **token_ids(_TINY_TOKENS, "image", "video", "vision_start", "vision_end"),
            "tie_word_embeddings": False,
            "text_config": text_config(f"{model_type}_text", _TINY_TOKENS, rope_parameters=rope),
            "vision_config": {"model_type": f"{model_type}_vision", **_TINY_ENCODER, **encoder},
        },
        processor=processor,
    )


def _qwen_processor(name: str, *, patch: int, pixels: Config, image_size: Mapping[str, int], video: Config) -> Config:
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
_TINY_QWEN2_5_ENCODER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": WIDTH,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "tokens_per_second": 2,
}
_TINY_QWEN3_ENCODER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "out_hidden_size": WIDTH,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [0, 1],
}
TINY_QWEN2_VL = _qwen_vl(
    "qwen2_vl",
    system=_HELPFUL,
    rope=_MROPE,
    encoder={"depth": 2, "embed_dim": 32, "hidden_size": WIDTH, "mlp_ratio": 2, "patch_size": 14},
    processor=_qwen_processor(
        "Qwen2VLProcessor", patch=14, pixels=CLIP_PIXELS, image_size=_QWEN2_PIXELS, video=_QWEN2_VIDEO
    ),
)
TINY_QWEN2_5_VL = _qwen_vl(
    "qwen2_5_vl",
    system=_HELPFUL,
    rope=_MROPE,
    encoder=_TINY_QWEN2_5_ENCODER,
    processor=_qwen_processor(
        "Qwen2_5_VLProcessor", patch=14, pixels=CLIP_PIXELS, image_size=_QWEN2_PIXELS, video=_QWEN2_VIDEO
    ),
)
TINY_QWEN3_VL = _qwen_vl(
    "qwen3_vl",
    system="",
    rope={**_MROPE, "mrope_interleaved": True},
    encoder=_TINY_QWEN3_ENCODER,
    processor=_qwen_processor(
        "Qwen3VLProcessor", patch=16, pixels=HALF_PIXELS, image_size=_QWEN3_PIXELS, video=_QWEN3_VIDEO
    ),
)
