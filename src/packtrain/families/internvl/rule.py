"""InternVL: the grid of tiles whose shape is nearest to the image's, and a thumbnail where it is cut at all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from packtrain.core.errors import RecordError
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

# crop_to_patches is not among them: the processor passes True whatever the image processor's own setting says
IMAGE_DEFAULTS: Config = {"size": {"height": 384, "width": 384}, "min_patches": 1, "max_patches": 12}
VIDEO_DEFAULTS: Config = {"size": {"height": 384, "width": 384}, "initial_shift": True}
IMAGE_SEQ_LENGTH = 256
PATCH = 14
# the processor class has no sampling of its own and fails when asked to sample; the published examples use 8 frames
REFERENCE_FRAMES = 8


class InternVL(Rule):
    """Every tile, thumbnail and video frame gives `image_seq_length` tokens."""

    name: ClassVar[str] = "internvl"
    limit_names: ClassVar[tuple[str, ...]] = ("num_frames", "fps")

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        super().__init__(settings, limits)
        require_known(settings, frozenset({"GotOcr2ImageProcessor"}), frozenset({"InternVLVideoProcessor"}))
        image = overlay(IMAGE_DEFAULTS, settings.image)
        video = overlay(VIDEO_DEFAULTS, video_settings(settings))
        self._tile = resize_sides(size_dict(image["size"], square=True), 1, 1)
        self._frame_size = size_dict(video["size"], square=True)
        self._grids = _grids(int(image["min_patches"]), int(image["max_patches"]))
        self._shift = video["initial_shift"]
        self._frames = frame_choice(limits, video, fallback=FrameChoice(num_frames=REFERENCE_FRAMES))
        self._patch = vision_patch(settings, published=PATCH, unwritten=PATCH)
        self._tokens = int(settings.processor.get("image_seq_length") or IMAGE_SEQ_LENGTH)
        tokens = settings.special_tokens
        self._start = tokens.get("start_image_token", "<img>")
        self._end = tokens.get("end_image_token", "</img>")
        self._context = tokens.get("context_image_token", "<IMG_CONTEXT>")
        self._video_token = tokens.get("video_token", "<video>")
        self.placeholders: Mapping[MediaKind, str] = {"image": self._context, "video": self._video_token}

    def image(self, header: MediaHeader, images_in_sample: int, number: int = 1) -> Expansion:
        """All tiles in one run between the image's two marks."""
        columns, rows = self._grid(*require_image(header))
        tiles = 1 if columns * rows == 1 else columns * rows + 1
        per_tile = (self._tile[0] // self._patch) * (self._tile[1] // self._patch)
        return Expansion(
            pieces=(self._start, Run(self._context, tiles * self._tokens), self._end),
            patches=tiles * per_tile,
            max_patches=per_tile,
            tiles=tiles,
        )

    def video(self, header: MediaHeader) -> Expansion:
        """One line per sampled frame, each with one uncut image."""
        height, width = require_video(header, rate=self._frames.num_frames is None)
        frames = self._sampled(header)
        height, width = resize_sides(self._frame_size, height, width)
        per_frame = (height // self._patch) * (width // self._patch)
        pieces: list[str | Run] = []
        for number in range(1, frames + 1):
            opening = f"Frame{number}: {self._start}"
            run = Run(self._context, self._tokens)
            pieces += [opening if number == 1 else f"\n{opening}", run, self._end]
        return Expansion(
            pieces=tuple(pieces), patches=frames * per_frame, max_patches=per_frame, frames=frames, tiles=frames
        )

    def check_sample(self, headers: Sequence[MediaHeader], expansions: Sequence[Expansion]) -> None:
        """Refuse videos that do not fit into one tensor."""
        require_equal_frames(headers, expansions)

    def processor_kwargs(self) -> ProcessorKwargs:
        """The sampling of frames."""
        return {"videos_kwargs": self._frames.kwargs()}

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Columns and rows; of grids equally near, the larger as long as the image fills more than half of it."""
        ratio, area = width / height, width * height
        best, least = (1, 1), math.inf
        for columns, rows in self._grids:
            difference = abs(ratio - columns / rows)
            if difference < least:
                best, least = (columns, rows), difference
            elif difference == least and area > 0.5 * self._tile[0] * self._tile[1] * columns * rows:
                best = columns, rows
        return best

    def _sampled(self, header: MediaHeader) -> int:
        wanted = self._frames.num_frames
        if wanted is None:
            wanted = int(header.frames / header.fps * float(self._frames.fps or 0))
        if wanted < 1 or wanted > header.frames:
            raise too_few_frames(wanted, header.frames)
        step = header.frames / wanted
        start = step / 2 if self._shift is True else float(self._shift)
        frames = math.ceil((header.frames - start) / step)
        # the processor holds positions in single precision, which can round the last one up to the end
        if frames < 1 or int(np.float32(start + step * (frames - 1))) >= header.frames:
            raise RecordError("family", "sampling reads past the last frame", f"{wanted} of {header.frames} frames")
        return frames


def _grids(fewest: int, most: int) -> tuple[tuple[int, int], ...]:
    """Every (columns, rows) with an allowed number of tiles, smaller numbers first."""
    sides = range(1, most + 1)
    allowed = [(columns, rows) for columns in sides for rows in sides if fewest <= columns * rows <= most]
    return tuple(sorted(allowed, key=lambda grid: grid[0] * grid[1]))
