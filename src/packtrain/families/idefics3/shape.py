"""Sizes and parameters of Idefics3 and SmolVLM: a SigLIP without pooling, squares of patches joined by one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from packtrain.families.shape import ENCODER_WHERE, Composition, VisionEncoder, fixed_vit, ones, shuffled, vit_sizes
from packtrain.families.sizes import Values


def _encoder(config: Mapping[str, Any]) -> VisionEncoder:
    return fixed_vit(Values(config, vit_sizes(1152, 3072, 12, 16, 224, 32), ENCODER_WHERE), outer_norms=1)


IDEFICS3 = Composition(
    text="llama", encoder="idefics3_vision", encoders={"idefics3_vision": _encoder}, projector=shuffled
)
SMOLVLM = Composition(text="llama", encoder="smolvlm_vision", encoders={"smolvlm_vision": _encoder}, projector=shuffled)


def small_image(config: Any) -> dict[str, np.ndarray]:
    """One image of one tile, as small as pixels can be shuffled into one token."""
    side = config.vision_config.patch_size * config.scale_factor
    return {"pixel_values": ones(1, 1, 3, side, side)}
