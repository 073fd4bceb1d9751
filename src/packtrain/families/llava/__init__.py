"""LLaVA, LLaVA-NeXT and LLaVA-OneVision."""

from __future__ import annotations

from packtrain.families.family import BatchContract, Family
from packtrain.families.llava import model
from packtrain.families.llava.rule import Llava, LlavaNext, LlavaOneVision
from packtrain.families.shape import square_image

FAMILIES = {
    "llava": Family(
        model_type="llava",
        rule=Llava,
        contract=BatchContract(media={"pixel_values": "rows"}),
        processors=("LlavaProcessor",),
        image_processors=("LlavaImageProcessor",),
        shape=model.LLAVA,
        small_image=square_image,
        tiny=model.TINY_LLAVA,
    ),
    "llava_next": Family(
        model_type="llava_next",
        rule=LlavaNext,
        contract=BatchContract(media={"pixel_values": "tiles", "image_sizes": "rows"}),
        processors=("LlavaNextProcessor",),
        shape=model.LLAVA_NEXT,
        small_image=model.small_image,
        tiny=model.TINY_LLAVA_NEXT,
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
        shape=model.LLAVA_ONEVISION,
        small_image=model.small_image,
        tiny=model.TINY_LLAVA_ONEVISION,
    ),
}
