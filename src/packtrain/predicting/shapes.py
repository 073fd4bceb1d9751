"""A model's config.json becomes a ModelShape: sizes, and exact parameter counts by part.

Counts come from the headers of the safetensors files where they lie beside the config, else from the config alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from packtrain.core.errors import ConfigError, nearest
from packtrain.families.settings import read_settings
from packtrain.predicting.decoders import GENERIC_TEXT, TEXT_KINDS, read_language
from packtrain.predicting.parameters import LanguageParts, Projector, language_layers
from packtrain.predicting.parameters import encoder as encoder_parameters
from packtrain.predicting.sizes import Values
from packtrain.predicting.values import LanguageShape, ModelShape, ParameterCounts, VisionShape
from packtrain.predicting.vision_encoders import VISION_ENCODERS, VisionEncoder, read_vision_encoder
from packtrain.predicting.weights import count_weights

_CLIP_L = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
_SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "patch_size": 14,
    "vision_use_head": False,
}
_GEMMA_2B = {
    "hidden_size": 2048,
    "num_hidden_layers": 18,
    "intermediate_size": 16384,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "vocab_size": 257152,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Family:
    """How one multimodal model type is put together."""

    text: str  # the decoder, where the config does not name one
    encoder: str
    fixed: bool = False  # decoder and encoder are always these, whatever their configs call themselves
    text_absent: Mapping[str, Any] | None = None  # what stands for a text_config that is not there
    encoder_absent: Mapping[str, Any] | None = None
    flat_text: bool = False  # older configs have the decoder's keys at the top
    tied: bool = False  # the default
    tied_by_text: bool = False  # the decoder's config may say it too
    projector: Callable[[Mapping[str, Any], VisionEncoder, int], tuple[Projector, int]]  # and patches per token


def _merger(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    assert encoder.projector is not None, "Qwen's encoders come with their mergers"
    return encoder.projector, encoder.shape.patches_per_token


def _two_layers(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    chosen = config.get("vision_feature_layer")
    inputs = encoder.shape.hidden * (len(chosen) if isinstance(chosen, list) else 1)
    bias = bool(config.get("multimodal_projector_bias", True))
    return Projector(matrices=((inputs, width, bias), (width, width, bias))), 1


def _two_layers_newline(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    projector, merged = _two_layers(config, encoder, width)
    return replace(projector, others=width), merged


def _shuffle(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    merged = Values(config, {"scale_factor": 2}, "config.json").size("scale_factor") ** 2
    return Projector(matrices=((encoder.shape.hidden * merged, width, False),)), merged


def _internvl(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    ratio = config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or not 0 < ratio <= 1:
        raise ConfigError("config.json: downsample_ratio", got=ratio, expected="a number above 0 and up to 1")
    merged = int(1 / ratio) ** 2
    inputs = encoder.shape.hidden * merged
    return Projector(matrices=((inputs, width, True), (width, width, True)), others=2 * inputs), merged


def _pooled(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    tokens = Values(config, {"mm_tokens_per_image": 256}, "config.json").size("mm_tokens_per_image")
    matrices = ((encoder.shape.hidden, width, False),)
    return Projector(matrices=matrices, others=encoder.shape.hidden), max(1, encoder.grid // tokens)


def _one_layer(config: Mapping[str, Any], encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    outputs = Values(config, {"projection_dim": 2048}, "config.json").size("projection_dim")
    return Projector(matrices=((encoder.shape.hidden, outputs, True),)), 1


_FAMILIES: Mapping[str, _Family] = {
    "qwen2_vl": _Family(
        text="qwen2_vl_text",
        encoder="qwen2_vl_vision",
        flat_text=True,
        tied_by_text=True,
        fixed=True,
        projector=_merger,
    ),
    "qwen2_5_vl": _Family(
        text="qwen2_5_vl_text",
        encoder="qwen2_5_vl_vision",
        flat_text=True,
        tied_by_text=True,
        fixed=True,
        projector=_merger,
    ),
    "qwen3_vl": _Family(text="qwen3_vl_text", encoder="qwen3_vl_vision", fixed=True, projector=_merger),
    "qwen3_vl_moe": _Family(text="qwen3_vl_moe_text", encoder="qwen3_vl_vision", fixed=True, projector=_merger),
    "idefics3": _Family(text="llama", encoder="idefics3_vision", projector=_shuffle),
    "smolvlm": _Family(text="llama", encoder="smolvlm_vision", projector=_shuffle),
    "llava": _Family(
        text="llama", encoder="clip_vision_model", encoder_absent=_CLIP_L, tied_by_text=True, projector=_two_layers
    ),
    "llava_next": _Family(
        text="llama", encoder="clip_vision_model", encoder_absent=_CLIP_L, projector=_two_layers_newline
    ),
    "llava_onevision": _Family(
        text="qwen2",
        encoder="siglip_vision_model",
        encoder_absent={**_SO400M, "image_size": 384, "num_hidden_layers": 26},
        tied_by_text=True,
        projector=_two_layers_newline,
    ),
    "internvl": _Family(text="qwen2", encoder="internvl_vision", tied=True, projector=_internvl),
    "gemma3": _Family(text="gemma3_text", encoder="siglip_vision_model", tied=True, projector=_pooled),
    "paligemma": _Family(
        text="gemma",
        text_absent=_GEMMA_2B,
        encoder="siglip_vision_model",
        encoder_absent={**_SO400M, "intermediate_size": 4096, "image_size": 224, "num_hidden_layers": 27},
        tied=True,
        projector=_one_layer,
    ),
}


def read_shape(folder: str | Path) -> ModelShape:
    """The shape of the model in a folder; its weights, where there are any, are counted but not read."""
    config = read_settings(folder).config
    if not config:
        raise ConfigError(
            f"model folder {Path(folder).expanduser()}",
            got="no config.json",
            expected="the model's own config.json: layers, widths and the encoder follow from it",
            fix="name the folder that AutoModel.from_pretrained would load",
        )
    shape = shape_from_config(config)
    counts = count_weights(Path(folder).expanduser(), tied=shape.language.tied)
    return shape if counts is None else replace(shape, parameters=counts, counted_from="weights")


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes. A model type that is not known is read by its usual keys, with a note."""
    model_type = str(config.get("model_type") or "")
    if model_type == "nanovlm":
        return _nanovlm(config)
    family = _FAMILIES.get(model_type)
    if family is not None:
        return _composed(model_type, family, config)
    if model_type in TEXT_KINDS:
        language, parts = read_language(TEXT_KINDS[model_type], config, "config.json")
        return _assemble(model_type, language, parts, None, None, ())
    return _generic(model_type, config)


