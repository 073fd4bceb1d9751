"""What predicting needs of a model's config: the values that a family describes its decoder and encoder with.

A key that a config lacks takes the default of the class that transformers would build; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import numpy as np

from packtrain.core.errors import ConfigError

Config = Mapping[str, Any]  # a JSON object of a model's folder, whole or a part of it, as it was written

# How a decoder says which layers attend within a sliding window only.
#   never      it has none
#   always     every layer, where a window is set (and use_sliding_window, where there is such a key, is on)
#   optional   layers from max_window_layers on, where use_sliding_window is on
#   no_rope    layers without rotary positions, where use_sliding_window is on
#   period     all but every n-th layer
WindowRule = Literal["never", "always", "optional", "no_rope", "period"]
BiasRule = Literal["never", "always", "config"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LanguageShape:
    """The decoder: what its FLOPs and activations follow from."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    gated: bool = True  # gate and up projections, as in SwiGLU; else a plain two-matrix block
    vocabulary: int
    tied: bool  # the head is the embedding
    context_length: int
    window: int | None = None  # sliding attention, where layers have it
    window_layers: int = 0
    experts: int = 1  # of a mixture of experts; `experts_used` of them see a token
    experts_used: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """The vision encoder and the projector after it; lengths are in patches, the encoder's rows."""

    hidden: int
    layers: int
    heads: int
    intermediate: int
    gated: bool
    patch_elements: int  # numbers in one patch: channels x temporal size x height x width
    full_attention_layers: int  # the others attend inside windows
    window_patches: int = 0  # of the others
    patches_per_token: int = 1  # merged into one token of the language model
    projector_flops_per_token: int = 0  # multiply-adds x 2 of projector, merger and deepstack mergers, per media token
    projector_elements_per_token: int = 0  # numbers its matrix products read and write, per media token


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


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionEncoder:
    """An encoder as read; Qwen's hold their own projector, the mergers."""

    shape: VisionShape
    parts: EncoderParts
    grid: int  # patches of one image where its size is fixed, else 0
    projector: Projector | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """One decoder class: its default sizes, and what it has beside matrices."""

    defaults: Config
    query_bias: BiasRule = "config"  # of query, key and value projections
    output_bias: BiasRule = "config"
    mlp_bias: BiasRule = "never"
    head_norms: bool = False  # a norm over each head's queries and keys
    norms: int = 2  # of a layer
    fp32_scales: bool = False  # norms multiply with their weights before the result is cast
    own_head_dim: bool = True  # head_dim is read; else it is always hidden / heads
    windows: WindowRule = "never"
    window_period: int = 0
    experts: bool = False


def decoder_sizes(
    hidden: int,
    intermediate: int,
    layers: int,
    heads: int,
    kv_heads: int | None,
    vocabulary: int,
    context: int,
    **more: Any,
) -> Config:
    """A decoder's defaults by the keys of its config."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": context,
        "head_dim": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "sliding_window": None,
        **more,
    }


EncoderReader = Callable[[Config], VisionEncoder]  # of a vision_config
# (config, encoder, the decoder's width) -> the projector, and patches per token
ProjectorReader = Callable[[Config, VisionEncoder, int], tuple[Projector, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionTraits:
    """What an encoder's layers keep, launch and ask for, as transformers writes them."""

    fused: bool = False  # one matrix for queries, keys and values; rotary positions
    rms_norms: bool = False  # written out, which keeps their fp32 input
    sigmoid: bool = False  # x * sigmoid(1.702 x), written out: one more tensor is kept
    scaled: bool = False  # each residual branch is multiplied by learned numbers
    plain_softmax: bool = False  # written-out attention stays in the compute type
    kernels: tuple[int, int] = (12, 26)  # of one layer as it is written, forward and backward
    image_by_image: bool = False  # calls attention for each image by itself
    asks_sizes: bool = False  # the host asks the GPU for sizes of images while it runs
    two_way_images: bool = False  # tokens of an image attend to each other in both directions, in the decoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """How a model of decoder, vision encoder and projector is put together."""

    text: str  # the decoder's model type, where the config does not name one
    encoder: str  # the encoder's
    projector: ProjectorReader
    fixed: bool = False  # decoder and encoder are always these, whatever their configs call themselves
    text_absent: Config | None = None  # used where the config has no text_config
    encoder_absent: Config | None = None
    flat_text: bool = False  # older configs have the decoder's keys at the top
    tied: bool = False  # the default
    tied_by_text: bool = False  # the decoder's config may say it too
    nested: Callable[[Config], Config] | None = None  # a flat config in transformers' layout
    text_where: str = "config.json: text_config"
    encoders: Mapping[str, EncoderReader] = field(default_factory=dict)  # its own, by their model types
    traits: VisionTraits = field(default_factory=VisionTraits)


# ---- vision transformers over images of one size, with learned positions

ENCODER_WHERE = "config.json: vision_config"


