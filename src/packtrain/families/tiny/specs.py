"""The tiny models as data: special tokens, template, processor settings and model config of each family.

Vision geometry (patch, tile, merge, token counts) is that of real checkpoints, so that costs are realistic; only depth
and width are small. Gemma3 is the exception: it sees 224 x 224 instead of 896 x 896 pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packtrain.families.tiny.parts import (
    CLIP_PIXELS,
    HALF_PIXELS,
    IMAGENET_PIXELS,
    QWEN_TOKENS,
    THINK,
    VISION,
    WEIGHTS,
    WIDTH,
    Id,
    TinySpec,
    VocabularySize,
    text_config,
    token_ids,
)
from packtrain.families.tiny.specs_qwen import QWEN
from packtrain.families.tiny.templates import TemplateSpec

# --- Idefics3 and SmolVLM: tiles with row and column markers, utterances ---------------------------------------------
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
        template=TemplateSpec(dialect="utterances", image="<image>", video="<video>"),
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


_UTTERANCES: dict[str, TinySpec] = {
    "idefics3": _utterances(
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
    ),
    "smolvlm": _utterances(
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
    ),
}

# --- LLaVA, LLaVA-NeXT, OneVision, InternVL: <image> in front of the text, encoders of fixed size ---------------------
_LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_LLAVA_TOKENS = {**_LLAMA_TOKENS, "image_token": "<image>"}
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
_INTERNVL_TOKENS = {
    **QWEN_TOKENS,
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_SQUARE_384 = {"size": {"height": 384, "width": 384}, "resample": 3}
_SQUARE_448 = {"size": {"height": 448, "width": 448}, "resample": 3}
_FIXED_ENCODERS: dict[str, TinySpec] = {
    "llava": TinySpec(
        tokens=_LLAVA_TOKENS,
        adds_bos=True,
        template=TemplateSpec(dialect="user_assistant", image="<image>\n", media_first=True),
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
    ),
    "llava_next": TinySpec(
        tokens=_LLAVA_TOKENS,
        adds_bos=True,
        template=TemplateSpec(dialect="instructions", image="<image>\n", media_first=True, bos=False),
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
    ),
    "llava_onevision": TinySpec(
        tokens=_ONEVISION_TOKENS,
        special=("<|im_start|>",),
        template=TemplateSpec(dialect="chatml", image="<image>\n", video="<video>\n", media_first=True, gap=" "),
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
    ),
    "internvl": TinySpec(
        tokens=_INTERNVL_TOKENS,
        special=("<|im_start|>",),
        template=TemplateSpec(dialect="chatml", image="<IMG_CONTEXT>\n", video="<video>\n"),
        config={
            "model_type": "internvl",
            "image_token_id": Id("<IMG_CONTEXT>"),
            "image_seq_length": 256,
            "downsample_ratio": 0.5,
            "vision_feature_layer": -1,
            "tie_word_embeddings": False,
            "text_config": text_config("qwen2", _INTERNVL_TOKENS),
            "vision_config": {
                "model_type": "internvl_vision",
                **VISION,
                "image_size": [448, 448],
                "patch_size": [14, 14],
            },
        },
        processor={
            "processor_class": "InternVLProcessor",
            "image_seq_length": 256,
            "image_processor": {
                "image_processor_type": "GotOcr2ImageProcessor",
                "crop_to_patches": True,
                "min_patches": 1,
                "max_patches": 12,
                **_SQUARE_448,
                **IMAGENET_PIXELS,
            },
            "video_processor": {"video_processor_type": "InternVLVideoProcessor", **_SQUARE_448, **IMAGENET_PIXELS},
        },
    ),
}

# --- Gemma3: a fixed number of tokens per image, sliding windows ------------------------------------------------------
_GEMMA_TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
_GEMMA_VISION_TOKENS = {
    **_GEMMA_TOKENS,
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
_GEMMA_LAYERS = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 512,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "tie_word_embeddings": True,
}
_GEMMA_IMAGE_TOKENS = 64
_GEMMA: dict[str, TinySpec] = {
    "gemma3": TinySpec(
        tokens=_GEMMA_VISION_TOKENS,
        special=_GEMMA_TURNS,
        adds_bos=True,
        template=TemplateSpec(dialect="turns", image="<start_of_image>"),
        config={
            "model_type": "gemma3",
            "boi_token_index": Id("<start_of_image>"),
            "eoi_token_index": Id("<end_of_image>"),
            "image_token_index": Id("<image_soft_token>"),
            "mm_tokens_per_image": _GEMMA_IMAGE_TOKENS,
            **WEIGHTS,
            **token_ids(_GEMMA_TOKENS, "bos", "eos", "pad"),
            "text_config": text_config("gemma3_text", _GEMMA_TOKENS, **_GEMMA_LAYERS),
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
            "image_seq_length": _GEMMA_IMAGE_TOKENS,
            "image_processor": {
                "image_processor_type": "Gemma3ImageProcessor",
                "size": {"height": 224, "width": 224},
                "resample": 2,
                **HALF_PIXELS,
            },
        },
    ),
    "gemma3_text": TinySpec(
        tokens=_GEMMA_TOKENS,
        special=_GEMMA_TURNS,
        adds_bos=True,
        template=TemplateSpec(dialect="turns"),
        config=text_config("gemma3_text", _GEMMA_TOKENS, **_GEMMA_LAYERS),
    ),
}

# --- Text only, and nanoVLM ------------------------------------------------------------------------------------------
_LLAMA3_TOKENS = {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>"}
_NANO_TOKENS = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "image_token": "<|image|>",
    "global_image_token": "<|global_image|>",
}
_OTHERS: dict[str, TinySpec] = {
    "llama": TinySpec(
        tokens=_LLAMA3_TOKENS,
        special=("<|start_header_id|>", "<|end_header_id|>"),
        adds_bos=True,
        template=TemplateSpec(dialect="headers"),
        config=text_config("llama", _LLAMA3_TOKENS),
    ),
    "mistral": TinySpec(
        tokens=_LLAMA_TOKENS,
        special=("[INST]", "[/INST]"),
        adds_bos=True,
        template=TemplateSpec(dialect="instructions"),
        config=text_config("mistral", _LLAMA_TOKENS, sliding_window=None),
    ),
    "smollm3": TinySpec(
        tokens=QWEN_TOKENS,
        special=("<|im_start|>",),
        added=THINK,
        template=TemplateSpec(dialect="chatml", system="You are a small and careful assistant."),
        config=text_config("smollm3", QWEN_TOKENS),
    ),
    "nanovlm": TinySpec(
        tokens=_NANO_TOKENS,
        special=tuple(f"<row_{row}_col_{column}>" for row in range(1, 9) for column in range(1, 9)),
        template=TemplateSpec(dialect="chatml", image="<|image|>"),
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
            **token_ids(_NANO_TOKENS, "bos", "eos", "pad", "image", "global_image"),
        },
    ),
}

TINY: Mapping[str, TinySpec] = {**QWEN, **_UTTERANCES, **_FIXED_ENCODERS, **_GEMMA, **_OTHERS}
