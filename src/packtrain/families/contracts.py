"""How samples of each family are joined into one packed row: one description per family, and what is refused.

The names are the arguments of the models' forward passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from packtrain.core.errors import ConfigError

Join = Literal["rows", "images", "tiles"]
# rows    along dimension 0, as they are
# images  (1, images, ...) along dimension 1; what is larger pads the other with zeros
# tiles   along dimension 0 after padding dimension 1, the tiles of an image, with zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchContract:
    """What a packed row of one family looks like."""

    model_type: str
    positions: Literal["restart", "mrope"] = "restart"  # (1, tokens), or (4, 1, tokens) with M-RoPE
    media: Mapping[str, Join] = field(default_factory=dict)  # media tensors and how they are joined
    token_types: str | None = None  # the argument that takes kinds of tokens, where the model needs one
    per_sample_images: str | None = None  # the argument that takes the number of images of each sample
    refused_backends: Mapping[str, str] = field(default_factory=dict)  # backend -> why


_QWEN = MappingProxyType(
    {"pixel_values": "rows", "image_grid_thw": "rows", "pixel_values_videos": "rows", "video_grid_thw": "rows"}
)
_NO_FLASH = "it cannot express the bidirectional attention inside images"

CONTRACTS: Mapping[str, BatchContract] = {
    contract.model_type: contract
    for contract in (
        BatchContract(model_type="qwen2_vl", positions="mrope", media=_QWEN),
        BatchContract(model_type="qwen2_5_vl", positions="mrope", media={**_QWEN, "second_per_grid_ts": "rows"}),
        BatchContract(model_type="qwen3_vl", positions="mrope", media=_QWEN),
        BatchContract(model_type="idefics3", media={"pixel_values": "images", "pixel_attention_mask": "images"}),
        BatchContract(model_type="smolvlm", media={"pixel_values": "images", "pixel_attention_mask": "images"}),
        BatchContract(model_type="llava", media={"pixel_values": "rows"}),
        BatchContract(model_type="llava_next", media={"pixel_values": "tiles", "image_sizes": "rows"}),
        BatchContract(
            model_type="llava_onevision",
            media={
                "pixel_values": "tiles",
                "image_sizes": "rows",
                "pixel_values_videos": "rows",
                "image_sizes_videos": "rows",
            },
            per_sample_images="batch_num_images",
        ),
        BatchContract(model_type="internvl", media={"pixel_values": "rows"}),
        BatchContract(
            model_type="gemma3",
            media={"pixel_values": "rows"},
            token_types="token_type_ids",
            refused_backends={name: _NO_FLASH for name in ("varlen", "flash_attention_2", "flash_attention_3")},
        ),
    )
}
