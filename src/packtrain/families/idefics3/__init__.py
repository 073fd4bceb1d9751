"""Idefics3 and SmolVLM."""

from __future__ import annotations

from packtrain.families.family import BatchContract, Family
from packtrain.families.idefics3 import model
from packtrain.families.idefics3.rule import Idefics3, SmolVLM

_CONTRACT = BatchContract(media={"pixel_values": "images", "pixel_attention_mask": "images"})

FAMILIES = {
    "idefics3": Family(
        model_type="idefics3",
        rule=Idefics3,
        contract=_CONTRACT,
        processors=("Idefics3Processor",),
        image_processors=("Idefics3ImageProcessor",),
        shape=model.IDEFICS3,
        small_image=model.small_image,
        tiny=model.TINY_IDEFICS3,
    ),
    "smolvlm": Family(
        model_type="smolvlm",
        rule=SmolVLM,
        contract=_CONTRACT,
        processors=("SmolVLMProcessor",),
        image_processors=("SmolVLMImageProcessor",),
        shape=model.SMOLVLM,
        small_image=model.small_image,
        tiny=model.TINY_SMOLVLM,
        published=model.PUBLISHED_SMOLVLM,
    ),
}
