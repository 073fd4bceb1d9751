"""Made-up samples of given sizes for any model's config: what benchmarks and calibration train on.

Contents are noise. Lengths, images and the share of tokens that carry loss are as asked for, and those alone decide
what a step costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

import torch
from torch import Tensor

from packtrain.core.errors import ConfigError
from packtrain.core.seeds import stream
from packtrain.estimates.shapes import shape_from_config
from packtrain.packs.values import IGNORED, IMAGE, TEXT, EncodedSample, VisionCounts

_QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
_TILED = ("idefics3", "smolvlm")
_PROMPT = 20  # tokens beside the image that carry no loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """What samples look like: their mean length, and how much of them are images."""

    mean_tokens: int = 1300
    patches_per_token: float = 1.0  # rows of the vision tower for each token; 0 without images
    supervised: float = 0.9  # of the text behind the prompt


def pack_lengths(tokens: int, mix: Mix, seed: int = 0) -> list[int]:
    """Lengths of samples that fill a pack of so many tokens to the last."""
    draw = stream(seed, "made-up lengths")
    lengths: list[int] = []
    least = max(2 * _PROMPT, mix.mean_tokens // 4)
    while (left := tokens - sum(lengths)) > 0:
        wanted = int(mix.mean_tokens * draw.lognormal(-0.18, 0.6))
        wanted = min(max(wanted, least), 4 * mix.mean_tokens, left)
        lengths.append(left if left - wanted < least else wanted)
    return lengths


def row_lengths(longest: int, rows: int) -> list[int]:
    """Lengths of the rows of a padded batch, from about half of the longest up to it."""
    return [longest * (rows + at + 1) // (2 * rows) for at in range(rows)]


class MadeUpSamples:
    """Makes samples for one model."""

    def __init__(self, config: Mapping[str, Any], mix: Mix, *, dtype: torch.dtype, seed: int = 0) -> None:
        self._config, self._mix, self._dtype, self._seed = config, mix, dtype, seed
        self._kind = str(config["model_type"])
        self._vision = shape_from_config(config).vision
        if self._vision is not None and self._kind not in (*_QWEN, *_TILED):
            raise ConfigError(
                "made-up images",
                got=f"a model of type {self._kind}",
                expected=", ".join((*_QWEN, *_TILED)) + ", or a model without images",
                fix="calibrate with one of these: coefficients belong to the GPU, not to the model",
            )
        self._words = int(config.get("text_config", config)["vocab_size"]) // 2
        self._rows = 4 if self._kind in _QWEN else 1

    def sample(self, number: int, tokens: int) -> EncodedSample:
        """One sample of so many tokens."""
        noise = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        ids = torch.randint(3, self._words, (tokens,), generator=noise)
        kinds = torch.full((tokens,), TEXT)
        media, counts, images = self._media(tokens, noise)
        image_tokens = counts.patches // self._vision.patches_per_token if self._vision is not None else 0
        if image_tokens:
            ids[1 : 1 + image_tokens] = int(self._config["image_token_id"])
            kinds[1 : 1 + image_tokens] = IMAGE
        labels = ids.clone()
        text = max(1, int(self._mix.supervised * (tokens - image_tokens - _PROMPT)))
        labels[: tokens - text] = IGNORED
        return EncodedSample(
            id=str(number),
            row=number,
            input_ids=ids,
            labels=labels,
            position_ids=torch.arange(tokens).expand(self._rows, -1),
            token_kinds=kinds,
            media=media,
            num_images=images,
            vision=counts,
        )

    def _media(self, tokens: int, noise: torch.Generator) -> tuple[dict[str, Tensor], VisionCounts, int]:
        """Images of about as many patches as the mix says, that leave room for text."""
        vision = self._vision
        if vision is None or not self._mix.patches_per_token:
            return {}, VisionCounts(), 0
        room = (tokens - _PROMPT - 4) * vision.patches_per_token
        wanted = min(int(self._mix.patches_per_token * tokens), room)
        if self._kind in _TILED:
            return self._tiles(wanted, noise)
        side = 2 * (isqrt(max(wanted, 0)) // 2)
        if not side:
            return {}, VisionCounts(), 0
        patches = side * side
        pixels = torch.randn(patches, vision.patch_elements, generator=noise).to(self._dtype)
        media = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
        return media, VisionCounts(tiles=1, patches=patches, squared_patches=patches**2), 1

    def _tiles(self, wanted: int, noise: torch.Generator) -> tuple[dict[str, Tensor], VisionCounts, int]:
        """Images as tiles of the one size that the tower takes."""
        about = self._config["vision_config"]
        size, patch = int(about["image_size"]), int(about["patch_size"])
        each = (size // patch) ** 2
        tiles = wanted // each
        if not tiles:
            return {}, VisionCounts(), 0
        pixels = torch.randn(1, tiles, 3, size, size, generator=noise).to(self._dtype)
        counts = VisionCounts(tiles=tiles, patches=tiles * each, squared_patches=tiles * each**2)
        return {"pixel_values": pixels}, counts, tiles