def _composed(model_type: str, family: _Family, config: Mapping[str, Any]) -> ModelShape:
    notes: list[str] = []
    text = _part(config, "text_config", config if family.flat_text else family.text_absent)
    kind_name = family.text if family.fixed else str(text.get("model_type") or family.text)
    kind = TEXT_KINDS.get(kind_name)
    if kind is None:
        notes.append(f"the decoder {kind_name!r} is not known: counted as a Llama of its sizes")
        kind = GENERIC_TEXT
    vision = _part(config, "vision_config", family.encoder_absent)
    encoder_name = family.encoder if family.fixed else str(vision.get("model_type") or family.encoder)
    if encoder_name not in VISION_ENCODERS:
        notes.append(f"the vision encoder {encoder_name!r} is not known: counted as a plain ViT of its sizes")
    language, parts = read_language(kind, text, "config.json: text_config")
    tied = config.get("tie_word_embeddings", family.tied)
    if family.tied_by_text:
        tied = tied or text.get("tie_word_embeddings", kind.defaults["tie_word_embeddings"])
    language = replace(language, tied=bool(tied))
    encoder = read_vision_encoder(encoder_name, vision)
    projector, merged = family.projector(config, encoder, language.hidden)
    encoder = replace(encoder, shape=_connected(encoder.shape, projector, merged))
    return _assemble(model_type, language, parts, encoder, projector, tuple(notes))


def _connected(shape: VisionShape, projector: Projector, merged: int) -> VisionShape:
    return replace(
        shape,
        patches_per_token=merged,
        projector_flops_per_token=projector.flops_per_token,
        projector_elements_per_token=projector.elements_per_token,
    )


