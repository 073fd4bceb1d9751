"""Synthetic samples of given sizes: what benchmarks, calibration and tests train on where no data are needed.

Contents are noise. Lengths, images and the tokens that carry loss are as asked for, and those alone decide what a step
costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isqrt
from typing import Any, Literal

import torch
from torch import Tensor

from packtrain.core.errors import ConfigError
from packtrain.core.seeds import stream
from packtrain.delivery.encode.encoded_sample import IGNORED, IMAGE, TEXT, EncodedSample, VisionCounts
from packtrain.families.family import BatchContract
from packtrain.families.registry import all_families, find_family
from packtrain.predicting.shapes import shape_from_config

_PROMPT = 20  # tokens beside the image that carry no loss
_LEAST_ID = 3  # ids before it are often special


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SyntheticImages:
    """The images of one sample as the model is given them."""

    images: int = 0
    tokens: int = 0  # that they become
    token_id: int = 0
    media: Mapping[str, Tensor] = field(default_factory=dict)
    counts: VisionCounts = field(default_factory=VisionCounts)


NO_IMAGES = SyntheticImages()


def image_of_patches(pixels: Tensor, height: int, width: int, *, merged: int, token_id: int) -> SyntheticImages:
    """One image of `height x width` patches, the rows of `pixels`; `merged` of them become a token."""
    patches = height * width
    assert len(pixels) == patches, "pixels of another image"
    return SyntheticImages(
        images=1,
        tokens=patches // merged,
        token_id=token_id,
        media={"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])},
        counts=VisionCounts(tiles=1, patches=patches, squared_patches=patches**2),
    )


def images_of_tiles(pixels: Tensor, *, patches: int, merged: int, token_id: int) -> SyntheticImages:
    """One image per tile of (1, tiles, channels, height, width), each of `patches` patches."""
    tiles = pixels.shape[1]
    return SyntheticImages(
        images=tiles,
        tokens=tiles * patches // merged,
        token_id=token_id,
        media={"pixel_values": pixels},
        counts=VisionCounts(tiles=tiles, patches=tiles * patches, squared_patches=tiles * patches**2),
    )


def _noise_ids(config: Mapping[str, Any], tokens: int, draw: torch.Generator) -> Tensor:
    """Ids of words: they come from the first half of the vocabulary, as those of media never do."""
    words = int(config.get("text_config", config)["vocab_size"]) // 2
    return torch.randint(_LEAST_ID, words, (tokens,), generator=draw)


def synthetic_sample(
    name: str,
    ids: Tensor,
    *,
    supervised: int,
    images: SyntheticImages = NO_IMAGES,
    row: int = -1,
    position_rows: int = 1,
) -> EncodedSample:
    """A sample of these ids: images follow its first token, and its last tokens carry loss."""
    ids, kinds = ids.clone(), torch.full_like(ids, TEXT)
    image_tokens = slice(1, 1 + images.tokens)
    ids[image_tokens], kinds[image_tokens] = images.token_id, IMAGE
    labels = ids.clone()
    labels[: len(ids) - supervised] = IGNORED
    return EncodedSample(
        id=name,
        row=row,
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(len(ids)).expand(position_rows, -1),
        token_kinds=kinds,
        media=images.media,
        num_images=images.images,
        vision=images.counts,
    )


# ---- samples that fill a pack


@dataclass(frozen=True, kw_only=True, slots=True)
class Mix:
    """What samples look like: their mean length, and how much of them are images."""

    mean_tokens: int = 1300
    patches_per_token: float = 1.0  # rows of the vision encoder for each token; 0 without images
    supervised: float = 0.9  # of the text after the prompt


def pack_lengths(tokens: int, mix: Mix, seed: int = 0) -> list[int]:
    """Lengths of samples that fill a pack of this many tokens completely."""
    draw = stream(seed, "synthetic lengths")
    lengths: list[int] = []
    least = max(2 * _PROMPT, mix.mean_tokens // 4)
    while (remaining := tokens - sum(lengths)) > 0:
        length = int(mix.mean_tokens * draw.lognormal(-0.18, 0.6))
        length = min(max(length, least), 4 * mix.mean_tokens, remaining)
        lengths.append(remaining if remaining - length < least else length)
    return lengths


def row_lengths(longest: int, rows: int) -> list[int]:
    """Lengths of the rows of a padded batch, from about half of the longest up to it."""
    return [longest * (rows + at + 1) // (2 * rows) for at in range(rows)]


ImageForm = Literal["patches", "tiles"]


def _image_form(contract: BatchContract | None) -> ImageForm | None:
    """Is an image a row for each patch with its height and width, or one tile among those of its sample?"""
    if contract is None:
        return None
    if "image_grid_thw" in contract.media:
        return "patches"
    return "tiles" if contract.media.get("pixel_values") == "images" else None


class SyntheticSamples:
    """Makes samples for the config of a model, as a mix says or of given sizes.

    Images of given sizes have at most `shared_patches`, and their pixels are spans of one noise: making new ones for
    each image would keep a benchmark waiting.
    """

    def __init__(
        self, config: Mapping[str, Any], mix: Mix | None = None, *, dtype: torch.dtype, shared_patches: int = 0
    ) -> None:
        self._config, self._mix, self._dtype = config, mix or Mix(), dtype
        kind = str(config["model_type"])
        family = find_family(kind)
        contract = family.contract if family is not None else None
        self._form = _image_form(contract)
        self._position_rows = 4 if contract is not None and contract.positions == "mrope" else 1
        self._vision = shape_from_config(config).vision
        if self._vision is not None and self._form is None:
            possible = [name for name, one in all_families().items() if _image_form(one.contract) is not None]
            raise ConfigError(
                "synthetic images",
                got=f"a model of type {kind}",
                expected=", ".join(possible) + ", or a model without images",
                fix="calibrate with one of these: coefficients belong to the GPU, not to the model",
            )
        width = self._vision.patch_elements if self._vision is not None else 0
        noise = torch.Generator().manual_seed(0)
        self._shared = torch.randn(2 * shared_patches, width, generator=noise).to(dtype)

    def sample(self, number: int, tokens: int) -> EncodedSample:
        """One sample of this many tokens, as the mix says."""
        noise = torch.Generator().manual_seed(number)
        ids = _noise_ids(self._config, tokens, noise)
        images = self._images(tokens, noise)
        supervised = max(1, int(self._mix.supervised * (tokens - images.tokens - _PROMPT)))
        return self._sample(number, ids, images, supervised)

    def sample_of_sizes(self, number: int, tokens: int, *, supervised: int, height: int, width: int) -> EncodedSample:
        """One sample of this many tokens, with an image of `height x width` patches unless they are 0."""
        noise = torch.Generator().manual_seed(number)
        ids = _noise_ids(self._config, tokens, noise)
        return self._sample(number, ids, self._image(height, width, noise), supervised)

    def _sample(self, number: int, ids: Tensor, images: SyntheticImages, supervised: int) -> EncodedSample:
        return synthetic_sample(
            str(number), ids, supervised=supervised, images=images, row=number, position_rows=self._position_rows
        )

    def _image(self, height: int, width: int, noise: torch.Generator) -> SyntheticImages:
        patches = height * width
        if not patches:
            return NO_IMAGES
        assert self._vision is not None, "its samples have images"
        assert self._form == "patches", "images of another form"
        start = int(torch.randint(0, len(self._shared) - patches + 1, (), generator=noise))
        return image_of_patches(
            self._shared[start : start + patches],
            height,
            width,
            merged=self._vision.patches_per_token,
            token_id=int(self._config["image_token_id"]),
        )

    def _images(self, tokens: int, noise: torch.Generator) -> SyntheticImages:
        """Images of about as many patches as the mix says, that leave room for text."""
        vision = self._vision
        if vision is None or not self._mix.patches_per_token:
            return NO_IMAGES
        merged, token_id = vision.patches_per_token, int(self._config["image_token_id"])
        patch_budget = max(0, min(int(self._mix.patches_per_token * tokens), (tokens - _PROMPT - 4) * merged))
        if self._form == "patches":
            side = 2 * (isqrt(patch_budget) // 2)
            if not side:
                return NO_IMAGES
            pixels = torch.randn(side * side, vision.patch_elements, generator=noise).to(self._dtype)
            return image_of_patches(pixels, side, side, merged=merged, token_id=token_id)
        encoder = self._config["vision_config"]
        size = int(encoder["image_size"])  # the one that the encoder takes
        patches = (size // int(encoder["patch_size"])) ** 2
        tiles = patch_budget // patches
        if not tiles:
            return NO_IMAGES
        pixels = torch.randn(1, tiles, 3, size, size, generator=noise).to(self._dtype)
        return images_of_tiles(pixels, patches=patches, merged=merged, token_id=token_id)
