"""Idefics3 and SmolVLM: sizes and parameters, published sizes, and tiny models.

The encoder is a SigLIP without pooling; squares of patches are joined by one matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from packtrain.families.shape import (
    ENCODER_WHERE,
    Composition,
    Config,
    Values,
    VisionEncoder,
    decoder,
    fixed_vit,
    last_tokens,
    ones,
    shuffled,
    vit_sizes,
)
from packtrain.families.tiny import HALF_PIXELS, TINY_VISION, TemplateSpec, TinySpec, text_config, token_ids


def _encoder(config: Config) -> VisionEncoder:
    return fixed_vit(Values(config, vit_sizes(1152, 3072, 12, 16, 224, 32), ENCODER_WHERE), outer_norms=1)


IDEFICS3 = Composition(
    text="llama", encoder="idefics3_vision", encoders={"idefics3_vision": _encoder}, projector=shuffled
)
SMOLVLM = Composition(text="llama", encoder="smolvlm_vision", encoders={"smolvlm_vision": _encoder}, projector=shuffled)


def small_image(config: Any) -> dict[str, np.ndarray]:
    """One image of one tile, as small as pixels can be shuffled into one token."""
    side = config.vision_config.patch_size * config.scale_factor
    return {"pixel_values": ones(1, 1, 3, side, side)}


_WORDS = 49_280

PUBLISHED_SMOLVLM = {
    "smolvlm-2.2b": {
        "model_type": "smolvlm",
        "scale_factor": 3,
        **last_tokens(_WORDS, "image_token_id"),
        "text_config": {"model_type": "llama", **decoder(2048, 8192, 24, 32, 32, 64, _WORDS)},
        "vision_config": {
            "model_type": "smolvlm_vision",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 384,
            "patch_size": 14,
        },
    }
}

# User: ...<end_of_utterance>
_UTTERANCES = """\
{{ bos_token }}
{%- for message in messages -%}
{%- set tight = message.content is not string and message.content and message.content[0].type == 'image' -%}
{{ message.role | capitalize + (':' if tight else ': ') + write(message.content) + '<end_of_utterance>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}
"""
_TILE_MARKERS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))


def _utterances(
    model_type: str, *, bos: str, adds_bos: bool, tile: int, patch: int, shuffle: int, processor: Config
) -> TinySpec:
    tokens = {
        "bos_token": bos,
        "eos_token": "<end_of_utterance>",
        "pad_token": "<|endoftext|>",
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    }
    return TinySpec(
        tokens=tokens,
        special=_TILE_MARKERS,
        adds_bos=adds_bos,
        template=TemplateSpec(dialect=_UTTERANCES, image="<image>", video="<video>"),
        config={
            "model_type": model_type,
            **token_ids(tokens, "image", "pad"),
            "scale_factor": shuffle,
            "tie_word_embeddings": False,
            "text_config": text_config("llama", tokens),
            "vision_config": {
                "model_type": f"{model_type}_vision",
                **TINY_VISION,
                "image_size": tile,
                "patch_size": patch,
            },
        },
        processor={"image_seq_len": (tile // patch // shuffle) ** 2, **processor},
    )


def _tiles(tile: int) -> Config:
    return {"max_image_size": {"longest_edge": tile}, "size": {"longest_edge": 4 * tile}, "resample": 1, **HALF_PIXELS}


TINY_IDEFICS3 = _utterances(
    "idefics3",
    bos="<|begin_of_text|>",
    adds_bos=True,
    tile=364,
    patch=14,
    shuffle=2,
    processor={
        "processor_class": "Idefics3Processor",
        "image_processor": {
            "image_processor_type": "Idefics3ImageProcessor",
            "do_image_splitting": True,
            **_tiles(364),
        },
    },
)
TINY_SMOLVLM = _utterances(
    "smolvlm",
    bos="<|im_start|>",
    adds_bos=False,
    tile=512,
    patch=16,
    shuffle=4,
    processor={
        "processor_class": "SmolVLMProcessor",
        "image_processor": {
            "image_processor_type": "SmolVLMImageProcessor",
            "do_image_splitting": True,
            **_tiles(512),
        },
        "video_processor": {
            "video_processor_type": "SmolVLMVideoProcessor",
            **_tiles(512),
            "size": {"longest_edge": 512},
            "fps": 1,
            "num_frames": 64,
            "do_sample_frames": True,
        },
    },
)
