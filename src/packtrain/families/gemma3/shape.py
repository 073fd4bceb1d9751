"""Sizes and parameters of Gemma 3 and PaliGemma: SigLIP, and a projector of one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.families.shape import (
    SO400M,
    Composition,
    Decoder,
    Projector,
    VisionEncoder,
    VisionTraits,
    decoder_sizes,
)
from packtrain.families.sizes import Values

_GEMMA_2B = {
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257152,
}
_TWO_WAY = VisionTraits(two_way_images=True)


def _pooled(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    tokens = Values(config, {"mm_tokens_per_image": 256}, "config.json").size("mm_tokens_per_image")
    matrices = ((encoder.shape.hidden, width, False),)
    return Projector(matrices=matrices, others=encoder.shape.hidden), max(1, encoder.grid // tokens)


def _one_layer(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    outputs = Values(config, {"projection_dim": 2048}, "config.json").size("projection_dim")
    return Projector(matrices=((encoder.shape.hidden, outputs, True),)), 1


GEMMA3 = Composition(text="gemma3_text", encoder="siglip_vision_model", tied=True, projector=_pooled, traits=_TWO_WAY)
PALIGEMMA = Composition(
    text="gemma",
    text_absent=_GEMMA_2B,
    encoder="siglip_vision_model",
    encoder_absent={**SO400M, "intermediate_size": 4096, "image_size": 224, "num_hidden_layers": 27},
    tied=True,
    projector=_one_layer,
    traits=_TWO_WAY,
)
GEMMA3_TEXT = Decoder(
    defaults=decoder_sizes(
        2304, 9216, 26, 8, 4, 262208, 131072, head_dim=256, tie_word_embeddings=True, sliding_window=4096
    ),
    head_norms=True,
    norms=4,
    windows="period",
    window_period=6,
)
