"""Exact parameter counts of a model's parts, from their sizes alone."""

from __future__ import annotations

from dataclasses import dataclass

from packtrain.predicting.values import LanguageShape, VisionShape


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageParts:
    """What a decoder has beside its matrices."""

    query_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    norms: int
    dense_layers: int = 0  # of a mixture of experts: layers that have a plain block instead
    dense_intermediate: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderParts:
    """What a vision encoder has beside the matrices of its layers."""

    patch_bias: bool
    positions: int  # learned position embeddings
    extra_rows: int = 0  # class and mask tokens
    query_bias: bool = True
    norm_size: int = 2  # numbers per channel of a layer's norm: 2 with bias, 1 without
    outer_norms: int = 0  # norms before and after the layers; these always have a bias
    layer_extras: int = 0  # further numbers per channel in a layer: layer scales, norms of queries and keys
    pooling_head: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Projector:
    """The matrices between encoder and decoder, applied once per media token."""

    matrices: tuple[tuple[int, int, bool], ...]  # (numbers in, numbers out, has a bias)
    others: int = 0  # parameters of norms and separators

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(linear(*matrix) for matrix in self.matrices) + self.others

    @property
    def flops_per_token(self) -> int:
        """Forward, multiply and add counted apart."""
        return sum(2 * rows * columns for rows, columns, _ in self.matrices)

    @property
    def elements_per_token(self) -> int:
        """Numbers that the products read and write."""
        return sum(rows + columns for rows, columns, _ in self.matrices)


def linear(inputs: int, outputs: int, bias: bool) -> int:
    """The parameters of one linear layer."""
    return inputs * outputs + (outputs if bias else 0)


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
