"""Sizes and parameters of the LLaVAs: CLIP or SigLIP, and a projector of two layers."""

from __future__ import annotations

from typing import Any

import numpy as np

from packtrain.families.shape import SO400M, Composition, VisionTraits, image_side, ones, two_layers, two_layers_newline

_CLIP_L = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_SIGMOID = VisionTraits(sigmoid=True)

LLAVA = Composition(
    text="llama",
    encoder="clip_vision_model",
    encoder_absent=_CLIP_L,
    tied_by_text=True,
    projector=two_layers,
    traits=_SIGMOID,
)
LLAVA_NEXT = Composition(
    text="llama",
    encoder="clip_vision_model",
    encoder_absent=_CLIP_L,
    projector=two_layers_newline,
    traits=_SIGMOID,
)
LLAVA_ONEVISION = Composition(
    text="qwen2",
    encoder="siglip_vision_model",
    encoder_absent={**SO400M, "image_size": 384, "num_hidden_layers": 26},
    tied_by_text=True,
    projector=two_layers_newline,
)


def small_image(config: Any) -> dict[str, np.ndarray]:
    """An image with every tile that its size asks for, so that the parameter between rows of tiles is used too."""
    side = image_side(config)
    height, width = min(config.image_grid_pinpoints, key=lambda pair: pair[0] * pair[1])
    tiles = 1 + (height // side) * (width // side)
    return {"pixel_values": ones(1, tiles, 3, side, side), "image_sizes": np.array([[height, width]])}
