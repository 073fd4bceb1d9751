"""Sizes and parameters of Gemma 3 and PaliGemma (SigLIP, a projector of one matrix), and tiny models.

The tiny Gemma 3 sees 224 x 224 instead of 896 x 896 pixels.
"""

from __future__ import annotations

from packtrain.families.shape import (
    SO400M,
    Composition,
    Config,
    Decoder,
    Projector,
    Values,
    VisionEncoder,
    VisionTraits,
    decoder_sizes,
)
from packtrain.families.tiny import (
    FOLD_SYSTEM,
    HALF_PIXELS,
    TINY_VISION,
    WEIGHTS,
    Id,
    TemplateSpec,
    TinySpec,
    text_config,
    token_ids,
)

_GEMMA_2B = {
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257152,
}
_TWO_WAY = VisionTraits(two_way_images=True)


def _pooled(config: Config, encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    tokens = Values(config, {"mm_tokens_per_image": 256}, "config.json").size("mm_tokens_per_image")
    matrices = ((encoder.shape.hidden, width, False),)
    return Projector(matrices=matrices, others=encoder.shape.hidden), max(1, encoder.grid // tokens)


def _one_layer(config: Config, encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
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
    fp32_scales=True,
    windows="period",
    window_period=6,
)

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
TINY_GEMMA3 = TinySpec(
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
            **TINY_VISION,
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
TINY_GEMMA3_TEXT = TinySpec(
    tokens=_TOKENS,
    special=_MARKS,
    adds_bos=True,
    template=TemplateSpec(dialect=_TURNS),
    config=text_config("gemma3_text", _TOKENS, **_LAYERS),
)
