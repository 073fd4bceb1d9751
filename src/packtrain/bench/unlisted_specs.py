"""What the small models of unlisted types need beyond the general rules, and why some types have none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from packtrain.families.shape import Config
from packtrain.families.tiny import Id, VocabularySize


@dataclass(frozen=True, kw_only=True, slots=True)
class UnlistedSpec:
    """What one type needs beyond the general rules; empty for most."""

    tokens: Mapping[str, str] = field(default_factory=dict)  # special tokens by the name that processors know them by
    special: tuple[str, ...] = ()  # further special tokens, without a name
    image: str = ""  # what the template writes for an image; empty: the image token
    config: Config = field(default_factory=dict)  # merged over the default config made small
    tokenizer: Config = field(default_factory=dict)  # merged over tokenizer_config.json
    processor: Config = field(default_factory=dict)  # likewise, over the processor's parts and arguments


def spelled(*names: str) -> dict[str, str]:
    """Tokens without a spelling of their own: boi_token -> <|boi|>."""
    return {name: f"<|{name.removesuffix('_token')}|>" for name in names}


def _named(*names: str) -> dict[str, str]:
    return spelled(*(f"{name}_token" for name in names))


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


def _qwen3_5(**text: Any) -> UnlistedSpec:
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    rope = {**_HALF_MROPE, "mrope_interleaved": True}
    vision = {"num_position_embeddings": 64}
    return _qwen(config={"text_config": {**layers, "rope_parameters": rope, **text}, "vision_config": vision})


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


_OMNI = {**_QWEN, **_named("audio", "vision_bos", "vision_eos", "audio_bos", "audio_eos", "audio_start", "audio_end")}
_OMNI_2_5 = UnlistedSpec(
    tokens=_OMNI,
    image="<|vision_bos|><|image_pad|><|vision_eos|>",
    config={
        "vision_start_token_id": Id("vision_bos_token"),
        "vision_end_token_id": Id("vision_eos_token"),
        "text_config": {"rope_parameters": _MROPE},
    },
    processor={
        "processor_class": "Qwen2_5OmniProcessor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor"},
        "feature_extractor": {"feature_extractor_type": "WhisperFeatureExtractor"},
    },
)
_PIXTRAL = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
_PINPOINTS = [[56, 112], [112, 56], [112, 112]]
_VISUAL = tuple(f"<|visual token {number:06d}|>" for number in range(16))
_GEMMA = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
_MINICPM_SLICES = {"scale_resolution": 64, "max_slice_nums": 4, "patch_size": 16}
_MINICPM = _named("image_start", "image_end", "slice_start", "slice_end", "image_id_start", "image_id_end")

_MUSE = UnlistedSpec(
    tokens={"image_token": "<|patch|>", "video_token": "<|video|>"},
    special=("<|image_start|>", "<|image_end|>", "<|vid_frame_separator|>", "<|vid_start|>", "<|vid_end|>"),
    config={"out_hidden_size": 4 * 64},
    processor={"image_processor": {"max_image_tokens": 16}},
)

UNLISTED: Mapping[str, UnlistedSpec] = {
    "aria": UnlistedSpec(
        config={
            "vision_config": {"patch_size": 98, "image_size": 980},
            "projector_patch_to_query_dict": {"100": 16},
            "max_value_projector_patch_to_query_dict": 16,
            "text_config": {"moe_num_shared_experts": 1},
        },
        processor={"size_conversion": {"980": 16}},
    ),
    "aya_vision": UnlistedSpec(
        tokens={"image_patch_token": "<|IMG_PATCH|>"},
        special=("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL"),
        config={"image_token_index": Id("<|IMG_PATCH|>")},
        processor={"img_size": 56, "downsample_factor": 2, "image_processor": {"crop_to_patches": True}},
    ),
    "cohere2_vision": UnlistedSpec(
        tokens=_named("boi", "eoi", "img_line_break"),
        processor={"image_processor": {"patch_size": 2}},  # tokens along each side of a tile
    ),
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
    "cosmos3_edge": UnlistedSpec(
        tokens=_QWEN,
        image=_QWEN_IMAGE,
        config=_text(rope_parameters=_MROPE),
        tokenizer={"return_mm_token_type_ids": True},
    ),
    "cosmos3_omni": _qwen(config={**_DEEPSTACK, **_text(rope_parameters=_MROPE)}, processor=_QWEN3_VL),
    "deepseek_ocr2": UnlistedSpec(
        config={
            "text_config": {"num_experts_per_tok": 2, "mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 1},
            "vision_config": {
                "sam_config": {
                    "patch_size": 4,
                    "image_size": 256,
                    "global_attn_indexes": [],
                    "downsample_channels": [64, 64],
                }
            },
        },
        processor={
            "patch_size": 4,
            "image_processor": {
                "crop_to_patches": False,
                "size": {"height": 256, "width": 256},
                "tile_size": 192,
            },
        },
    ),
    "deepseek_vl": UnlistedSpec(),
    "deepseek_vl_hybrid": UnlistedSpec(
        config={"high_res_vision_config": {"global_attn_indexes": [1]}},
        processor={"image_processor": {"high_res_size": {"height": 64, "width": 64}}},
    ),
    "emu3": UnlistedSpec(
        tokens={**_named("boi", "eoi", "eof"), "image_wrapper_token": "<|image token|>"},
        special=("<|extra_200|>", *_VISUAL),
        config={
            "vocabulary_map": {name: Id(name) for name in ("<image>", "<|extra_200|>", *_VISUAL)},
            "vq_config": {"codebook_size": len(_VISUAL), "hidden_size": 32, "channel_multiplier": [1, 1, 1, 1]},
        },
        processor={
            "image_processor": {
                "min_pixels": 32 * 32,
                "max_pixels": 48 * 48,
                "size": {"min_pixels": 32 * 32, "max_pixels": 48 * 48},
            }
        },
    ),
    "ernie4_5_vl_moe": UnlistedSpec(
        tokens=_named("image_start", "image_end", "video_start", "video_end"),
        image="<|image_start|><image><|image_end|>",
        config={
            "text_config": {
                "rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]},
                "moe_intermediate_size": [32, 32],
                "mlp_layer_types": ["dense", "sparse"],
                "moe_num_shared_experts": 1,
            }
        },
        processor={"video_processor": {"draw_on_frames": False}},
    ),
    "exaone4_5": _qwen(),
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
            "vision_config": {
                "model_type": "gemma4_unified_vision",
                "mm_embed_dim": 64,
                "mm_posemb_size": 64,
                "output_proj_dims": 64,
            },
            "text_config": {"per_layer_config": {}},
        },
        processor={"image_processor": {"max_soft_tokens": 70}},
    ),
    "glm46v": _glm(config=_text(rope_parameters=_MROPE)),
    "glm4v": _glm(config=_text(rope_parameters=_MROPE)),
    "glm4v_moe": _glm(config=_text(rope_parameters=_HALF_MROPE, n_shared_experts=1), processor=_glm_parts("Glm4v")),
    "glm5_next": _glm(
        config=_text(qk_rope_head_dim=0, qk_head_dim=16, layer_types=["linear_attention", "indexed_attention"])
    ),
    "glm_ocr": _glm(config=_text(rope_parameters=_MROPE), processor=_glm_parts("Glm46V")),
    "glmga": _glm(config=_text(rope_parameters=_MROPE), processor=_glm_parts("Glmga", "Glm46V")),
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
            "text_config": {"head_dim": 16, "rope_parameters": {**_MROPE, "mrope_section": [2, 2, 2, 2]}},
        },
        special=("<|image_newline|>",),
    ),
    "hyperclovax_vision_v2": UnlistedSpec(),
    "idefics2": UnlistedSpec(
        tokens={"image_boundary_token": "<fake_token_around_image>"},
        special=("<end_of_utterance>",),
        config={"perceiver_config": {"num_key_value_heads": 2}},
        processor={"image_processor": {"size": {"shortest_edge": 64, "longest_edge": 128}}},
    ),
    "janus": UnlistedSpec(
        tokens=_named("boi", "eoi"), config={"vq_config": {"channel_multiplier": [1, 1], "latent_channels": 32}}
    ),
    "kimi_k25": UnlistedSpec(
        processor={"image_processor": {"size": {"max_height": 112, "max_width": 112}, "max_patches": 64}},
    ),
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
        config={"image_token_index": Id("<|patch|>"), "vision_config": {"intermediate_size": 4 * 64}},
    ),
    "llava_next_video": UnlistedSpec(
        config={"image_grid_pinpoints": _PINPOINTS},
        processor={"num_additional_image_tokens": 1, "image_processor": {"image_grid_pinpoints": _PINPOINTS}},
    ),
    "minicpm_ocr": UnlistedSpec(tokens=_MINICPM, processor={"image_processor": _MINICPM_SLICES}),
    "minicpmv4_6": UnlistedSpec(tokens=_MINICPM, processor={"image_processor": _MINICPM_SLICES}),
    "minicpmv4_7": UnlistedSpec(tokens=_MINICPM, processor={"image_processor": _MINICPM_SLICES}),
    "minimax_m3_vl": UnlistedSpec(
        tokens={"image_token": "]<]image[>[", "video_token": "]<]video[>["},
        special=("]<]start of image[>[", "]<]end of image[>["),
    ),
    "mistral3": UnlistedSpec(tokens=_PIXTRAL),
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
        special=(
            *("<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>"),
            *("<frame_start>", "<im_end>", "<frame_end>", "<im_low>"),
        ),
        config={
            "adapter_config": {"vision_feature_layer": [1, 0]},
            "vision_config": {"num_position_embeddings": 16},
            "image_patch_id": Id("<im_patch>"),
        },
        processor={"image_processor": {"max_crops": 4, "overlap_margins": [1, 1]}},
    ),
    "muse_glimmer": _MUSE,
    "ovis2": UnlistedSpec(
        special=tuple(f"<IMG_{name}>" for name in ["ATOM", "START", "GRID", "COL", "ROW", "END"]),
        config={
            "image_token_id": Id("<IMG_ATOM>"),
            "visual_indicator_token_ids": [Id(f"<IMG_{name}>") for name in ["START", "GRID", "COL", "ROW", "END"]],
            "vision_config": {"vocab_size": 256},
        },
    ),
    "paddleocr_vl": _qwen(config=_text(rope_parameters=_MROPE)),
    "paligemma": UnlistedSpec(processor={"image_processor": {"image_seq_length": 16}}),
    "pp_chart2table": UnlistedSpec(
        tokens={"image_token": "<imgpad>"},
        special=("<img>", "</img>"),
        image="<img>" + 16 * "<imgpad>" + "</img>",  # its processor leaves the tokens to the template
        config={"vision_config": {"image_size": 256, "global_attn_indexes": [1]}},
    ),
    "qianfan_ocr": UnlistedSpec(
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        },
        config={"image_token_id": Id("<IMG_CONTEXT>")},
        processor={"image_seq_length": 4},
    ),
    "qwen2_5_omni_thinker": _OMNI_2_5,
    "qwen3_5": _qwen3_5(),
    "qwen3_5_moe": _qwen3_5(),
    "qwen3_vl_moe": _qwen(
        config={**_DEEPSTACK, **_text(rope_parameters={**_MROPE, "mrope_interleaved": True})}, processor=_QWEN3_VL
    ),
    "qwen4_exp": _qwen3_5(
        indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=64, indexer_compress_ratio=4
    ),
    "step3p7": UnlistedSpec(
        tokens={"image_token": "<im_patch>"},
        special=("<im_start>", "<im_end>", "<patch_start>", "<patch_end>", "<patch_newline>"),
        config={"text_config": {"sliding_window": 64}, "vision_config": {"image_size": 112}},
        processor={"image_processor": {"patch_size": 112, "max_image_size": 224}},
    ),
    "unlimited_ocr": UnlistedSpec(
        config={
            "vision_config": {
                "sam_config": {"global_attn_indexes": [1], "downsample_channels": [64, 64]},
                "encoder_config": {"image_size": 56},
            }
        },
        processor={
            "patch_size": 16,
            "image_processor": {"size": {"height": 128, "width": 128}, "tile_size": 64, "max_patches": 4},
        },
    ),
    "vipllava": UnlistedSpec(
        config={"vision_feature_layers": [-1, -2]},
        processor={"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    ),
    "video_llama_3": _qwen(),
    "muse_spark": replace(
        _MUSE,
        config={
            **_MUSE.config,
            "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [16] * 4, "depths": [1] * 4},
        },
    ),
    "qwen3_omni_moe_thinker": replace(
        _OMNI_2_5,
        config={
            **_OMNI_2_5.config,
            **_DEEPSTACK,
            "text_config": {"rope_parameters": {**_MROPE, "mrope_interleaved": True}},
        },
        processor={**_OMNI_2_5.processor, "processor_class": "Qwen3OmniMoeProcessor"},
    ),
    "video_llava": UnlistedSpec(
        processor={
            "image_processor": {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
            "video_processor": {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}},
        }
    ),
}
_NO_TEMPLATE = "its processor takes no chat template"
_TIMM = "its vision encoder needs the package timm"
_ENCODER_DECODER = "an encoder-decoder: its answer is no continuation of the row that the image stands in"
IMPOSSIBLE: Mapping[str, str] = {
    "blip": _NO_TEMPLATE,
    "blip-2": _NO_TEMPLATE,
    "chameleon": _NO_TEMPLATE,
    "fuyu": _NO_TEMPLATE,
    "kosmos-2": _NO_TEMPLATE,
    "kosmos-2.5": _NO_TEMPLATE,
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
    "nemotron_h_omni": "its processor needs the package librosa, for sound",
    "got_ocr2": "its processor refuses the images of a chat unless called with multi_page=True",
    "diffusion_gemma": "it predicts blocks by diffusion, not the next token",
    "evolla": "it reads proteins, not images",
    "mistral4": "it has no vision encoder and no processor",
    "shieldgemma2": "its processor writes prompts of its own, one for each policy and image",
    "pi0": "it predicts a robot's actions, not text",
}
# Their processors refuse a chat without an image.
NEEDS_IMAGES = ("paligemma", "pp_chart2table")
