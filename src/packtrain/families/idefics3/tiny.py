"""The tiny Idefics3 and SmolVLM: tiles with row and column markers, utterances."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.families.tiny.parts import HALF_PIXELS, VISION, TinySpec, text_config, token_ids
from packtrain.families.tiny.templates import TemplateSpec

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
    model_type: str, *, bos: str, adds_bos: bool, tile: int, patch: int, shuffle: int, processor: Mapping[str, Any]
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
            "vision_config": {"model_type": f"{model_type}_vision", **VISION, "image_size": tile, "patch_size": patch},
        },
        processor={"image_seq_len": (tile // patch // shuffle) ** 2, **processor},
    )


def _tiles(tile: int) -> dict[str, Any]:
    return {"max_image_size": {"longest_edge": tile}, "size": {"longest_edge": 4 * tile}, "resample": 1, **HALF_PIXELS}


IDEFICS3 = _utterances(
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
SMOLVLM = _utterances(
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
