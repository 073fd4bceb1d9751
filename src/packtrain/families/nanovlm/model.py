"""Sizes and parameters of nanoVLM, and a tiny one.

Its config is flat; its decoder is a Llama, its encoder a SigLIP without pooling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.families.shape import Composition, Config, shuffled
from packtrain.families.tiny import CHATML, WIDTH, TemplateSpec, TinySpec, VocabularySize, token_ids

_TEXT = {
    "hidden_size": ("lm_hidden_dim", 960),
    "intermediate_size": ("lm_inter_dim", 2560),
    "num_hidden_layers": ("lm_n_blocks", 32),
    "num_attention_heads": ("lm_n_heads", 15),
    "num_key_value_heads": ("lm_n_kv_heads", 5),
    "vocab_size": ("lm_vocab_size", 49218),
    "max_position_embeddings": ("lm_max_position_embeddings", 8192),
    "tie_word_embeddings": ("lm_tie_weights", True),
}
_ENCODER = {
    "hidden_size": ("vit_hidden_dim", 768),
    "intermediate_size": ("vit_inter_dim", 3072),
    "num_hidden_layers": ("vit_n_blocks", 12),
    "num_attention_heads": ("vit_n_heads", 12),
    "image_size": ("vit_img_size", 512),
    "patch_size": ("vit_patch_size", 16),
    "scale_factor": ("mp_pixel_shuffle_factor", 4),
}


def _nested(config: Config) -> Config:
    """The config in the layout that transformers has for such models."""

    def renamed(table: Mapping[str, tuple[str, Any]]) -> Config:
        return {key: config.get(theirs, default) for key, (theirs, default) in table.items()}

    vision = {**renamed(_ENCODER), "vision_use_head": False}
    return {"text_config": renamed(_TEXT), "vision_config": vision, "scale_factor": vision["scale_factor"]}


NANOVLM = Composition(
    text="llama",
    encoder="siglip_vision_model",
    nested=_nested,
    text_where="config.json: the keys lm_*",
    tied_by_text=True,
    projector=shuffled,
)

_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|image|>",
    "global_image_token": "<|global_image|>",
}
TINY_NANOVLM = TinySpec(
    tokens=_TOKENS,
    special=tuple(f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9)),
    template=TemplateSpec(dialect=CHATML, image="<|image|>"),
    config={
        "model_type": "nanovlm",
        "max_img_size": 2048,
        "resize_to_max_side_len": False,
        "vit_img_size": 512,
        "vit_patch_size": 16,
        "vit_hidden_dim": 32,
        "vit_inter_dim": 64,
        "vit_n_heads": 2,
        "vit_n_blocks": 2,
        "mp_pixel_shuffle_factor": 4,
        "mp_image_token_length": 64,
        "lm_max_length": 4096,
        "lm_vocab_size": VocabularySize(),
        "lm_hidden_dim": WIDTH,
        "lm_inter_dim": 2 * WIDTH,
        "lm_n_heads": 4,
        "lm_n_kv_heads": 2,
        "lm_n_blocks": 2,
        **token_ids(_TOKENS, "bos", "eos", "pad", "image", "global_image"),
    },
)
