"""Exact parameter counts of a model's parts, from their sizes alone."""

from __future__ import annotations

from packtrain.families.shape import EncoderParts, LanguageParts, LanguageShape, VisionShape, linear


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


def encoder(shape: VisionShape, parts: EncoderParts) -> int:
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
