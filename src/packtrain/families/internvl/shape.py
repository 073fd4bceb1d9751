"""Sizes and parameters of InternVL: its own ViT, squares of patches joined by two matrices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.core.errors import ConfigError
from packtrain.families.shape import (
    ENCODER_WHERE,
    Composition,
    EncoderParts,
    Projector,
    VisionEncoder,
    VisionTraits,
    vit_shape,
    vit_sizes,
)
from packtrain.families.sizes import Values

_ENCODER = {
    **vit_sizes(1024, 4096, 24, 16, 448, 14),
    "norm_type": "layer_norm",
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}


def _encoder(config: Mapping[str, Any]) -> VisionEncoder:
    values = Values(config, _ENCODER, ENCODER_WHERE)
    shape, grid = vit_shape(values)
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


def _projector(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    ratio = config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError("config.json: downsample_ratio", got=ratio, expected="a number above 0 and up to 1")
    merged = int(1 / ratio) ** 2
    inputs = encoder.shape.hidden * merged
    return Projector(matrices=((inputs, width, True), (width, width, True)), others=2 * inputs), merged


INTERNVL = Composition(
    text="qwen2",
    encoder="internvl_vision",
    encoders={"internvl_vision": _encoder},
    tied=True,
    projector=_projector,
    traits=VisionTraits(scaled=True, plain_softmax=True),
)
