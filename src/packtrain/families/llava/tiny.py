"""The tiny LLaVAs: <image> in front of the text, encoders of fixed size."""

from __future__ import annotations

from packtrain.families.tiny.parts import (
    CLIP_PIXELS,
    HALF_PIXELS,
    LLAMA_TOKENS,
    QWEN_TOKENS,
    VISION,
    Id,
    TinySpec,
    text_config,
)
from packtrain.families.tiny.templates import CHATML, INSTRUCTIONS, TemplateSpec

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
_CLIP_336 = {"model_type": "clip_vision_model", **VISION, "image_size": 336, "patch_size": 14}
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
LLAVA = TinySpec(
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
LLAVA_NEXT = TinySpec(
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
LLAVA_ONEVISION = TinySpec(
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
            **VISION,
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
