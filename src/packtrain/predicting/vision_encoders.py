"""Vision encoders: a vision_config becomes a VisionShape and what its parameter count needs beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from packtrain.predicting.parameters import EncoderParts, Projector
from packtrain.predicting.sizes import Values
from packtrain.predicting.values import VisionShape


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionEncoder:
    """A encoder as read; Qwen's hold their own projector, the mergers."""

    shape: VisionShape
    parts: EncoderParts
    grid: int  # patches of one image where its size is fixed, else 0
    projector: Projector | None = None


_WHERE = "config.json: vision_config"
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


def _vit(hidden: int, intermediate: int, layers: int, heads: int, image: int, patch: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": image,
        "patch_size": patch,
        "num_channels": 3,
    }


_CLIP = _vit(768, 3072, 12, 12, 224, 32)
_SIGLIP = {**_vit(768, 3072, 12, 12, 224, 16), "vision_use_head": True}
_IDEFICS3 = _vit(1152, 3072, 12, 16, 224, 32)
_INTERNVL = {
    **_vit(1024, 4096, 24, 16, 448, 14),
    "norm_type": "layer_norm",
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}
VISION_ENCODERS = (
    "qwen2_vl_vision",
    "qwen2_5_vl_vision",
    "qwen3_vl_vision",
    "clip_vision_model",
    "siglip_vision_model",
    "idefics3_vision",
    "smolvlm_vision",
    "internvl_vision",
)


def read_vision_encoder(kind: str, config: Mapping[str, Any]) -> VisionEncoder:
    """A known encoder; a name that is not in VISION_ENCODERS is read as a plain ViT whose config must be complete."""
    if kind == "qwen2_vl_vision":
        return _qwen2_vl(Values(config, _QWEN2_VL, _WHERE))
    if kind == "qwen2_5_vl_vision":
        return _qwen2_5_vl(Values(config, _QWEN2_5_VL, _WHERE))
    if kind == "qwen3_vl_vision":
        return _qwen3_vl(Values(config, _QWEN3_VL, _WHERE))
    if kind == "clip_vision_model":
        return _fixed(Values(config, _CLIP, _WHERE), patch_bias=False, class_token=True, outer_norms=2)
    if kind == "siglip_vision_model":
        values = Values(config, _SIGLIP, _WHERE)
        return _fixed(values, outer_norms=1, pooling_head=values.flag("vision_use_head"))
    if kind in ("idefics3_vision", "smolvlm_vision"):
        return _fixed(Values(config, _IDEFICS3, _WHERE), outer_norms=1)
    if kind == "internvl_vision":
        return _internvl(Values(config, _INTERNVL, _WHERE))
    return _fixed(Values(config, {"num_channels": 3}, _WHERE), outer_norms=1)


def _fixed(
    values: Values, *, outer_norms: int, patch_bias: bool = True, class_token: bool = False, pooling_head: bool = False
) -> VisionEncoder:
    """A ViT over images of one size, with learned positions."""
    shape, grid = _vit_shape(values)
    parts = EncoderParts(
        patch_bias=patch_bias,
        positions=grid + class_token,
        extra_rows=int(class_token),
        outer_norms=outer_norms,
        pooling_head=pooling_head,
    )
    return VisionEncoder(shape=shape, parts=parts, grid=grid)


def _vit_shape(values: Values) -> tuple[VisionShape, int]:
    patch, image = values.sides("patch_size"), values.sides("image_size")
    layers = values.size("num_hidden_layers")
    shape = VisionShape(
        hidden=values.size("hidden_size"),
        layers=layers,
        heads=values.size("num_attention_heads"),
        intermediate=values.size("intermediate_size"),
        gated=False,
        patch_elements=values.size("num_channels") * prod(patch),
        full_attention_layers=layers,
    )
    return shape, (image[0] // patch[0]) * (image[1] // patch[1])


def _internvl(values: Values) -> VisionEncoder:
    shape, grid = _vit_shape(values)
    parts = EncoderParts(
        patch_bias=True,
        positions=grid + 1 if values.flag("use_absolute_position_embeddings") else 0,
        extra_rows=1 + values.flag("use_mask_token"),
        query_bias=values.flag("attention_bias"),
        norm_size=1 if values.get("norm_type") == "rms_norm" else 2,
        layer_extras=2 + 2 * values.flag("use_qk_norm"),
        outer_norms=0 if values.flag("use_mean_pooling") else 1,
    )
    return VisionEncoder(shape=shape, parts=parts, grid=grid)


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


def _qwen2_vl(values: Values) -> VisionEncoder:
    hidden = values.size("embed_dim")
    ratio = values.size("mlp_ratio")
    full = values.size("depth")
    shape = _qwen_shape(values, hidden=hidden, intermediate=hidden * ratio, gated=False, full=full, window=0)
    projector = _mergers(shape, values.size("hidden_size"), count=1, others=2 * hidden)
    return VisionEncoder(shape=shape, parts=EncoderParts(patch_bias=False, positions=0), grid=0, projector=projector)


def _qwen2_5_vl(values: Values) -> VisionEncoder:
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


def _qwen3_vl(values: Values) -> VisionEncoder:
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
