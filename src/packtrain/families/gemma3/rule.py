"""Gemma 3: one view of fixed size, and crops beside it where pan-and-scan is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaHeader, MediaKind, MediaLimits
from packtrain.families.family import Expansion, ProcessorKwargs, ProcessorSettings, Rule, Run
from packtrain.families.geometry import overlay, require_image, require_known, resize_sides, size_dict, vision_patch
from packtrain.families.shape import Config

IMAGE_DEFAULTS: Config = {"size": {"height": 224, "width": 224}}
# The processor passes these at every call, so the image processor's own pan-and-scan settings never take effect.
CALL_DEFAULTS: Config = {
    "do_pan_and_scan": False,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
IMAGE_SEQ_LENGTH = 256
PUBLISHED_PATCH = 14
CONFIG_PATCH = 16


class Gemma3(Rule):
    """Pan-and-scan is asked for by `images_kwargs` in the processor's settings, or its names directly in them."""

    name: ClassVar[str] = "gemma3"

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        super().__init__(settings, limits)
        require_known(settings, frozenset({"Gemma3ImageProcessor"}))
        image = overlay(IMAGE_DEFAULTS, settings.image)
        asked = {**settings.processor, **(settings.processor.get("images_kwargs") or {})}
        self._asked = {name: asked[name] for name in CALL_DEFAULTS if asked.get(name) is not None}
        self._scan = {**CALL_DEFAULTS, **self._asked}
        self._view = resize_sides(size_dict(image["size"], square=True), 1, 1)
        self._patch = vision_patch(settings, published=PUBLISHED_PATCH, unwritten=CONFIG_PATCH)
        self._tokens = int(settings.processor.get("image_seq_length") or IMAGE_SEQ_LENGTH)
        tokens = settings.special_tokens
        self._begin = tokens.get("boi_token", "<start_of_image>")
        self._end = tokens.get("eoi_token", "<end_of_image>")
        self._soft = tokens.get("image_token", "<image_soft_token>")
        self.placeholders: Mapping[MediaKind, str] = {"image": self._begin}

    def image(self, header: MediaHeader, images_in_sample: int, number: int = 1) -> Expansion:
        """The view alone, or announced and followed by its crops."""
        height, width = require_image(header)
        crops = self._crops(height, width) if self._scan["do_pan_and_scan"] else 0
        view: list[str | Run] = [f"\n\n{self._begin}", Run(self._soft, self._tokens), f"{self._end}\n\n"]
        pieces = view
        if crops:
            pieces = ["Here is the original image ", *view, " and here are some crops to help you see better "]
            for crop in range(crops):
                pieces += [*([" "] if crop else []), *view]
        per_view = (self._view[0] // self._patch) * (self._view[1] // self._patch)
        return Expansion(pieces=tuple(pieces), patches=(1 + crops) * per_view, max_patches=per_view, tiles=1 + crops)

    def processor_kwargs(self) -> ProcessorKwargs:
        """Pan-and-scan, where it is asked for."""
        return {"images_kwargs": dict(self._asked)} if self._asked else {}

    def _crops(self, height: int, width: int) -> int:
        """Crops along the longer side; none for shapes near a square or crops that would be too small."""
        long, short = max(height, width), min(height, width)
        smallest = int(self._scan["pan_and_scan_min_crop_size"])
        if long / short < self._scan["pan_and_scan_min_ratio_to_activate"]:
            return 0
        crops = min(math.floor(long / smallest), math.floor(long / short + 0.5))
        crops = min(int(self._scan["pan_and_scan_max_num_crops"]), max(2, crops))
        side = math.ceil(long / crops)
        if min(side, short) < smallest:
            return 0
        if side * (crops - 1) >= long:
            raise RecordError("family", "image too small for its crops", f"{width}x{height}")
        return crops
