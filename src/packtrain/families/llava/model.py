"""Sizes and parameters of the LLaVAs (CLIP or SigLIP, a projector of two layers), and tiny ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from packtrain.families.shape import SO400M, Composition, VisionTraits, image_side, ones, two_layers, two_layers_newline
from packtrain.families.tiny import (
    CHATML,
    CLIP_PIXELS,
    HALF_PIXELS,
    INSTRUCTIONS,
    LLAMA_TOKENS,
    QWEN_TOKENS,
    TINY_VISION,
    Id,
    TemplateSpec,
    TinySpec,
    text_config,
)

_CLIP_L = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}

LLAVA = Composition(
    text="llama",
    encoder="clip_vision_model",
    encoder_absent=_CLIP_L,
    tied_by_text=True,
    projector=two_layers,
    traits=VisionTraits(sigmoid=True),
)
LLAVA_NEXT = replace(LLAVA, tied_by_text=False, projector=two_layers_newline)
LLAVA_ONEVISION = Composition(
    text="qwen2",
    encoder="siglip_vision_model",
    encoder_absent={**SO400M, "image_size": 384, "num_hidden_layers": 26},
    tied_by_text=True,
    projector=two_layers_newline,
)


def small_image(config: Any) -> dict[str, np.ndarray]:
    """An image with every tile that its size asks for, so that the parameter between rows of tiles is used too."""
    side = image_side(config)
    height, width = min(config.image_grid_pinpoints, key=lambda pair: pair[0] * pair[1])
    tiles = 1 + (height // side) * (width // side)
    return {"pixel_values": ones(1, tiles, 3, side, side), "image_sizes": np.array([[height, width]])}


# USER: ... ASSISTANT: ...
_USER_ASSISTANT = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ write(message.content) + ' ' }}
{%- elif message.role == 'assistant' -%}{{ 'ASSISTANT: ' + write(message.content) + eos_token }}
{%- else -%}{{ message.role | upper + ': ' + write(message.content) + ' ' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}
"""
_LLAVA_TOKENS = {**LLAMA_TOKENS, "image_token": "<image>"}
_CLIP_336 = {"model_type": "clip_vision_model", **TINY_VISION, "image_size": 336, "patch_size": 14}
_CLIP_PROCESSOR = {
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "resample": 3,
    **CLIP_PIXELS,
}
_LLAVA_SELECT = {"vision_feature_select_strategy": "default"}
_LLAVA_PROCESSOR = {"patch_size": 14, "num_additional_image_tokens": 1, **_LLAVA_SELECT}
_NEXT_GRID = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_ONEVISION_GRID = [[384 * rows, 384 * columns] for rows in range(1, 7) for columns in range(1, 7)]
_ONEVISION_TOKENS = {**QWEN_TOKENS, "image_token": "<image>", "video_token": "<video>"}
_SQUARE_384 = {"size": {"height": 384, "width": 384}, "resample": 3}
TINY_LLAVA = TinySpec(
    tokens=_LLAVA_TOKENS,
    adds_bos=True,
    template=TemplateSpec(dialect=_USER_ASSISTANT, image="<image>\n", media_first=True),
    config={
        "model_type": "llava",
        "image_token_index": Id("<image>"),
        "image_seq_length": 576,
        "vision_feature_layer": -2,
        **_LLAVA_SELECT,
        "text_config": text_config("llama", _LLAVA_TOKENS),
        "vision_config": _CLIP_336,
    },
    processor={
        "processor_class": "LlavaProcessor",
        "image_token": "<image>",
        **_LLAVA_PROCESSOR,
        "image_processor": {"image_processor_type": "CLIPImageProcessor", **_CLIP_PROCESSOR},
    },
)
TINY_LLAVA_NEXT = TinySpec(
    tokens=_LLAVA_TOKENS,
    adds_bos=True,
    template=TemplateSpec(dialect=INSTRUCTIONS, image="<image>\n", media_first=True, bos=False),
    config={
        "model_type": "llava_next",
        "image_token_index": Id("<image>"),
        "image_seq_length": 576,
        "image_grid_pinpoints": _NEXT_GRID,
        "vision_feature_layer": -2,
        **_LLAVA_SELECT,
        "text_config": text_config("mistral", _LLAVA_TOKENS, sliding_window=None),
        "vision_config": _CLIP_336,
    },
    processor={
        "processor_class": "LlavaNextProcessor",
        "image_token": "<image>",
        **_LLAVA_PROCESSOR,
        "image_processor": {
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": _NEXT_GRID,
            "do_pad": True,
            **_CLIP_PROCESSOR,
        },
    },
)
TINY_LLAVA_ONEVISION = TinySpec(
    tokens=_ONEVISION_TOKENS,
    special=("<|im_start|>",),
    template=TemplateSpec(dialect=CHATML, image="<image>\n", video="<video>\n", media_first=True, gap=" "),
    config={
        "model_type": "llava_onevision",
        "image_token_index": Id("<image>"),
        "video_token_index": Id("<video>"),
        "image_grid_pinpoints": _ONEVISION_GRID,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "text_config": text_config("qwen2", _ONEVISION_TOKENS),
        "vision_config": {
            "model_type": "siglip_vision_model",
            **TINY_VISION,
            "image_size": 384,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    processor={
        "processor_class": "LlavaOnevisionProcessor",
        "num_image_tokens": 729,
        "vision_feature_select_strategy": "full",
        "vision_aspect_ratio": "anyres_max_9",
        "image_processor": {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": _ONEVISION_GRID,
            "do_pad": True,
            **_SQUARE_384,
            **HALF_PIXELS,
        },
        "video_processor": {
            "video_processor_type": "LlavaOnevisionVideoProcessor",
            **_SQUARE_384,
            **HALF_PIXELS,
        },
    },
)
