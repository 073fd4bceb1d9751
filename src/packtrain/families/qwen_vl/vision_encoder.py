"""What Qwen3-VL's encoder computes from the sizes of images, by the names that it takes it by. Needs torch."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import vision_utils


def image_sizes(encoder: Any, grid: Tensor) -> dict[str, Tensor | int]:
    """For images and videos of these (time, height, width), which are on the host."""
    ends = vision_utils.get_vision_cu_seqlens(grid)
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grid,
        num_grid_per_side=encoder.num_grid_per_side,
        mode=encoder.interpolation_mode,
        align_corners=encoder.interpolation_align_corners,
        spatial_merge_size=encoder.spatial_merge_size,
    )
    return {
        "cu_seqlens": ends,
        "position_ids": vision_utils.get_vision_position_ids(grid, encoder.spatial_merge_size),
        "interp_indices": indices,
        "interp_weights": weights,
        "max_seqlen": int(ends.diff().max()),
    }
