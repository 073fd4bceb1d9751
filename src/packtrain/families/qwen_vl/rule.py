"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: sides rounded to merged patches within a budget of pixels.

grid: patches along (time, height, width); merge_size x merge_size patches become one token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from packtrain.core.errors import RecordError
from packtrain.core.values import MediaHeader, MediaKind, MediaLimits
from packtrain.families.family import Expansion, ProcessorKwargs, ProcessorSettings, Rule, Run
from packtrain.families.geometry import (
    FrameChoice,
    frame_choice,
    overlay,
    require_image,
    require_known,
    require_video,
    too_few_frames,
    video_settings,
)
from packtrain.families.shape import Config

IMAGE_DEFAULTS: Config = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
QWEN2_VIDEO_DEFAULTS: Config = {
    "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_frames": 4,
    "max_frames": 768,
    "max_video_tokens": 128000,
}
QWEN3_VIDEO_DEFAULTS: Config = {
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_frames": 4,
    "max_frames": 768,
    "max_video_tokens": 768,
    "fps": 2,
}
# Qwen2-VL and Qwen2.5-VL processors have no rate of their own and fail when asked to sample; the reference code uses 2.
REFERENCE_FPS = 2.0
MAX_RATIO = 200
PRESIZED_TOKENS = (4, 16_384)  # of an image that the data resize, before the processor


