"""The tiny Gemma 3, with and without images: a fixed number of tokens per image, sliding windows.

It sees 224 x 224 instead of 896 x 896 pixels.
"""

from __future__ import annotations

from packtrain.families.tiny.parts import HALF_PIXELS, VISION, WEIGHTS, Id, TinySpec, text_config, token_ids
from packtrain.families.tiny.templates import FOLD_SYSTEM, TemplateSpec

# <start_of_turn>user
_TURNS = (
    FOLD_SYSTEM
    + """\
{{ bos_token }}
{%- for message in messages if message.role != 'system' -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' + role + '\\n' + state.system + write(message.content) | trim + '<end_of_turn>\\n' }}
{%- set state.system = '' -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""
)
_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
_VISION_TOKENS = {
    **_TOKENS,
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_MARKS = ("<start_of_turn>", "<end_of_turn>")
_LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 512,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "tie_word_embeddings": True,
}
_IMAGE_TOKENS = 64
GEMMA3 = TinySpec(
    tokens=_VISION_TOKENS,
    special=_MARKS,
    adds_bos=True,
    template=TemplateSpec(dialect=_TURNS, image="<start_of_image>"),
    config={
        "model_type": "gemma3",
        "boi_token_index": Id("<start_of_image>"),
        "eoi_token_index": Id("<end_of_image>"),
        "image_token_index": Id("<image_soft_token>"),
        "mm_tokens_per_image": _IMAGE_TOKENS,
        **WEIGHTS,
        **token_ids(_TOKENS, "bos", "eos", "pad"),
        "text_config": text_config("gemma3_text", _TOKENS, **_LAYERS),
        "vision_config": {
            "model_type": "siglip_vision_model",
            **VISION,
            "image_size": 224,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    processor={
        "processor_class": "Gemma3Processor",
        "image_seq_length": _IMAGE_TOKENS,
        "image_processor": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 224, "width": 224},
            "resample": 2,
            **HALF_PIXELS,
        },
    },
)
GEMMA3_TEXT = TinySpec(
    tokens=_TOKENS,
    special=_MARKS,
    adds_bos=True,
    template=TemplateSpec(dialect=_TURNS),
    config=text_config("gemma3_text", _TOKENS, **_LAYERS),
)