def vit_sizes(hidden: int, intermediate: int, layers: int, heads: int, image: int, patch: int) -> Config:
    """An encoder's defaults by the keys of its config."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "image_size": image,
        "patch_size": patch,
        "num_channels": 3,
    }


def fixed_vit(
    values: Values, *, outer_norms: int, patch_bias: bool = True, class_token: bool = False, pooling_head: bool = False
) -> VisionEncoder:
    """A ViT over images of one size, with learned positions."""
    shape, grid = vit_shape(values)
    parts = EncoderParts(
        patch_bias=patch_bias,
        positions=grid + class_token,
        extra_rows=int(class_token),
        outer_norms=outer_norms,
        pooling_head=pooling_head,
    )
    return VisionEncoder(shape=shape, parts=parts, grid=grid)


def vit_shape(values: Values) -> tuple[VisionShape, int]:
    """Its sizes, and the patches of one image."""
    patch, image = values.sides("patch_size"), values.sides("image_size")
    layers = values.size("num_hidden_layers")
    shape = VisionShape(
        hidden=values.size("hidden_size"),
        layers=layers,
        heads=values.size("num_attention_heads"),
        intermediate=values.size("intermediate_size"),
        gated=False,
        patch_elements=values.size("num_channels") * prod(patch),
        full_attention_layers=layers,
    )
    return shape, (image[0] // patch[0]) * (image[1] // patch[1])


def _clip(config: Config) -> VisionEncoder:
    values = Values(config, vit_sizes(768, 3072, 12, 12, 224, 32), ENCODER_WHERE)
    return fixed_vit(values, patch_bias=False, class_token=True, outer_norms=2)


def _siglip(config: Config) -> VisionEncoder:
    values = Values(config, {**vit_sizes(768, 3072, 12, 12, 224, 16), "vision_use_head": True}, ENCODER_WHERE)
    return fixed_vit(values, outer_norms=1, pooling_head=values.flag("vision_use_head"))


def plain_vit(config: Config) -> VisionEncoder:
    """An encoder that is not known: its config must be complete."""
    return fixed_vit(Values(config, {"num_channels": 3}, ENCODER_WHERE), outer_norms=1)


# Those that several families have.
SO400M = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "patch_size": 14,
    "vision_use_head": False,
}
ENCODERS: Mapping[str, EncoderReader] = {"clip_vision_model": _clip, "siglip_vision_model": _siglip}


# ---- projectors that several families have


def two_layers(config: Config, encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    """Two matrices over each patch."""
    chosen = config.get("vision_feature_layer")
    inputs = encoder.shape.hidden * (len(chosen) if isinstance(chosen, list) else 1)
    bias = bool(config.get("multimodal_projector_bias", True))
    return Projector(matrices=((inputs, width, bias), (width, width, bias))), 1


def two_layers_newline(config: Config, encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    """As `two_layers`, and one learned embedding between rows."""
    projector, merged = two_layers(config, encoder, width)
    return replace(projector, others=width), merged


def shuffled(config: Config, encoder: VisionEncoder, width: int) -> tuple[Projector, int]:
    """One matrix over squares of patches."""
    merged = Values(config, {"scale_factor": 2}, "config.json").size("scale_factor") ** 2
    return Projector(matrices=((encoder.shape.hidden * merged, width, False),)), merged


# ---- the smallest image that an encoder takes. Not zero: Idefics3 and SmolVLM drop images that are all zero.


def image_side(config: Any) -> int:
    """Of the one size that an encoder takes."""
    size = config.vision_config.image_size
    return int(size[0]) if isinstance(size, list | tuple) else int(size)


def ones(*shape: int) -> np.ndarray:
    """Pixels."""
    return np.ones(shape, np.float32)


def square_image(config: Any) -> dict[str, np.ndarray]:
    """One image, for encoders of one size."""
    return {"pixel_values": ones(1, 3, image_side(config), image_side(config))}


class Values:
    """A config's values over the defaults of its class; a size that neither gives is an error that names it."""

    def __init__(self, config: Config, defaults: Config, where: str) -> None:
        self._config, self._defaults, self._where = config, defaults, where

    def get(self, key: str) -> Any:
        """The value as it stands, or None."""
        return self._config[key] if key in self._config else self._defaults.get(key)

    def size(self, *keys: str) -> int:
        """A positive integer, by the first key that the config has; null means the default."""
        for source in (self._config, self._defaults):
            for key in keys:
                if source.get(key) is not None:
                    return self._whole(key, source[key])
        raise ConfigError(
            f"{self._where}.{keys[0]}",
            got="no such key",
            expected="the sizes of the model: " + ", ".join(keys),
            fix="use the config.json that came with the model",
        )

    def sides(self, key: str) -> tuple[int, int]:
        """Height and width, given as two numbers or as one for both."""
        value = self._config.get(key)
        value = self._defaults.get(key) if value is None else value
        if value is None:
            return self.size(key), 0  # raises
        both = value if isinstance(value, list | tuple) else (value, value)
        if len(both) != 2:
            raise ConfigError(f"{self._where}.{key}", got=value, expected="one number, or height and width")
        return self._whole(key, both[0]), self._whole(key, both[1])

    def flag(self, key: str) -> bool:
        """A switch; absent is off unless the defaults say otherwise."""
        return bool(self.get(key))

    def _whole(self, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self._where}.{key}", got=value, expected="a positive integer")
        return value


# ---- configs of published sizes


def decoder(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, head_dim: int, words: int) -> Config:
    """A decoder of these sizes."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": words,
        "max_position_embeddings": 131_072,
        # Of models with other words; kept inside the vocabulary, whatever its size.
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


def last_tokens(words: int, *names: str) -> dict[str, int]:
    """Special tokens at the end of the vocabulary."""
    return {name: words - 1 - at for at, name in enumerate(names)}
