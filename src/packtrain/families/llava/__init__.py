"""LLaVA, LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

from packtrain.families.contracts import BatchContract
from packtrain.families.family import Family
from packtrain.families.llava import shape, tiny
from packtrain.families.llava.rule import Llava, LlavaNext, LlavaOneVision
from packtrain.families.shape import square_image

FAMILIES = {
    "llava": Family(
        model_type="llava",
        rule=Llava,
        contract=BatchContract(media={"pixel_values": "rows"}),
        processors=("LlavaProcessor",),
        image_processors=("LlavaImageProcessor",),
        shape=shape.LLAVA,
        small_image=square_image,
        tiny=tiny.LLAVA,
    ),
    "llava_next": Family(
        model_type="llava_next",
        rule=LlavaNext,
        contract=BatchContract(media={"pixel_values": "tiles", "image_sizes": "rows"}),
        processors=("LlavaNextProcessor",),
        shape=shape.LLAVA_NEXT,
        small_image=shape.small_image,
        tiny=tiny.LLAVA_NEXT,
    ),
    "llava_onevision": Family(
        model_type="llava_onevision",
        rule=LlavaOneVision,
        contract=BatchContract(
            media={"pixel_values": "tiles", "image_sizes": "rows", "pixel_values_videos": "rows"},
            per_sample_images="batch_num_images",
        ),
        processors=("LlavaOnevisionProcessor",),
        image_processors=("LlavaOnevisionImageProcessor",),
        shape=shape.LLAVA_ONEVISION,
        small_image=shape.small_image,
        tiny=tiny.LLAVA_ONEVISION,
    ),
}
