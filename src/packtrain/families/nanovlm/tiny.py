"""The tiny nanoVLM."""

from __future__ import annotations

from packtrain.families.tiny.parts import WIDTH, TinySpec, VocabularySize, token_ids
from packtrain.families.tiny.templates import CHATML, TemplateSpec

_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|image|>",
    "global_image_token": "<|global_image|>",
}
NANOVLM = TinySpec(
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
