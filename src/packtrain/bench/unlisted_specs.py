"""What the small models of unlisted types need beyond the general rules, and why some types have none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packtrain.families.shape import Config
from packtrain.families.tiny import CHATML, Id, VocabularySize


@dataclass(frozen=True, kw_only=True, slots=True)
class UnlistedSpec:
    """What one type needs beyond the general rules; empty for most."""

    tokens: Mapping[str, str] = field(default_factory=dict)  # special tokens by the name that processors know them by
    special: tuple[str, ...] = ()  # further special tokens, without a name
    dialect: str = CHATML
    image: str = ""  # what the template writes for an image; empty: the image token
    config: Config = field(default_factory=dict)  # merged over the default config made small
    processor: Config = field(default_factory=dict)  # likewise, over the processor's parts and arguments


def _named(*names: str) -> dict[str, str]:
    """Tokens without a spelling of their own: boi_token -> <|boi|>."""
    return {f"{name}_token": f"<|{name}|>" for name in names}


_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_HALF_MROPE = {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
_LAYERED_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}


def _text(**values: Any) -> Config:
    return {"text_config": values}


# Around an image
_QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def _qwen(*, config: Config | None = None, processor: Config | None = None) -> UnlistedSpec:
    return UnlistedSpec(tokens=_QWEN, image=_QWEN_IMAGE, config=config or {}, processor=processor or {})


_QWEN3_VL = {
    "processor_class": "Qwen3VLProcessor",
    "image_processor": {"image_processor_type": "Qwen2VLImageProcessor"},
    "video_processor": {"video_processor_type": "Qwen3VLVideoProcessor"},
}
_DEEPSTACK = {"vision_config": {"deepstack_visual_indexes": [0, 1]}}
_QWEN3_5 = {
    "text_config": {
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {**_HALF_MROPE, "mrope_interleaved": True},
    },
    "vision_config": {"num_position_embeddings": 64},
}

_GLM = {
    "image_token": "<|image|>",
    "video_token": "<|video|>",
    "image_start_token": "<|begin_of_image|>",
    "image_end_token": "<|end_of_image|>",
    "video_start_token": "<|begin_of_video|>",
    "video_end_token": "<|end_of_video|>",
}
_GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"


def _glm(*, config: Config, processor: Config | None = None) -> UnlistedSpec:
    return UnlistedSpec(tokens=_GLM, image=_GLM_IMAGE, config=config, processor=processor or {})


def _glm_parts(family: str, processor: str = "") -> Config:
    return {
        "processor_class": f"{processor or family}Processor",
        "image_processor": {"image_processor_type": f"{family}ImageProcessor"},
        "video_processor": {"video_processor_type": f"{family}VideoProcessor"},
    }


_PIXTRAL = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_PINPOINTS = [[56, 112], [112, 56], [112, 112]]
_GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_MINICPM = _named("image_start", "image_end", "slice_start", "slice_end", "image_id_start", "image_id_end")

UNLISTED: Mapping[str, UnlistedSpec] = {
    "aria": UnlistedSpec(
        config={
            "vision_config": {"patch_size": 49, "image_size": 490},
            "projector_patch_to_query_dict": {"100": 16},
            "max_value_projector_patch_to_query_dict": 16,
            "text_config": {"moe_num_shared_experts": 1},
        },
        processor={"size_conversion": {"490": 16}, "image_processor": {"max_image_size": 490, "min_image_size": 49}},
    ),
    "aya_vision": UnlistedSpec(
        tokens={"image_patch_token": "<|IMG_PATCH|>"},
        special=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL"),
        config={"image_token_index": Id("<|IMG_PATCH|>")},
        processor={"img_size": 56, "downsample_factor": 2, "image_processor": {"crop_to_patches": True}},
    ),
    "chameleon": UnlistedSpec(
        tokens={"boi_token": "<racm3:break>", "eoi_token": "<eoss>"},
        special=tuple(f"IMGIMG{letter}Z" for letter in "ABCDEFGH"),
        config={
            "vocabulary_map": {
                name: Id(name) for name in ("<image>", *(f"IMGIMG{letter}Z" for letter in "ABCDEFGH"))
            },
            "vq_config": {"num_embeddings": 8, "resolution": 64, "latent_channels": 64},
        },
        processor={
            "image_seq_length": 16,
            "image_processor": {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}},
        },
    ),
    "cohere2_vision": UnlistedSpec(tokens=_named("boi", "eoi", "img_line_break")),
    "cohere_compass": UnlistedSpec(
        tokens={
            "image_token": "<|IMAGE_PAD|>",
            "video_token": "<|VIDEO_PAD|>",
            "vision_start_token": "<|VISION_START|>",
            "vision_end_token": "<|VISION_END|>",
        },
        image="<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
        config={**_DEEPSTACK, "text_config": {"rope_parameters": _LAYERED_ROPE}},
    ),
    "cosmos3_edge": _qwen(config=_text(rope_parameters=_MROPE)),
    "cosmos3_omni": _qwen(config={**_DEEPSTACK, **_text(rope_parameters=_MROPE)}, processor=_QWEN3_VL),
    "deepseek_ocr2": UnlistedSpec(config=_text(num_experts_per_tok=2)),
    "deepseek_vl_hybrid": UnlistedSpec(
        processor={"image_processor": {"high_res_size": {"height": 64, "width": 64}}},
    ),
    "emu3": UnlistedSpec(tokens=_named("boi", "eoi", "eof")),
    "ernie4_5_vl_moe": UnlistedSpec(
        tokens=_named("image_start", "image_end", "video_start", "video_end"),
        image="<|image_start|><image><|image_end|>",
    ),
    "exaone4_5": _qwen(),
    "fuyu": UnlistedSpec(special=("|SPEAKER|", "|NEWLINE|")),
    "gemma4": UnlistedSpec(
        tokens={**_GEMMA, "video_token": "<|video|>"},
        config={
            "vision_config": {"model_type": "gemma4_vision", "position_embedding_size": 64},
            "text_config": {"vocab_size_per_layer_input": VocabularySize(), "per_layer_config": {}},
        },
        processor={"image_processor": {"max_soft_tokens": 70}},
    ),
    "gemma4_unified": UnlistedSpec(
        tokens={**_GEMMA, "video_token": "<|video|>"},
        config={
            "vision_config": {"model_type": "gemma4_unified_vision"},
            "text_config": {"per_layer_config": {}},
        },
        processor={"image_processor": {"max_soft_tokens": 70}},
    ),
    "glm46v": _glm(config=_text(rope_parameters=_MROPE)),
    "glm4v": _glm(config=_text(rope_parameters=_MROPE)),
    "glm4v_moe": _glm(config=_text(rope_parameters=_HALF_MROPE, n_shared_experts=1), processor=_glm_parts("Glm4v")),
    "glm5_next": _glm(config=_text(qk_rope_head_dim=0, qk_head_dim=16, layer_types=["linear_attention", "indexed_attention"])),
    "glm_ocr": _glm(config=_text(rope_parameters=_MROPE), processor=_glm_parts("Glm46V")),
    "glmga": _glm(config=_text(rope_parameters=_MROPE), processor=_glm_parts("Glmga", "Glm46V")),
    "got_ocr2": UnlistedSpec(tokens={"image_token": "<imgpad>"}, special=("<img>", "</img>")),
    "granite4_vision": UnlistedSpec(
        config={
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[0, 0]],
            "spatial_target_layers": [0, 0, 1, 1],
            "image_grid_pinpoints": [[128, 256], [256, 128], [256, 256]],
        },
        processor={
            "downsample_rate": "1/2",
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
            "image_processor": {"image_grid_pinpoints": [[128, 256], [256, 128], [256, 256]]},
        },
    ),
    "hunyuan_vl": UnlistedSpec(
        tokens=_named("image_start", "image_end"),
        image="<|image_start|><image><|image_end|>",
        config={
            "im_start_id": Id("image_start_token"),
            "im_end_id": Id("image_end_token"),
            "im_newline_id": Id("<|image_newline|>"),
        },
        special=("<|image_newline|>",),
    ),
    "hyperclovax_vision_v2": UnlistedSpec(),
    "idefics2": UnlistedSpec(
        special=("<fake_token_around_image>", "<end_of_utterance>"),
        config={"perceiver_config": {"num_key_value_heads": 2}},
    ),
    "janus": UnlistedSpec(tokens=_named("boi", "eoi")),
    "kimi_k25": UnlistedSpec(
        processor={"image_processor": {"size": {"max_height": 112, "max_width": 112}}},
    ),
    "kosmos-2": UnlistedSpec(processor={"processor_class": "Kosmos2Processor"}),
    "kosmos-2.5": UnlistedSpec(processor={"processor_class": "Kosmos2_5Processor"}),
    "lfm2_vl": UnlistedSpec(
        config={"vision_config": {"num_patches": 16}},
        processor={
            "image_processor": {
                "tile_size": 64,
                "encoder_patch_size": 16,
                "min_image_tokens": 4,
                "max_image_tokens": 16,
                "max_num_patches": 64,
                "max_tiles": 4,
            }
        },
    ),
    "lighton_ocr": UnlistedSpec(tokens=_PIXTRAL),
    "llama4": UnlistedSpec(
        tokens={"image_token": "<|image|>"},
        special=("<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
        config={"image_token_index": Id("<|patch|>")},
    ),
    "llava_next_video": UnlistedSpec(
        config={"image_grid_pinpoints": _PINPOINTS},
        processor={"num_additional_image_tokens": 1, "image_processor": {"image_grid_pinpoints": _PINPOINTS}},
    ),
    "minicpm_ocr": UnlistedSpec(tokens=_MINICPM),
    "minicpmv4_6": UnlistedSpec(tokens=_MINICPM),
    "minicpmv4_7": UnlistedSpec(tokens=_MINICPM),
    "minimax_m3_vl": UnlistedSpec(
        tokens={"image_token": "]<]image[>[", "video_token": "]<]video[>["},
        special=("]<]start of image[>[", "]<]end of image[>["),
    ),
    "mistral3": UnlistedSpec(tokens=_PIXTRAL, processor={"spatial_merge_size": 2}),
    "mistral_large4": UnlistedSpec(tokens=_PIXTRAL),
    "mllama": UnlistedSpec(
        tokens={"image_token": "<|image|>"},
        special=("<|python_tag|>",),
        config={
            "vision_config": {
                "num_global_layers": 1,
                "intermediate_layers_indices": [0, 1],
                "attention_heads": 4,
                "vision_output_dim": 3 * 64,
            },
            "text_config": {"cross_attention_layers": [1]},
        },
    ),
    "molmo2": UnlistedSpec(
        special=tuple(
            f"<{name}>"
            for name in "im_patch im_col im_start low_res_im_start frame_start im_end frame_end im_low".split()
        ),
        config={
            "adapter_config": {"vision_feature_layer": [1, 0]},
            "image_patch_id": Id("<im_patch>"),
        },
    ),
    "muse_glimmer": UnlistedSpec(
        tokens={"image_token": "<|patch|>", "video_token": "<|video|>"},
        special=("<|image_start|>", "<|image_end|>", "<|vid_frame_separator|>", "<|vid_start|>", "<|vid_end|>"),
        config={"out_hidden_size": 4 * 64},
        processor={"image_processor": {"max_image_tokens": 16}},
    ),
    "ovis2": UnlistedSpec(
        special=tuple(f"<IMG_{name}>" for name in "ATOM START GRID COL ROW END".split()),
        config={
            "image_token_id": Id("<IMG_ATOM>"),
            "visual_indicator_token_ids": [Id(f"<IMG_{name}>") for name in "START GRID COL ROW END".split()],
            "vision_config": {"vocab_size": 256},
        },
    ),
    "paddleocr_vl": _qwen(config=_text(rope_parameters=_MROPE)),
    "paligemma": UnlistedSpec(),
    "pp_chart2table": UnlistedSpec(tokens={"image_token": "<imgpad>"}, special=("<img>", "</img>")),
    "qianfan_ocr": UnlistedSpec(
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        },
        config={"image_token_id": Id("<IMG_CONTEXT>")},
        processor={"image_seq_length": 4},
    ),
    "qwen2_5_omni_thinker": _qwen(config=_text(rope_parameters=_MROPE)),
    "qwen3_5": _qwen(config=_QWEN3_5),
    "qwen3_5_moe": _qwen(config=_QWEN3_5),
    "qwen3_vl_moe": _qwen(
        config={**_DEEPSTACK, **_text(rope_parameters={**_MROPE, "mrope_interleaved": True})}, processor=_QWEN3_VL
    ),
    "qwen4_exp": _qwen(config=_QWEN3_5),
    "shieldgemma2": UnlistedSpec(),
    "step3p7": UnlistedSpec(
        tokens={"image_token": "<im_patch>"},
        special=("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
        config=_text(sliding_window=64),
    ),
    "unlimited_ocr": UnlistedSpec(),
    "vipllava": UnlistedSpec(
        config={"vision_feature_layers": [-1, -2]},
        processor={"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "video_llama_3": _qwen(),
}
_NO_TEMPLATE = "its processor takes no chat template"
_TIMM = "its vision encoder needs the package timm"
_ENCODER_DECODER = "an encoder-decoder: its answer is no continuation of the row that the image stands in"
IMPOSSIBLE: Mapping[str, str] = {
    "blip": _NO_TEMPLATE,
    "blip-2": _NO_TEMPLATE,
    "git": _NO_TEMPLATE,
    "idefics": _NO_TEMPLATE,
    "instructblip": _NO_TEMPLATE,
    "instructblipvideo": _NO_TEMPLATE,
    "florence2": _ENCODER_DECODER,
    "pix2struct": _ENCODER_DECODER,
    "pp_formulanet": _ENCODER_DECODER,
    "t5gemma2": _ENCODER_DECODER,
    "udop": _ENCODER_DECODER,
    "vision-encoder-decoder": _ENCODER_DECODER,
    "fast_vlm": _TIMM,
    "gemma3n": _TIMM,
    "perception_lm": _TIMM,
    "inkling_mm_model": "its model needs the package scipy",
    "diffusion_gemma": "it predicts blocks by diffusion, not the next token",
    "evolla": "it reads proteins, not images",
    "mistral4": "it has no vision encoder and no processor",
    "pi0": "it predicts a robot's actions, not text",
}
