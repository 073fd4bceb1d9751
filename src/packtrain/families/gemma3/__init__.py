"""Gemma 3, and what is known of PaliGemma."""

from __future__ import annotations

from packtrain.families.family import BatchContract, Family, TextOnly
from packtrain.families.gemma3 import model
from packtrain.families.gemma3.rule import Gemma3
from packtrain.families.shape import square_image

_NO_FLASH = "it cannot express the bidirectional attention inside images"

FAMILIES = {
    "gemma3": Family(
        model_type="gemma3",
        rule=Gemma3,
        contract=BatchContract(
            media={"pixel_values": "rows"},
            token_types="token_type_ids",
            refused_backends=dict.fromkeys(("varlen", "flash_attention_2", "flash_attention_3"), _NO_FLASH),
        ),
        processors=("Gemma3Processor",),
        image_processors=("Gemma3ImageProcessor",),
        shape=model.GEMMA3,
        small_image=square_image,
        tiny=model.TINY_GEMMA3,
    ),
    "gemma3_text": Family(
        model_type="gemma3_text", rule=TextOnly, shape=model.GEMMA3_TEXT, tiny=model.TINY_GEMMA3_TEXT
    ),
    "paligemma": Family(
        model_type="paligemma",
        refused="it attends bidirectionally inside a prompt, which needs an explicit 4-D mask",
        shape=model.PALIGEMMA,
    ),
}
