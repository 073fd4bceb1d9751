"""A model's config.json becomes a ModelShape: sizes, and exact parameter counts by part.

Counts come from the headers of the safetensors files where they lie beside the config, else from the config alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.core.errors import ConfigError, nearest
from packtrain.families.registry import all_families, find_family
from packtrain.families.settings import read_settings
from packtrain.families.shape import (
    ENCODERS,
    BiasRule,
    Composition,
    Decoder,
    EncoderParts,
    EncoderReader,
    LanguageParts,
    LanguageShape,
    Projector,
    Values,
    VisionEncoder,
    VisionShape,
    linear,
    plain_vit,
    two_layers,
)
from packtrain.families.text.model import GENERIC
from packtrain.predicting.values import ModelShape, ParameterCounts
from packtrain.predicting.weights import count_weights


def language_layers(shape: LanguageShape, parts: LanguageParts) -> int:
    """All decoder layers and the final norm."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = linear(shape.hidden, queries + 2 * keys, parts.query_bias)
    attention += linear(queries, shape.hidden, parts.output_bias)
    attention += 2 * shape.head_dim if parts.head_norms else 0
    attention += parts.norms * shape.hidden
    block = _block(shape.hidden, shape.intermediate, shape.gated, parts.mlp_bias)
    if shape.experts > 1:
        block = shape.experts * (block + shape.hidden)  # each expert has a row in the router
    dense = _block(shape.hidden, parts.dense_intermediate, shape.gated, parts.mlp_bias)
    blocks = (shape.layers - parts.dense_layers) * block + parts.dense_layers * dense
    return shape.layers * attention + blocks + shape.hidden


def encoder_parameters(shape: VisionShape, parts: EncoderParts) -> int:
    """A vision encoder without what connects it to the language model."""
    width = shape.hidden
    norm = parts.norm_size * width
    block = _block(width, shape.intermediate, shape.gated, True)
    layer = linear(width, 3 * width, parts.query_bias) + linear(width, width, True) + block
    layer += 2 * norm + parts.layer_extras * width
    patches = linear(shape.patch_elements, width, parts.patch_bias)
    total = patches + (parts.positions + parts.extra_rows) * width + shape.layers * layer
    total += parts.outer_norms * 2 * width
    if parts.pooling_head:
        total += width + linear(width, 3 * width, True) + linear(width, width, True) + 2 * width + block
    return total


def _block(width: int, inner: int, gated: bool, bias: bool) -> int:
    return (2 if gated else 1) * linear(width, inner, bias) + linear(inner, width, bias)


