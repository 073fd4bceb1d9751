"""Small random models of the image-text-to-text types that transformers knows and packtrain does not list.

The default config of a type is made small by rules on the names of its keys, its processor is put together from the
parts that it declares; what a type needs beyond that is data in `unlisted_specs`.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packtrain.bench.unlisted_specs import IMPOSSIBLE, UNLISTED, UnlistedSpec, spelled
from packtrain.families.registry import all_families
from packtrain.families.shape import Config
from packtrain.families.tiny import (
    CHATML,
    Id,
    TemplateSpec,
    VocabularySize,
    build_tokenizer,
    chat_template,
    tokenizer_json,
)

LISTED = tuple(name for name, family in all_families().items() if family.contract and family.contract.media)
WIDTH = 64
_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "<|im_end|>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "image_token": "<image>",
    "video_token": "<video>",
}
_PATCHES = 4  # along each side of an image
_SIZES: Mapping[int, tuple[str, ...]] = {
    WIDTH: (
        *("hidden_size", "d_model", "embed_dim", "projection_dim", "out_hidden_size", "encoder_hidden_size"),
        *("text_hidden_size", "vision_output_dim", "projector_input_dim", "projector_output_dim", "output_channels"),
        *("projector_hidden_size", "projection_hidden_size", "alignment_intermediate_size", "word_embed_proj_dim"),
        *("image_text_hidden_size", "decoder_hidden_size", "moe_hidden_size", "patch_embed_hidden_size"),
        *("image_token_embed_dim", "vision_hidden_size", "projection_intermediate_size", "hidden_size_per_layer_input"),
    ),
    2 * WIDTH: (
        *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim", "intermediate_size_mlp"),
        *("dense_intermediate_size", "d_ff"),
    ),
    32: (
        *("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"),
        *("kv_lora_rank", "q_lora_rank", "base_channels", "downsample_hidden_size"),
    ),
    16: (
        *("head_dim", "linear_key_head_dim", "linear_value_head_dim", "v_head_dim", "qk_nope_head_dim", "d_kv"),
        *("qk_rope_head_dim", "resampler_dim_head", "resampler_head_dim", "linear_head_dim", "index_head_dim"),
        *("swa_head_dim", "resampler_n_latents", "num_embeddings"),
    ),
    4: (
        *("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads", "attention_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "linear_num_value_heads"),
        *("resampler_n_heads", "resampler_heads", "swa_num_attention_heads", "num_sliding_attention_heads"),
        *("linear_num_heads", "index_n_heads"),
    ),
    2: (
        *("num_hidden_layers", "depth", "num_layers", "encoder_layers", "decoder_layers", "layers", "n_layers"),
        *("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "linear_num_key_heads", "resampler_depth"),
        *("swa_num_key_value_heads", "num_res_blocks", "num_decoder_layers"),
    ),
    1: ("n_group", "topk_group", "first_k_dense_replace", "cross_attention_frequency"),
}
_SMALL: Mapping[str, Any] = {
    **{name: size for size, names in _SIZES.items() for name in names},
    # Weights five times as large as usual, see families/tiny.py.
    "initializer_range": 0.1,
    "init_std": 0.1,
    "max_position_embeddings": 4096,
    "pretraining_tp": 1,
}
_GEOMETRY = (
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
    "downsample_factor",
    "vision_feature_select_strategy",
)
_TOKEN_ID = re.compile(r"(\w+_token)_(?:id|index)")
_PARTS = ("image_processor", "video_processor", "feature_extractor")


class CannotBuild(Exception):
    """There is no small model of this type; says why in one sentence."""


@functools.cache
def unlisted_types() -> tuple[str, ...]:
    """The image-text-to-text types of the installed transformers that packtrain does not list."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return tuple(name for name in NAMES if name not in LISTED)


