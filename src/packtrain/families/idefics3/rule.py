"""Idefics3 and SmolVLM: the longer side to a fixed length, then square tiles and one global view of the same size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import ClassVar

import numpy as np

from packtrain.core.errors import RecordError, missing_package_error
from packtrain.core.values import MediaHeader, MediaKind, MediaLimits
from packtrain.families.family import Expansion, ProcessorKwargs, ProcessorSettings, Rule, Run
from packtrain.families.geometry import (
    overlay,
    require_equal_frames,
    require_image,
    require_known,
    require_video,
    size_dict,
    video_settings,
    vision_patch,
)
from packtrain.families.shape import Config

IMAGE_DEFAULTS: Config = {
    "size": {"longest_edge": 4 * 364},
    "max_image_size": {"longest_edge": 364},
    "do_image_splitting": True,
}
VIDEO_DEFAULTS: Config = {"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}}
IMAGE_SEQ_LEN = 169
LARGEST_SIDE = 4096  # the processors shrink whatever is longer after the first resize
PUBLISHED_PATCH = 14
CONFIG_PATCH = 32
# SmolVLM2's published sampling; the processor class has none of its own and cannot sample without
SMOLVLM_FPS, SMOLVLM_FRAMES = 1.0, 64
SKIPPED_SECONDS = 1  # left out at both ends of a long video

# The processor ignores the folder's template as soon as a conversation holds a video, and writes this instead.
SMOLVLM_VIDEO_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{ message['role'] | capitalize }}"
    "{{ ':' if message['content'][0]['type'] == 'image' else ': ' }}"
    "{% for part in message['content'] %}"
    "{{ part['text'] if part['type'] == 'text' else '<' + part['type'] + '>' }}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


class Idefics3(Rule):
    """Every tile and the global view give `image_seq_len` tokens."""

    name: ClassVar[str] = "idefics3"
    limit_names: ClassVar[tuple[str, ...]] = ("max_img_size",)

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        super().__init__(settings, limits)
        require_known(
            settings,
            frozenset({"Idefics3ImageProcessor", "SmolVLMImageProcessor"}),
            frozenset({"SmolVLMVideoProcessor"}),
        )
        image = overlay(IMAGE_DEFAULTS, settings.image)
        self._limit = limits.max_img_size
        self._size = size_dict(image["size"], square=True) if self._limit is None else {"longest_edge": self._limit}
        self._tile = int(image["max_image_size"]["longest_edge"])
        self._split = bool(image["do_image_splitting"])
        self._patch = vision_patch(settings, published=PUBLISHED_PATCH, unwritten=CONFIG_PATCH)
        self._tokens = int(settings.processor.get("image_seq_len") or IMAGE_SEQ_LEN)
        self._read_tokens(settings.special_tokens)
        self.placeholders: Mapping[MediaKind, str] = {"image": self._image_token}

    def _read_tokens(self, tokens: Mapping[str, str]) -> None:
        self._image_token, self._fake_token = "<image>", "<fake_token_around_image>"
        self._global_token = "<global-img>"

    def image(self, header: MediaHeader, images_in_sample: int, number: int = 1) -> Expansion:
        """Tiles row by row, then the global view; an image of one tile is its own global view."""
        rows, columns = self._grid(*require_image(header))
        pieces: list[str | Run] = []
        run = Run(self._image_token, self._tokens)
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                pieces += [f"{self._fake_token}<row_{row}_col_{column}>", run]
            pieces.append("\n")
        if rows:
            pieces.append("\n")
        pieces += self._single()
        tile_patches = (self._tile // self._patch) ** 2
        tiles = rows * columns + 1
        return Expansion(pieces=tuple(pieces), patches=tiles * tile_patches, max_patches=tile_patches, tiles=tiles)

    def processor_kwargs(self) -> ProcessorKwargs:
        """The longest edge, where it is limited."""
        return {} if self._limit is None else {"images_kwargs": {"size": {"longest_edge": self._limit}}}

    def _single(self) -> list[str | Run]:
        opening = f"{self._fake_token}{self._global_token}"
        return [opening, Run(self._image_token, self._tokens), self._fake_token]

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles, (0, 0) where the image is not cut."""
        if not self._split:
            return 0, 0
        if "longest_edge" in self._size:
            height, width = _below(*_to_longest(height, width, self._size["longest_edge"]), LARGEST_SIDE)
        else:
            height, width = self._size["height"], self._size["width"]
        ratio = width / height
        if width >= height:
            width = math.ceil(width / self._tile) * self._tile
            height = math.ceil(int(width / ratio) / self._tile) * self._tile
        else:
            height = math.ceil(height / self._tile) * self._tile
            width = math.ceil(int(height * ratio) / self._tile) * self._tile
        if not height or not width:
            raise RecordError("family", "image too thin for the processor", f"{width}x{height} after resizing")
        if height <= self._tile and width <= self._tile:
            return 0, 0
        return height // self._tile, width // self._tile