def read_language(kind: Decoder, config: Mapping[str, Any], where: str) -> tuple[LanguageShape, LanguageParts]:
    """The decoder that a config describes, read as one of a kind; `where` names the config in errors."""
    values = Values(config, kind.defaults, where)
    hidden, heads, layers = (values.size(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    head_dim = values.get("head_dim") if kind.own_head_dim else None
    window, window_layers = _windows(kind, values, layers)
    dense = _dense_layers(values, layers) if kind.experts else 0
    intermediate = values.size("intermediate_size")
    shape = LanguageShape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if values.get("num_key_value_heads") is None else values.size("num_key_value_heads"),
        head_dim=hidden // heads if head_dim is None else values.size("head_dim"),
        intermediate=values.size("moe_intermediate_size", "intermediate_size") if kind.experts else intermediate,
        vocabulary=values.size("vocab_size"),
        tied=values.flag("tie_word_embeddings"),
        context_length=values.size("max_position_embeddings"),
        window=window,
        window_layers=window_layers,
        experts=values.size("num_experts", "num_local_experts") if kind.experts else 1,
        experts_used=values.size("num_experts_per_tok") if kind.experts else 1,
    )

    def has(rule: BiasRule, key: str) -> bool:
        return rule == "always" or (rule == "config" and values.flag(key))

    parts = LanguageParts(
        query_bias=has(kind.query_bias, "attention_bias"),
        output_bias=has(kind.output_bias, "attention_bias"),
        mlp_bias=has(kind.mlp_bias, "mlp_bias"),
        head_norms=kind.head_norms,
        norms=kind.norms,
        dense_layers=dense,
        dense_intermediate=intermediate,
    )
    return shape, parts


def _dense_layers(values: Values, layers: int) -> int:
    """Layers of a mixture that have no experts."""
    plain = set(values.get("mlp_only_layers") or ())
    step = values.get("decoder_sparse_step") or 1
    return sum(index in plain or (index + 1) % step > 0 for index in range(layers))


def _windows(kind: Decoder, values: Values, layers: int) -> tuple[int | None, int]:
    """The sliding window and how many layers have it."""
    window = values.get("sliding_window")
    switch = values.get("use_sliding_window")
    if window is None or kind.windows == "never" or switch is False:
        return None, 0
    named = values.get("layer_types")
    if kind.windows == "always":
        count = layers
    elif isinstance(named, list | tuple):
        count = sum(name == "sliding_attention" for name in named)
    elif kind.windows == "period":
        period = values.get("sliding_window_pattern") or kind.window_period
        count = sum((index + 1) % period > 0 for index in range(layers))
    elif kind.windows == "no_rope":
        interval = values.size("no_rope_layer_interval")
        rope = values.get("no_rope_layers") or [(index + 1) % interval for index in range(layers)]
        count = sum(not turned for turned in rope[:layers])
    else:
        count = max(0, layers - (values.get("max_window_layers") or 0))
    return (values.size("sliding_window"), count) if count else (None, 0)


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


def context_length(folder: str | Path) -> int:
    """The most tokens of a row, also of a model whose shape is not understood."""
    try:
        return read_shape(folder).language.context_length
    except ConfigError:
        config = read_settings(folder).config
        inner = config.get("text_config")
        for part in (inner if isinstance(inner, Mapping) else {}, config):
            if isinstance(length := part.get("max_position_embeddings"), int) and length > 0:
                return length
        raise


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes. A model type that is not known is read by its usual keys, with a note."""
    model_type = str(config.get("model_type") or "")
    family = find_family(model_type)
    known = family.shape if family is not None else None
    if isinstance(known, Composition):
        return _composed(model_type, known, known.nested(config) if known.nested is not None else config)
    if known is not None:
        language, parts = read_language(known, config, "config.json")
        return _assemble(model_type, language, parts, None, None, ())
    return _generic(model_type, config)


def _decoder(name: str) -> Decoder | None:
    """The decoder of a model type."""
    family = find_family(name)
    return family.shape if family is not None and isinstance(family.shape, Decoder) else None


def _encoder(name: str) -> EncoderReader | None:
    """How the encoder that a config calls so is read: one that several families have, or a family's own."""
    family = find_family(name.removesuffix("_vision"))
    own = family.shape.encoders if family is not None and isinstance(family.shape, Composition) else {}
    return ENCODERS.get(name) or own.get(name)


def _composed(model_type: str, family: Composition, config: Mapping[str, Any]) -> ModelShape:
    notes: list[str] = []
    text = _part(config, "text_config", config if family.flat_text else family.text_absent)
    kind_name = family.text if family.fixed else str(text.get("model_type") or family.text)
    kind = _decoder(kind_name)
    if kind is None:
        notes.append(f"the decoder {kind_name!r} is not known: counted as a Llama of its sizes")
        text = _usual_keys(text)
        kind = _usual_decoder(text)
    vision = _part(config, "vision_config", family.encoder_absent)
    encoder_name = family.encoder if family.fixed else str(vision.get("model_type") or family.encoder)
    read_encoder = family.encoders.get(encoder_name) or _encoder(encoder_name)
    if read_encoder is None:
        notes.append(f"the vision encoder {encoder_name!r} is not known: counted as a plain ViT of its sizes")
        read_encoder = plain_vit
    language, parts = read_language(kind, text, family.text_where)
    tied = config.get("tie_word_embeddings", family.tied)
    if family.tied_by_text:
        tied = tied or text.get("tie_word_embeddings", kind.defaults["tie_word_embeddings"])
    language = replace(language, tied=bool(tied))
    encoder = read_encoder(vision)
    projector, merged = family.projector(config, encoder, language.hidden)
    connected: VisionShape = replace(
        encoder.shape,
        patches_per_token=merged,
        projector_flops_per_token=projector.flops_per_token,
        projector_elements_per_token=projector.elements_per_token,
    )
    encoder = replace(encoder, shape=connected)
    return _assemble(model_type, language, parts, encoder, projector, tuple(notes))


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


# What a config must say itself for a decoder that is not known.
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


# What models call their experts: how many there are, how many take each token, and how many take all of them.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
_SHARED = ("n_shared_experts", "moe_num_shared_experts", "num_shared_experts")


def _usual_keys(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of a decoder that is not known, with its experts under their usual names; a size of 0 is none."""
    sizes = {key: value for key, value in text.items() if value != 0}
    inner = sizes.get("moe_intermediate_size")
    inner = inner[0] if isinstance(inner, list | tuple) and inner else inner  # one for text, others for images
    if inner is not None:
        sizes = {"intermediate_size": inner, **sizes, "moe_intermediate_size": inner}
    experts, used, shared = (
        next((sizes[name] for name in names if isinstance(sizes.get(name), int)), 0)
        for names in (_EXPERTS, _USED, _SHARED)
    )
    if experts < 2 or not used:
        return sizes
    counts = {"num_experts": experts + shared, "num_experts_per_tok": used + shared}
    return {"mlp_only_layers": list(range(sizes.get("first_k_dense_replace") or 0)), **sizes, **counts}


def _usual_decoder(text: Mapping[str, Any]) -> Decoder:
    """How `_usual_keys` are read."""
    return replace(GENERIC, experts="num_experts_per_tok" in text and text.get("num_experts", 1) > 1)


def _generic(model_type: str, config: Mapping[str, Any]) -> ModelShape:
    """An unknown model by its usual keys; whatever is assumed is noted."""
    names = [name for name, family in all_families().items() if family.shape is not None]
    key = next((key for key in ("text_config", "llm_config") if isinstance(config.get(key), Mapping)), "")
    text = _part(config, key, config) if key else config
    if not text.get("intermediate_size") and text.get("moe_intermediate_size"):  # all layers have experts
        text = {**text, "intermediate_size": text["moe_intermediate_size"]}
    if text.get("head_dim") == 0:  # of latent attention without rotary parts
        text = {name: value for name, value in text.items() if name != "head_dim"}
    decoder = _decoder(str(text.get("model_type")))
    if decoder is None:
        missing = [name for name in _NEEDED if _usual_keys(text).get(name) is None]
        if missing:
            raise ConfigError(
                "config.json: model_type",
                got=f"{model_type or 'nothing'}, and no {', '.join(missing)} to go by",
                expected="one of " + ", ".join(sorted(names)),
                fix=nearest(model_type, names) or "a decoder whose config has the usual keys is read as a Llama",
            )
    usual = Composition(text="llama-like", encoder="plain", tied_by_text=True, projector=two_layers)
    note = f"the model type {model_type!r} is not known: read by its usual keys"
    without_encoder = ""
    if isinstance(config.get("vision_config"), Mapping):
        try:
            shape = _composed(model_type, usual, {**config, "text_config": text})
        except ConfigError as error:
            without_encoder = f"its vision encoder is in no estimate of memory and time: {error.where} is missing"
        else:
            note += ", with a projector of two layers and no merging of patches"
            return replace(shape, notes=(note, *shape.notes))
    if decoder is None:
        text = _usual_keys(text)
        decoder = _usual_decoder(text)
    language, parts = read_language(decoder, text, f"config.json: {key}" if key else "config.json")
    shape = _assemble(model_type, language, parts, None, None, ())
    return replace(shape, notes=(note, *filter(None, (without_encoder,)), *shape.notes))