def write_unlisted(model_type: str, folder: Path) -> Path:
    """Write the model folder of one type; raises CannotBuild for the types that have none."""
    if model_type in IMPOSSIBLE:
        raise CannotBuild(IMPOSSIBLE[model_type])
    if model_type not in unlisted_types():
        raise CannotBuild(f"{model_type!r} is no image-text-to-text type that packtrain leaves unlisted")
    spec = UNLISTED.get(model_type, UnlistedSpec())
    config = _merged(_small_config(model_type, spec), spec.config)
    tokens = {**spelled(*_named(config)), **_TOKENS, **spec.tokens}
    tokenizer = build_tokenizer(tuple(dict.fromkeys(("<|im_start|>", *tokens.values(), *spec.special))), (), bos=None)
    processor = _merged(_small_processor(model_type, spec, config), spec.processor)
    texts = {
        "config.json": _json(_filled({**config, "dtype": "float32"}, tokens, tokenizer)),
        "tokenizer.json": tokenizer_json(tokenizer),
        "tokenizer_config.json": _json(_tokenizer_config(tokens, spec, processor)),
        "processor_config.json": _json(processor),
        "chat_template.jinja": chat_template(
            TemplateSpec(dialect=CHATML, image=spec.image or tokens["image_token"], bos=False)
        ),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def _small_config(model_type: str, spec: UnlistedSpec) -> Config:
    from transformers import CONFIG_MAPPING

    parts = {
        key: {"model_type": value["model_type"]}
        for key, value in spec.config.items()
        if isinstance(value, Mapping) and "model_type" in value
    }
    return _made_small(CONFIG_MAPPING[model_type](**parts).to_dict())


def _made_small(default: Config) -> Config:
    """The keys of a config that must be small or name a token; the others follow from them or stay as they are."""
    small: dict[str, Any] = {"model_type": default["model_type"]} if "model_type" in default else {}
    for key, value in default.items():
        if isinstance(value, Mapping):
            small |= {key: _made_small(value)} if "model_type" in value else {}
        elif match := _TOKEN_ID.fullmatch(key):
            small[key] = Id(match[1])
        elif value is None:
            pass
        elif key == "vocab_size":
            small |= {key: VocabularySize()} if value > 1000 else {}
        elif key == "num_key_value_heads":
            small[key] = 2 if value < default.get("num_attention_heads", value) else 4
        elif key == "image_size":
            small[key] = _like(value, _PATCHES * _first(default.get("patch_size", 14)))
        elif key in _GEOMETRY:
            small[key] = value
        elif key in _SMALL:
            small[key] = _like(value, _SMALL[key])
    return small


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def _like(default: Any, value: Any) -> Any:
    """One value, or as many as the default has."""
    return [value] * len(default) if isinstance(default, list | tuple) else value


def _merged(base: Config, more: Config) -> Config:
    """Nested dicts are merged, anything else is replaced."""
    merged = dict(base)
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            merged[key] = _merged(base[key], value)
        else:
            merged[key] = value
    return merged


def _named(config: Any) -> Iterator[str]:
    """The names of the tokens whose ids a config has."""
    if isinstance(config, Id) and config.token.endswith("_token"):
        yield config.token
    elif isinstance(config, Mapping | list):
        for value in config.values() if isinstance(config, Mapping) else config:
            yield from _named(value)


def _filled(value: Any, tokens: Mapping[str, str], tokenizer: Any) -> Any:
    """A config with its stand-ins replaced by what the tokenizer says."""
    if isinstance(value, Id):
        return tokenizer.token_to_id(tokens.get(value.token, value.token))
    if isinstance(value, VocabularySize):
        return tokenizer.get_vocab_size()
    if isinstance(value, Mapping):
        return {key: _filled(inner, tokens, tokenizer) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, tokens, tokenizer) for inner in value]
    return value


def _tokenizer_config(tokens: Mapping[str, str], spec: UnlistedSpec, processor: Config) -> Config:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        **tokens,
        "extra_special_tokens": ["<|im_start|>", *spec.special],
        "processor_class": processor["processor_class"],
        **spec.tokenizer,
    }


def _small_processor(model_type: str, spec: UnlistedSpec, config: Config) -> Config:
    """The processor class of a type with all its parts, as it is written to processor_config.json."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = spec.processor.get("processor_class") or PROCESSOR_MAPPING_NAMES.get(model_type)
    if name is None:
        raise CannotBuild("transformers has no processor for it")
    vision = config.get("vision_config") or config
    arguments = inspect.signature(getattr(transformers, name).__init__).parameters
    processor: dict[str, Any] = {"processor_class": name}
    if "patch_size" in arguments:
        processor["patch_size"] = _first(vision.get("patch_size"))
    shared = ("spatial_merge_size", "vision_feature_select_strategy")
    processor |= {name: config[name] for name in shared if name in arguments and name in config}
    patches = (_first(vision.get("image_size", 56)) // _first(vision.get("patch_size", 14))) ** 2
    processor |= {
        name: patches for name in ("image_seq_length", "image_seq_len", "num_image_tokens") if name in arguments
    }
    for part in _PARTS:
        if part in arguments and (part_class := _part_class(model_type, part, spec)):
            processor[part] = _part(part, part_class, vision)
        elif part in arguments and arguments[part].default is inspect.Parameter.empty:
            raise CannotBuild(f"transformers does not say which {part.replace('_', ' ')} it has")
    return processor


def _part_class(model_type: str, part: str, spec: UnlistedSpec) -> str:
    """The class of a part of the processor; empty where transformers does not say."""
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

    tables = {
        "image_processor": IMAGE_PROCESSOR_MAPPING_NAMES,
        "video_processor": VIDEO_PROCESSOR_MAPPING_NAMES,
        "feature_extractor": FEATURE_EXTRACTOR_MAPPING_NAMES,
    }
    found = spec.processor.get(part, {}).get(f"{part}_type") or tables[part].get(model_type) or ""
    return str((found.get("torchvision") or found["pil"]) if isinstance(found, Mapping) else found)


def _part(part: str, name: str, vision: Config) -> Config:
    """An image or video processor with its sizes made small, or a feature extractor as it is."""
    import transformers

    if part == "feature_extractor":
        return {f"{part}_type": name}
    kind = getattr(transformers, name)
    patch = _first(vision.get("patch_size", 14))
    side = _first(vision.get("image_size", _PATCHES * patch))
    by_sides = isinstance(getattr(kind, "patch_size", None), Mapping)
    values = {
        "patch_size": {"height": patch, "width": patch} if by_sides else patch,
        "merge_size": vision.get("spatial_merge_size"),
        "temporal_patch_size": vision.get("temporal_patch_size"),
        "crop_size": {"height": side, "width": side},
        "size": _size(getattr(kind, "size", None) or {}, side, patch * vision.get("spatial_merge_size", 2)),
        "tile_size": side,
        "max_patches": 4,
    }
    small = {key: value for key, value in values.items() if getattr(kind, key, None) is not None and value}
    return {f"{part}_type": name, **small}


def _size(default: Config, side: int, unit: int) -> Config:
    """The size to resize to, in the terms of the default: sides of an image or numbers of pixels."""
    if set(default) == {"shortest_edge", "longest_edge"} and max(default.values()) > 4096:
        return {"shortest_edge": 4 * unit**2, "longest_edge": 16 * unit**2}
    longest = {"longest_edge": 2 * side, "max_height": side, "max_width": side}
    return {key: longest.get(key, side) for key in default}


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