class SmolVLM(Idefics3):
    """As Idefics3 for images; a video is a text with one uncut image per sampled frame.

    The text names the number of frames in words.
    """

    name: ClassVar[str] = "smolvlm"
    video_chat_template: ClassVar[str | None] = SMOLVLM_VIDEO_TEMPLATE
    limit_names: ClassVar[tuple[str, ...]] = ("max_img_size", "num_frames", "fps")

    def __init__(self, settings: ProcessorSettings, limits: MediaLimits) -> None:
        super().__init__(settings, limits)
        video = overlay(VIDEO_DEFAULTS, video_settings(settings))
        sampling = video.get("video_sampling") or {}
        fps = sampling.get("fps") or video.get("fps") or SMOLVLM_FPS
        frames = sampling.get("max_frames") or video.get("num_frames") or SMOLVLM_FRAMES
        self._fps = fps if limits.fps is None else limits.fps
        self._max_frames = int(frames if limits.num_frames is None else limits.num_frames)
        self._frame_side = int(video["max_image_size"]["longest_edge"])
        self.placeholders = {"image": self._image_token, "video": self._video_token}

    def check_sample(self, headers: Sequence[MediaHeader], expansions: Sequence[Expansion]) -> None:
        """Refuse what the processor gets wrong: it pads videos to the longest, and lets videos replace images."""
        videos = [header for header in headers if header.kind == "video"]
        if videos and len(videos) < len(headers):
            raise RecordError("family", "smolvlm takes images or videos in one sample, not both")
        require_equal_frames(headers, expansions)

    def _read_tokens(self, tokens: Mapping[str, str]) -> None:
        self._image_token = tokens.get("image_token", "<image>")
        self._fake_token = tokens.get("fake_image_token", "<fake_token_around_image>")
        self._global_token = tokens.get("global_image_token", "<global-img>")
        self._video_token = tokens.get("video_token", "<video>")

    def video(self, header: MediaHeader) -> Expansion:
        """Introduction, then time and image of each frame. Where the header has no duration it is frames / fps."""
        require_video(header, rate=True)
        num2words = _num2words()
        seconds = header.seconds or header.frames / header.fps
        indices = self._sample(header, seconds)
        lasting = timedelta(seconds=int(seconds))
        pieces: list[str | Run] = [
            f"You are provided the following series of {num2words(len(indices))} frames "
            f"from a {lasting} [H:MM:SS] video.\n"
        ]
        for index in indices:
            second = index / header.fps
            pieces.append(f"\nFrame from {int(second // 60):02d}:{int(second % 60):02d}:")
            pieces += self._single()
        pieces.append("\n\n")
        frame_patches = (self._frame_side // self._patch) ** 2
        return Expansion(
            pieces=tuple(pieces),
            patches=len(indices) * frame_patches,
            max_patches=frame_patches,
            frames=len(indices),
            tiles=len(indices),
        )

    def processor_kwargs(self) -> ProcessorKwargs:
        """Sampling stands flat here: the processor adds flat defaults itself and refuses the same name twice."""
        sampling = {"do_sample_frames": True, "num_frames": self._max_frames, "fps": self._fps}
        return {**super().processor_kwargs(), **sampling}

    def _sample(self, header: MediaHeader, seconds: float) -> list[int]:
        wanted = max(1, min(round(self._fps * seconds), self._max_frames))
        first, last = 0, header.frames - 1
        if seconds - 2 * SKIPPED_SECONDS > self._max_frames * self._fps:
            first = int(SKIPPED_SECONDS * header.fps)
            last = min(int(header.frames - SKIPPED_SECONDS * header.fps), last)
        if first >= last:
            first, last = 0, header.frames - 1
        return [int(index) for index in np.unique(np.linspace(first, last, wanted, dtype=int))]


def _num2words() -> Callable[[int], str]:
    try:
        from num2words import num2words  # starting it reads its tables of all languages
    except ImportError as error:
        raise missing_package_error(error) from None
    return num2words  # type: ignore[no-any-return]


def _to_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """The longer side to `longest`; the other follows, made even."""
    ratio = width / height
    if width >= height:
        other = int(longest / ratio)
        return max(other + other % 2, 1), max(longest, 1)
    other = int(longest * ratio)
    return max(longest, 1), max(other + other % 2, 1)


def _below(height: int, width: int, most: int) -> tuple[int, int]:
    """The same shape with no side above `most`."""
    ratio = width / height
    if width >= height and width > most:
        height, width = int(most / ratio), most
    elif height > width and height > most:
        height, width = most, int(most * ratio)
    return max(height, 1), max(width, 1)