class Qwen2VL(Rule):
    """Images and videos keep their shape; every frame pair of a video is one temporal step."""

    name: ClassVar[str] = "qwen2_vl"
    video_defaults: ClassVar[Config] = QWEN2_VIDEO_DEFAULTS
    limit_names: ClassVar[tuple[str, ...]] = (
        *("min_pixels", "max_pixels", "video_min_pixels", "video_max_pixels", "num_frames", "fps", "max_frames"),
    )
    number_wins: ClassVar[bool] = True

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        super().__init__(settings, limits)
        require_known(
            settings,
            frozenset({"Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor"}),
            frozenset({"Qwen2VLVideoProcessor", "Qwen3VLVideoProcessor"}),
        )
        image = overlay(IMAGE_DEFAULTS, settings.image)
        self._video = overlay(self.video_defaults, video_settings(settings))
        self._image_pixels = _pixel_bounds(image, IMAGE_DEFAULTS)
        self._video_pixels = _pixel_bounds(self._video, self.video_defaults)
        if limits.min_pixels is not None:
            self._image_pixels = (limits.min_pixels, self._image_pixels[1])
        if limits.max_pixels is not None:
            self._image_pixels = (self._image_pixels[0], limits.max_pixels)
        self._resize_videos = limits.video_min_pixels is not None or limits.video_max_pixels is not None
        if limits.video_min_pixels is not None:
            self._video_pixels = (limits.video_min_pixels, self._video_pixels[1])
        if limits.video_max_pixels is not None:
            self._video_pixels = (self._video_pixels[0], limits.video_max_pixels)
        self._resize_images = limits.min_pixels is not None or limits.max_pixels is not None
        self._patch, self._merge = int(image["patch_size"]), int(image["merge_size"])
        self._max_frames = limits.max_frames
        self._frames = frame_choice(
            limits, self._video, fallback=FrameChoice(fps=REFERENCE_FPS), number_wins=self.number_wins
        )
        tokens = settings.special_tokens
        self._image_token = tokens.get("image_token", "<|image_pad|>")
        self._video_token = tokens.get("video_token", "<|video_pad|>")
        self._vision_start = tokens.get("vision_start_token", "<|vision_start|>")
        self._vision_end = tokens.get("vision_end_token", "<|vision_end|>")
        self.placeholders: Mapping[MediaKind, str] = {"image": self._image_token, "video": self._video_token}

    def image(self, header: MediaHeader, images_in_sample: int, number: int = 1) -> Expansion:
        """One run of tokens; the whole grid attends to itself."""
        height, width = require_image(header)
        height, width = _round_sides(height, width, self._patch * self._merge, *self._image_pixels)
        patches = (height // self._patch) * (width // self._patch)
        run = Run(self._image_token, patches // self._merge**2)
        return Expansion(pieces=(run,), patches=patches, max_patches=patches)

    def video(self, header: MediaHeader) -> Expansion:
        """Tokens of all temporal steps in one span, or each after its time (Qwen3-VL)."""
        height, width = require_video(header, rate=self._needs_rate())
        indices = self._sample(header)
        patch, temporal = int(self._video["patch_size"]), int(self._video["temporal_patch_size"])
        height, width = self._video_sides(height, width, len(indices))
        steps = -(-len(indices) // temporal)
        per_step = (height // patch) * (width // patch)
        return Expansion(
            pieces=self._video_pieces(header, indices, steps, per_step // int(self._video["merge_size"]) ** 2),
            patches=steps * per_step,
            max_patches=per_step,
            frames=len(indices),
            tiles=steps,
        )

    def processor_kwargs(self) -> ProcessorKwargs:
        """The pixel limits as `size` (with both bounds, as older versions ignore one alone) and the sampling."""
        videos = self._frames.kwargs()
        if self._max_frames is not None:
            videos["max_frames"] = self._max_frames
        if self._resize_videos:
            videos["size"] = {"shortest_edge": self._video_pixels[0], "longest_edge": self._video_pixels[1]}
        kwargs: ProcessorKwargs = {"videos_kwargs": videos}
        if self._resize_images:
            low, high = self._image_pixels
            kwargs["images_kwargs"] = {"size": {"shortest_edge": low, "longest_edge": high}}
        return kwargs

    def presized(self, height: int, width: int) -> tuple[int, int]:
        """Sides as `resized_height` and `resized_width` mean them: whole merged patches, within the bounds of Qwen's
        own tools. What is resized to them goes through the processor like any other image."""
        factor = self._patch * self._merge
        _refuse_ratio(height, width)
        low, high = PRESIZED_TOKENS[0] * factor**2, PRESIZED_TOKENS[1] * factor**2
        near = (max(factor, round(height / factor) * factor), max(factor, round(width / factor) * factor))
        if low <= near[0] * near[1] <= high:
            return near
        return _fit_volume(height, width, 1, 1, factor, low, high)

    def _needs_rate(self) -> bool:
        return self._frames.num_frames is None

    def _sample(self, header: MediaHeader) -> list[int]:
        total, temporal = header.frames, int(self._video["temporal_patch_size"])
        if self._frames.num_frames is not None:
            wanted = round(self._frames.num_frames / temporal) * temporal
        else:
            most = self._max_frames if self._max_frames is not None else int(self._video["max_frames"])
            most = math.floor(min(most, total) / temporal) * temporal
            exact = total / header.fps * float(self._frames.fps or REFERENCE_FPS)
            exact = min(max(exact, int(self._video["min_frames"])), most, total)
            wanted = math.floor(exact / temporal) * temporal
        if wanted > total or wanted < 1:
            raise too_few_frames(wanted, total)
        # The processor counts these steps in floats and for some pairs (14 of 17 frames) takes one too many, which
        # lies after the last frame; training leaves that one out.
        step = total / wanted
        return [int(step * position) for position in range(wanted)]

    def _video_sides(self, height: int, width: int, frames: int) -> tuple[int, int]:
        low, high = self._video_pixels
        factor = int(self._video["patch_size"]) * int(self._video["merge_size"])
        if self._video.get("cap_pixels_per_frame"):
            budget = int(int(self._video["max_video_tokens"]) * factor * factor * 0.9)
            share = budget * int(self._video["temporal_patch_size"]) // frames
            high = max(min(high, share), int(low * 1.05))
        return _round_sides(height, width, factor, low, high)

    def _video_pieces(
        self, header: MediaHeader, indices: list[int], steps: int, tokens_per_step: int
    ) -> tuple[str | Run, ...]:
        return (Run(self._video_token, steps * tokens_per_step),)


class Qwen25VL(Qwen2VL):
    """As Qwen2-VL; its full-attention layers see the whole image."""

    name: ClassVar[str] = "qwen2_5_vl"


class Qwen3VL(Qwen2VL):
    """As Qwen2-VL for images; videos share one budget over time, and each frame pair carries its time as text."""

    name: ClassVar[str] = "qwen3_vl"
    video_defaults: ClassVar[Config] = QWEN3_VIDEO_DEFAULTS
    # max_frames is not among them: the processor reads it from its own settings only and ignores the call's. Nor are
    # the pixels of a video: its processor counts those of all frames, where data mean those of each.
    limit_names: ClassVar[tuple[str, ...]] = ("min_pixels", "max_pixels", "num_frames", "fps")
    number_wins: ClassVar[bool] = False

    def _needs_rate(self) -> bool:
        return True

    def _sample(self, header: MediaHeader) -> list[int]:
        total, wanted = header.frames, self._frames.num_frames
        if wanted is None:
            wanted = int(total / header.fps * float(self._frames.fps or REFERENCE_FPS))
            wanted = min(max(wanted, int(self._video["min_frames"])), int(self._video["max_frames"]), total)
        if wanted < int(self._video["temporal_patch_size"]):
            raise too_few_frames(int(self._video["temporal_patch_size"]), wanted)
        positions = np.linspace(0, total - 1, wanted).round().astype(int)
        return [int(position) for position in positions]

    def _video_sides(self, height: int, width: int, frames: int) -> tuple[int, int]:
        low, high = self._video_pixels
        factor = int(self._video["patch_size"]) * int(self._video["merge_size"])
        temporal = int(self._video["temporal_patch_size"])
        if self._video.get("cap_pixels_per_frame"):
            cap = int(self._video["max_video_tokens"]) * factor * factor
            high = max(min(cap, high // frames), int(low * 1.05)) * frames
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        _refuse_ratio(height, width)
        return _fit_volume(height, width, frames, round(frames / temporal) * temporal, factor, low, high)

    def _video_pieces(
        self, header: MediaHeader, indices: list[int], steps: int, tokens_per_step: int
    ) -> tuple[str | Run, ...]:
        temporal = int(self._video["temporal_patch_size"])
        padded = indices + [indices[-1]] * (steps * temporal - len(indices))
        times = [index / header.fps for index in padded]
        pieces: list[str | Run] = []
        for first in range(0, len(times), temporal):
            middle = (times[first] + times[first + temporal - 1]) / 2
            run = Run(self._video_token, tokens_per_step)
            pieces += [f"<{middle:.1f} seconds>{self._vision_start}", run, self._vision_end]
        return tuple(pieces)


def _pixel_bounds(given: Config, defaults: Config) -> tuple[int, int]:
    """Fewest and most pixels; the older names min_pixels and max_pixels win over `size`."""
    size = {**defaults["size"], **{key: value for key, value in given["size"].items() if value is not None}}
    low = given.get("min_pixels") or size["shortest_edge"]
    high = given.get("max_pixels") or size["longest_edge"]
    return int(low), int(high)


def _refuse_ratio(height: int, width: int) -> None:
    if max(height, width) / min(height, width) > MAX_RATIO:
        raise RecordError("family", f"sides differ by more than {MAX_RATIO} times", f"{width}x{height}")


def _round_sides(height: int, width: int, factor: int, low: int, high: int) -> tuple[int, int]:
    """Sides as multiples of `factor` with an area between low and high."""
    _refuse_ratio(height, width)
    return _fit_volume(height, width, 1, 1, factor, low, high)


def _fit_volume(
    height: int, width: int, frames: int, counted_frames: int, factor: int, low: int, high: int
) -> tuple[int, int]:
    """The rounding of one frame, with the budget over all frames; float order as in the processors."""
    rounded_height = round(height / factor) * factor
    rounded_width = round(width / factor) * factor
    volume = counted_frames * rounded_height * rounded_width
    if volume > high:
        shrink = math.sqrt((frames * height * width) / high)
        rounded_height = max(factor, math.floor(height / shrink / factor) * factor)
        rounded_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif volume < low:
        grow = math.sqrt(low / (frames * height * width))
        rounded_height = math.ceil(height * grow / factor) * factor
        rounded_width = math.ceil(width * grow / factor) * factor
    return rounded_height, rounded_width
