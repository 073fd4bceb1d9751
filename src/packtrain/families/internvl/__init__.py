"""InternVL, as transformers has it."""

from __future__ import annotations

from packtrain.families.family import BatchContract, Family
from packtrain.families.internvl import model
from packtrain.families.internvl.rule import InternVL
from packtrain.families.shape import square_image

FAMILIES = {
    "internvl": Family(
        model_type="internvl",
        rule=InternVL,
        contract=BatchContract(media={"pixel_values": "rows"}, text_order=True),
        processors=("InternVLProcessor",),
        shape=model.INTERNVL,
        small_image=square_image,
        tiny=model.TINY_INTERNVL,
    ),
}
