"""nanoVLM: sides stretched to whole tiles, one global view and a grid of tiles, a marker before each.

p: side of a tile; m: max_img_size, the length of the longer side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from packtrain.core.errors import ConfigError
from packtrain.core.values import MediaHeader, MediaKind, MediaLimits
from packtrain.families.family import Expansion, ProcessorKwargs, ProcessorSettings, Rule, Run
from packtrain.families.geometry import require_image
from packtrain.families.shape import Config

DEFAULTS: Config = {
    "max_img_size": 2048,
    "vit_img_size": 512,
    "vit_patch_size": 16,
    "mp_image_token_length": 64,
    "resize_to_max_side_len": True,
}


class NanoVLM(Rule):
    """A sample with several images numbers them from 0 in its text, before each image's tiles."""

    name: ClassVar[str] = "nanovlm"
    limit_names: ClassVar[tuple[str, ...]] = ("max_img_size",)
    string_content: ClassVar[bool | None] = True
    media_first: ClassVar[bool] = True

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        super().__init__(settings, limits)
        given = {**settings.config, **settings.image, **settings.processor}
        values = {key: default if given.get(key) is None else given[key] for key, default in DEFAULTS.items()}
        self._limit = limits.max_img_size
        self._longest = int(values["max_img_size"] if self._limit is None else self._limit)
        self._tile = int(values["vit_img_size"])
        self._forced = bool(values["resize_to_max_side_len"])
        self._tokens = int(values["mp_image_token_length"])
        self._tile_patches = (self._tile // int(values["vit_patch_size"])) ** 2
        if self._longest < self._tile or self._longest % self._tile:
            raise ConfigError(
                "max_img_size",
                got=self._longest,
                expected=f"a multiple of the tile's side, {self._tile}",
                fix=f"use {max(1, round(self._longest / self._tile)) * self._tile}",
            )
        self._image_token = settings.special_tokens.get("image_token", "<|image|>")
        self._global_token = settings.special_tokens.get("global_image_token", "<|global_image|>")
        self.placeholders: Mapping[MediaKind, str] = {"image": self._image_token}

    def image(self, header: MediaHeader, images_in_sample: int, number: int = 1) -> Expansion:
        """The global view, then the grid row by row; an image of one tile is its own global view."""
        rows, columns = self._grid(*require_image(header))
        run = Run(self._image_token, self._tokens)
        pieces: list[str | Run] = [f"<image: {number - 1}>"] if images_in_sample > 1 else []
        pieces += [self._global_token, run]
        tiles = 1
        if rows * columns > 1:
            tiles += rows * columns
            for row in range(1, rows + 1):
                for column in range(1, columns + 1):
                    pieces += [f"<row_{row}_col_{column}>", run]
        patches = tiles * self._tile_patches
        return Expansion(pieces=tuple(pieces), patches=patches, max_patches=self._tile_patches, tiles=tiles)

    def processor_kwargs(self) -> ProcessorKwargs:
        """The longest side, where it is limited."""
        return {} if self._limit is None else {"images_kwargs": {"max_img_size": self._limit}}

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles. The scale is taken first and in floats: 364x273 has four rows because of it."""
        long, short = max(height, width), min(height, width)
        new_long = self._longest if self._forced else min(self._longest, math.ceil(long / self._tile) * self._tile)
        scale = new_long / long
        new_short = max(math.ceil(short * scale / self._tile) * self._tile, self._tile)
        long_tiles, short_tiles = new_long // self._tile, new_short // self._tile
        return (short_tiles, long_tiles) if width >= height else (long_tiles, short_tiles)