def _assemble(
    model_type: str,
    language: LanguageShape,
    parts: LanguageParts,
    encoder: VisionEncoder | None,
    projector: Projector | None,
    notes: tuple[str, ...],
) -> ModelShape:
    table = language.vocabulary * language.hidden
    if parts.dense_layers:
        notes += (f"{parts.dense_layers} layers without experts are timed as layers with experts",)
    return ModelShape(
        model_type=model_type,
        language=language,
        vision=encoder.shape if encoder else None,
        parameters=ParameterCounts(
            embedding=table,
            layers=language_layers(language, parts),
            head=0 if language.tied else table,
            vision=encoder_parameters(encoder.shape, encoder.parts) if encoder else 0,
            projector=projector.parameters if projector else 0,
        ),
        counted_from="config",
        notes=notes,
    )


def _part(config: Mapping[str, Any], key: str, absent: Mapping[str, Any] | None) -> Mapping[str, Any]:
    part = config.get(key)
    if part is None:
        return absent or {}
    if not isinstance(part, Mapping):
        raise ConfigError(f"config.json: {key}", got=type(part).__name__, expected="a JSON object")
    return part


# nanoVLM has one flat config; its decoder is a Llama, its encoder a SigLIP without pooling.
_NANO_TEXT = {
    "hidden_size": ("lm_hidden_dim", 960),
    "intermediate_size": ("lm_inter_dim", 2560),
    "num_hidden_layers": ("lm_n_blocks", 32),
    "num_attention_heads": ("lm_n_heads", 15),
    "num_key_value_heads": ("lm_n_kv_heads", 5),
    "vocab_size": ("lm_vocab_size", 49218),
    "max_position_embeddings": ("lm_max_position_embeddings", 8192),
    "tie_word_embeddings": ("lm_tie_weights", True),
}
_NANO_ENCODER = {
    "hidden_size": ("vit_hidden_dim", 768),
    "intermediate_size": ("vit_inter_dim", 3072),
    "num_hidden_layers": ("vit_n_blocks", 12),
    "num_attention_heads": ("vit_n_heads", 12),
    "image_size": ("vit_img_size", 512),
    "patch_size": ("vit_patch_size", 16),
    "scale_factor": ("mp_pixel_shuffle_factor", 4),
}


def _nanovlm(config: Mapping[str, Any]) -> ModelShape:
    def renamed(table: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
        return {key: config.get(theirs, default) for key, (theirs, default) in table.items()}

    language, parts = read_language(TEXT_KINDS["llama"], renamed(_NANO_TEXT), "config.json: the keys lm_*")
    vision = {**renamed(_NANO_ENCODER), "vision_use_head": False}
    encoder = read_vision_encoder("siglip_vision_model", vision)
    projector, merged = _shuffle(vision, encoder, language.hidden)
    encoder = replace(encoder, shape=_connected(encoder.shape, projector, merged))
    return _assemble("nanovlm", language, parts, encoder, projector, ())


# What a config must say itself for a decoder that is not known.
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def _generic(model_type: str, config: Mapping[str, Any]) -> ModelShape:
    """An unknown model by its usual keys; whatever is assumed is noted."""
    names = (*_FAMILIES, *TEXT_KINDS, "nanovlm")
    key = next((key for key in ("text_config", "llm_config") if isinstance(config.get(key), Mapping)), "")
    text = _part(config, key, config) if key else config
    if str(text.get("model_type")) not in TEXT_KINDS:
        missing = [name for name in _NEEDED if text.get(name) is None]
        if missing:
            raise ConfigError(
                "config.json: model_type",
                got=f"{model_type or 'nothing'}, and no {', '.join(missing)} to go by",
                expected="one of " + ", ".join(sorted(names)),
                fix=nearest(model_type, names) or "a decoder whose config has the usual keys is read as a Llama",
            )
    family = _Family(text="llama-like", encoder="plain", tied_by_text=True, projector=_two_layers)
    note = f"the model type {model_type!r} is not known: read by its usual keys"
    if isinstance(config.get("vision_config"), Mapping):
        note += ", with a projector of two layers and no merging of patches"
        shape = _composed(model_type, family, {**config, "text_config": text})
    else:
        kind = TEXT_KINDS.get(str(text.get("model_type")), GENERIC_TEXT)
        language, parts = read_language(kind, text, f"config.json: {key}" if key else "config.json")
        shape = _assemble(model_type, language, parts, None, None, ())
    return replace(shape, notes=(note, *shape.notes))
