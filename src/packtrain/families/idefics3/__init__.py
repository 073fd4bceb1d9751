"""Idefics3 and SmolVLM."""

from __future__ import annotations

from packtrain.families.contracts import BatchContract
from packtrain.families.family import Family
from packtrain.families.idefics3 import published, shape, tiny
from packtrain.families.idefics3.rule import Idefics3, SmolVLM

_CONTRACT = BatchContract(media={"pixel_values": "images", "pixel_attention_mask": "images"})

FAMILIES = {
    "idefics3": Family(
        model_type="idefics3",
        rule=Idefics3,
        contract=_CONTRACT,
        processors=("Idefics3Processor",),
        image_processors=("Idefics3ImageProcessor",),
        shape=shape.IDEFICS3,
        small_image=shape.small_image,
        tiny=tiny.IDEFICS3,
    ),
    "smolvlm": Family(
        model_type="smolvlm",
        rule=SmolVLM,
        contract=_CONTRACT,
        processors=("SmolVLMProcessor",),
        image_processors=("SmolVLMImageProcessor",),
        shape=shape.SMOLVLM,
        small_image=shape.small_image,
        tiny=tiny.SMOLVLM,
        published=published.SMOLVLM,
    ),
}
