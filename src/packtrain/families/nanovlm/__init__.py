"""nanoVLM: measured, planned and packed; its model is not in transformers."""

from __future__ import annotations

from packtrain.families.family import Family
from packtrain.families.nanovlm import model
from packtrain.families.nanovlm.rule import NanoVLM

FAMILIES = {
    "nanovlm": Family(
        model_type="nanovlm",
        rule=NanoVLM,
        refused="its model is not in transformers; measuring, planning and packing work without it",
        shape=model.NANOVLM,
        tiny=model.TINY_NANOVLM,
        in_transformers=False,
    ),
}
