"""Sizes and parameters of Qwen's vision models: encoders with mergers inside, decoders of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from packtrain.families.shape import (
    ENCODER_WHERE,
    Composition,
    Decoder,
    EncoderParts,
    Projector,
    VisionEncoder,
    VisionShape,
    VisionTraits,
    decoder_sizes,
    ones,
)
from packtrain.families.sizes import Values
from packtrain.families.text.shape import QWEN_WINDOW

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


def _qwen2_vl(config: Mapping[str, Any]) -> VisionEncoder:
    values = Values(config, _QWEN2_VL, ENCODER_WHERE)
    hidden = values.size("embed_dim")
    ratio = values.size("mlp_ratio")
    full = values.size("depth")
    shape = _qwen_shape(values, hidden=hidden, intermediate=hidden * ratio, gated=False, full=full, window=0)
    projector = _mergers(shape, values.size("hidden_size"), count=1, others=2 * hidden)
    return VisionEncoder(shape=shape, parts=EncoderParts(patch_bias=False, positions=0), grid=0, projector=projector)


def _qwen2_5_vl(config: Mapping[str, Any]) -> VisionEncoder:
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


def _qwen3_vl(config: Mapping[str, Any]) -> VisionEncoder:
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


def _merger(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
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
QWEN2_5_VL = Composition(
    text="qwen2_5_vl_text",
    encoder="qwen2_5_vl_vision",
    encoders={"qwen2_5_vl_vision": _qwen2_5_vl},
    flat_text=True,
    tied_by_text=True,
    fixed=True,
    projector=_merger,
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
