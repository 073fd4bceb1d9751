"""LLaVA, LLaVA-NeXT and LLaVA-OneVision: one fixed view, and for the later two a grid of tiles beside it.

The grid is the entry of `image_grid_pinpoints` that wastes least; tokens of its padding are not written, and each row
of the grid ends in one newline token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import MediaHeader, MediaKind, MediaLimits
from packtrain.families.family import Expansion, ProcessorKwargs, ProcessorSettings, Rule, Run
from packtrain.families.geometry import (
    FrameChoice,
    frame_choice,
    overlay,
    require_equal_frames,
    require_image,
    require_known,
    require_video,
    resize_sides,
    size_dict,
    too_few_frames,
    video_settings,
    vision_patch,
)
from packtrain.families.shape import Config

CLIP_DEFAULTS: Config = {
    "size": {"shortest_edge": 224},
    "crop_size": {"height": 224, "width": 224},
    "do_center_crop": True,
}
SIGLIP_DEFAULTS: Config = {"size": {"height": 224, "width": 224}, "do_center_crop": False}
LLAVA_PROCESSORS: Mapping[str, Config] = {
    "CLIPImageProcessor": CLIP_DEFAULTS,
    "LlavaImageProcessor": {**CLIP_DEFAULTS, "do_pad": False},
    "SiglipImageProcessor": SIGLIP_DEFAULTS,
}
NEXT_DEFAULTS: Config = {
    **CLIP_DEFAULTS,
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
}
ONEVISION_SIDE = 384
ONEVISION_DEFAULTS: Config = {
    "size": {"height": ONEVISION_SIDE, "width": ONEVISION_SIDE},
    "image_grid_pinpoints": [[h * ONEVISION_SIDE, w * ONEVISION_SIDE] for h in range(1, 7) for w in range(1, 7)],
}
ONEVISION_VIDEO_DEFAULTS: Config = {"size": {"height": ONEVISION_SIDE, "width": ONEVISION_SIDE}}
PUBLISHED_PATCH = 14
CONFIG_PATCH = {"clip_vision_model": 32, "siglip_vision_model": 16}
ONEVISION_TOKENS = 729


class Llava(Rule):
    """One view of fixed size, whatever the image's shape (unless the settings switch the centre crop off)."""

    name: ClassVar[str] = "llava"

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        super().__init__(settings, limits)
        require_known(settings, frozenset(LLAVA_PROCESSORS))
        kind = str(settings.image.get("image_processor_type") or "CLIPImageProcessor")
        image = overlay(LLAVA_PROCESSORS[kind.removesuffix("Fast").removesuffix("Pil")], settings.image)
        square = kind.startswith("Siglip")
        self._size = size_dict(image["size"], square=square)
        self._crop = size_dict(image["crop_size"], square=True) if image["do_center_crop"] else {}
        self._pad = bool(image.get("do_pad")) and kind.startswith("Llava")
        self._patch = _patch(settings)
        self._correction = _correction(settings.processor)
        self._image_token = _media_token(settings, "image_token", "<image>")
        self.placeholders: Mapping[MediaKind, str] = {"image": self._image_token}

    def image(self, header: MediaHeader, images_in_sample: int, number: int = 1) -> Expansion:
        """One run; with CLIP's class token kept or dropped as the processor's settings say."""
        height, width = require_image(header)
        if self._pad:
            height = width = max(height, width)
        height, width = resize_sides(self._crop or self._size, height, width)
        patches = (height // self._patch) * (width // self._patch)
        run = Run(self._image_token, patches + self._correction)
        return Expansion(pieces=(run,), patches=patches, max_patches=patches)


class LlavaNext(Rule):
    """A fixed view and a grid of tiles of the same size."""

    name: ClassVar[str] = "llava_next"

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        super().__init__(settings, limits)
        require_known(settings, frozenset({"LlavaNextImageProcessor"}))
        image = overlay(NEXT_DEFAULTS, settings.image)
        self._view, self._cut = _view_and_cut(image)
        self._pinpoints = [(int(height), int(width)) for height, width in image["image_grid_pinpoints"]]
        self._patch = _patch(settings)
        self._correction = _correction(settings.processor)
        self._image_token = _media_token(settings, "image_token", "<image>")
        self.placeholders: Mapping[MediaKind, str] = {"image": self._image_token}

    def image(self, header: MediaHeader, images_in_sample: int, number: int = 1) -> Expansion:
        """The view's tokens, then the grid's with its newlines, as one run."""
        height, width = require_image(header)
        best = best_pinpoint(height, width, self._pinpoints)
        rows, columns = self._view[0] // self._patch, self._view[1] // self._patch
        scale = best[0] // self._view[0], best[1] // self._view[1]
        kept_height, kept_width = unpad(height, width, rows * scale[0], columns * scale[1])
        tokens = kept_height * kept_width + kept_height + rows * columns + self._correction
        tiles = 1 + math.ceil(best[0] / self._cut) * math.ceil(best[1] / self._cut)
        per_tile = rows * columns
        return Expansion(
            pieces=(Run(self._image_token, tokens),), patches=tiles * per_tile, max_patches=per_tile, tiles=tiles
        )


class LlavaOneVision(Rule):
    """Tiles for the only image of a sample; several images, and the frames of a video, are one view each."""

    name: ClassVar[str] = "llava_onevision"
    limit_names: ClassVar[tuple[str, ...]] = ("num_frames", "fps")

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        super().__init__(settings, limits)
        require_known(
            settings, frozenset({"LlavaOnevisionImageProcessor"}), frozenset({"LlavaOnevisionVideoProcessor"})
        )
        image = overlay(ONEVISION_DEFAULTS, settings.image)
        video = overlay(ONEVISION_VIDEO_DEFAULTS, video_settings(settings))
        self._view, self._cut = _view_and_cut(image)
        self._frame_size = size_dict(video["size"], square=False)
        self._pinpoints = [(int(height), int(width)) for height, width in image["image_grid_pinpoints"]]
        self._frames = frame_choice(limits, video, fallback=FrameChoice())
        self._patch = vision_patch(settings, published=PUBLISHED_PATCH, unwritten=CONFIG_PATCH["siglip_vision_model"])
        self._tokens = int(settings.processor.get("num_image_tokens") or ONEVISION_TOKENS)
        self._most = _most_tiles(str(settings.processor.get("vision_aspect_ratio") or "anyres_max_9"))
        self._correction = _dropped(settings.processor)
        self._image_token = _media_token(settings, "image_token", "<image>")
        self._video_token = _media_token(settings, "video_token", "<video>")
        self.placeholders: Mapping[MediaKind, str] = {"image": self._image_token, "video": self._video_token}

    def image(self, header: MediaHeader, images_in_sample: int, number: int = 1) -> Expansion:
        """The view and the grid (shrunk where it has too many tokens), or the view with one newline."""
        height, width = require_image(header)
        per_tile = (self._view[0] // self._patch) * (self._view[1] // self._patch)
        if images_in_sample > 1:
            run = Run(self._image_token, self._tokens + 1 + self._correction)
            return Expansion(pieces=(run,), patches=per_tile, max_patches=per_tile)
        best = best_pinpoint(height, width, self._pinpoints)
        side = math.isqrt(self._tokens)
        scale = best[0] // self._view[0], best[1] // self._view[1]
        kept_height, kept_width = unpad(height, width, side * scale[0], side * scale[1])
        ratio = math.sqrt(kept_height * kept_width / (self._most * side**2))
        if ratio > 1.1:
            kept_height, kept_width = int(kept_height // ratio), int(kept_width // ratio)
        tokens = kept_height * kept_width + kept_height + self._tokens + self._correction
        tiles = 1 + math.ceil(best[0] / self._cut) * math.ceil(best[1] / self._cut)
        return Expansion(
            pieces=(Run(self._image_token, tokens),), patches=tiles * per_tile, max_patches=per_tile, tiles=tiles
        )

    def video(self, header: MediaHeader) -> Expansion:
        """Every frame pooled by two, and one newline for the whole video.

        Processors before transformers 5.22 refuse some numbers of frames that this takes (a rate that gives less than
        one frame, a step that is not exact in floats).
        """
        height, width = require_video(header, rate=self._frames.fps is not None)
        frames = self._sampled(header)
        pooled = math.ceil(math.isqrt(self._tokens) / 2)
        height, width = resize_sides(self._frame_size, height, width)
        per_frame = (height // self._patch) * (width // self._patch)
        run = Run(self._video_token, frames * pooled * pooled + 1)
        return Expansion(pieces=(run,), patches=frames * per_frame, max_patches=per_frame, frames=frames, tiles=frames)

    def check_sample(self, headers: Sequence[MediaHeader], expansions: Sequence[Expansion]) -> None:
        """Refuse videos that do not fit into one tensor."""
        require_equal_frames(headers, expansions)

    def processor_kwargs(self) -> ProcessorKwargs:
        """The sampling of frames."""
        return {"videos_kwargs": self._frames.kwargs()}

    def _sampled(self, header: MediaHeader) -> int:
        frames = self._frames.num_frames
        if frames is None and self._frames.fps is not None:
            frames = max(1, int(header.frames / header.fps * self._frames.fps))
        if frames is not None and frames > header.frames:
            raise too_few_frames(frames, header.frames)
        return header.frames if frames is None else frames


def best_pinpoint(height: int, width: int, pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The (height, width) that keeps most of the image and then wastes least; the first of equals."""
    best, kept_most, wasted_least = pinpoints[0], 0, math.inf
    for target_height, target_width in pinpoints:
        scale = min(target_width / width, target_height / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        wasted = target_width * target_height - kept
        if kept > kept_most or (kept == kept_most and wasted < wasted_least):
            best, kept_most, wasted_least = (target_height, target_width), kept, wasted
    return best


def unpad(height: int, width: int, grid_height: int, grid_width: int) -> tuple[int, int]:
    """Rows and columns of the grid's tokens that are not padding around an image of this shape."""
    if not grid_height or not grid_width:
        raise RecordError("family", "tiles larger than every grid", f"{width}x{height}")
    if width / height > grid_width / grid_height:
        filled = int(round(height * (grid_width / width), 7))
        return grid_height - (grid_height - filled) // 2 * 2, grid_width
    filled = int(round(width * (grid_height / height), 7))
    return grid_height, grid_width - (grid_width - filled) // 2 * 2


def _patch(settings: ProcessorSettings) -> int:
    vision = settings.config.get("vision_config")
    kind = str(vision.get("model_type")) if isinstance(vision, Mapping) else ""
    encoder = vision_patch(settings, published=PUBLISHED_PATCH, unwritten=CONFIG_PATCH.get(kind, PUBLISHED_PATCH))
    return int(settings.processor.get("patch_size") or encoder)


def _correction(processor: Config) -> int:
    """Tokens beside the patches: what the encoder adds, less the first where the strategy drops it."""
    return int(processor.get("num_additional_image_tokens") or 0) + _dropped(processor)


def _dropped(processor: Config) -> int:
    return -1 if processor.get("vision_feature_select_strategy") == "default" else 0


def _view_and_cut(image: Config) -> tuple[tuple[int, int], int]:
    """Sides of every view and tile, and the step at which the grid is cut into tiles."""
    view = resize_sides(size_dict(image["size"], square=False), 1, 1)
    crop = size_dict(image["crop_size"], square=True) if image.get("crop_size") else {}
    cut = crop.get("height") or view[0]
    return (resize_sides(crop, 1, 1) if image.get("do_center_crop") else view), cut


def _media_token(settings: ProcessorSettings, name: str, default: str) -> str:
    return str(settings.special_tokens.get(name) or settings.processor.get(name) or default)


def _most_tiles(aspect_ratio: str) -> int:
    digits = aspect_ratio.removeprefix("anyres_max_")
    if not digits.isdigit():
        raise ConfigError(
            "vision_aspect_ratio",
            got=aspect_ratio,
            expected="anyres_max_N with a number N",
            fix="fix it in the model folder's processor_config.json",
        )
    return int(digits)
