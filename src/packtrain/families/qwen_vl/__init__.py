"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL, and their language models alone."""

from __future__ import annotations

from collections.abc import Mapping

from packtrain.families.family import BatchContract, Family, Join, TextOnly
from packtrain.families.qwen_vl import model
from packtrain.families.qwen_vl.rule import Qwen2VL, Qwen3VL, Qwen25VL

_MEDIA: Mapping[str, Join] = {
    "pixel_values": "rows",
    "image_grid_thw": "rows",
    "pixel_values_videos": "rows",
    "video_grid_thw": "rows",
}
# The language models alone find the samples of a row in the first of four rows of positions, too.
_TEXT = BatchContract(positions="mrope")

_ALL = (
    Family(
        model_type="qwen2_vl",
        rule=Qwen2VL,
        contract=BatchContract(positions="mrope", media=_MEDIA),
        processors=("Qwen2VLProcessor",),
        shape=model.QWEN2_VL,
        small_image=model.small_image,
        tiny=model.TINY_QWEN2_VL,
    ),
    Family(
        model_type="qwen2_5_vl",
        rule=Qwen25VL,
        contract=BatchContract(positions="mrope", media={**_MEDIA, "second_per_grid_ts": "rows"}),
        processors=("Qwen2_5_VLProcessor",),
        shape=model.QWEN2_5_VL,
        small_image=model.small_image,
        tiny=model.TINY_QWEN2_5_VL,
        published=model.PUBLISHED_QWEN2_5_VL,
    ),
    Family(
        model_type="qwen3_vl",
        rule=Qwen3VL,
        contract=BatchContract(positions="mrope", media=_MEDIA),
        processors=("Qwen3VLProcessor",),
        shape=model.QWEN3_VL,
        small_image=model.small_image,
        image_sizes="packtrain.families.qwen_vl.vision_encoder:image_sizes",
        tiny=model.TINY_QWEN3_VL,
        published=model.PUBLISHED_QWEN3_VL,
    ),
    Family(model_type="qwen3_vl_moe", shape=model.QWEN3_VL_MOE),
    Family(model_type="qwen2_vl_text", rule=TextOnly, contract=_TEXT, shape=model.QWEN2_TEXT),
    Family(model_type="qwen2_5_vl_text", rule=TextOnly, contract=_TEXT, shape=model.QWEN2_TEXT),
    Family(model_type="qwen3_vl_text", rule=TextOnly, contract=_TEXT, shape=model.QWEN3_TEXT),
    Family(model_type="qwen3_vl_moe_text", shape=model.QWEN3_MOE_TEXT),
)
FAMILIES = {family.model_type: family for family in _ALL}
