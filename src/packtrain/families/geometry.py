"""The arithmetic that several families share: settings over defaults, resized sides, patch sides, frame choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.values import MediaHeader, MediaLimits
from packtrain.families.family import Expansion, NoRule, ProcessorKwargs, ProcessorSettings
from packtrain.families.shape import Config


def overlay(defaults: Config, given: Config) -> Config:
    """A processor class's defaults with the settings that are not null put over them."""
    return {**defaults, **{key: value for key, value in given.items() if value is not None}}


def video_settings(settings: ProcessorSettings) -> Config:
    """The video processor's settings; a folder without any of its own lends those of the image processor."""
    return settings.video or settings.image


def require_known(settings: ProcessorSettings, images: frozenset[str], videos: frozenset[str] = frozenset()) -> None:
    """Raise NoRule where the folder names another processor class, or switches resizing off."""
    for part, names, key in (
        (settings.image, images, "image_processor_type"),
        (settings.video, videos, "video_processor_type"),
    ):
        name = str(part.get(key) or "")
        plain = name.removesuffix("Fast").removesuffix("Pil")
        if name and names and plain not in names:
            raise NoRule(f"{key} {name}")
        if part.get("do_resize") is False:
            raise NoRule(f"{key} {name} without resizing")


def size_dict(value: Any, *, square: bool) -> dict[str, int]:
    """A size setting in its long form; a bare number means both sides where `square`, else the shortest edge."""
    if isinstance(value, Mapping):
        return {key: int(side) for key, side in value.items() if side is not None}
    if isinstance(value, (list, tuple)):
        return {"height": int(value[0]), "width": int(value[-1])}
    return {"height": int(value), "width": int(value)} if square else {"shortest_edge": int(value)}


def resize_sides(size: Mapping[str, int], height: int, width: int) -> tuple[int, int]:
    """Height and width after the plain resize: to fixed sides, or the shorter side to a number."""
    if "shortest_edge" in size and "longest_edge" not in size:
        edge = size["shortest_edge"]
        if width <= height:
            return int(edge * height / width), edge
        return edge, int(edge * width / height)
    if "height" in size and "width" in size:
        return size["height"], size["width"]
    raise NoRule(f"size {dict(size)}")


def vision_patch(settings: ProcessorSettings, *, published: int, unwritten: int) -> int:
    """Side of a patch of the vision encoder.

    `published` is what the family's checkpoints use, for a folder without a model config; `unwritten` is the config
    class's own default, which a saved config leaves out.
    """
    vision = settings.config.get("vision_config")
    if not isinstance(vision, Mapping):
        return published
    side = vision.get("patch_size") or unwritten
    return int(side[0] if isinstance(side, (list, tuple)) else side)


def require_image(header: MediaHeader) -> tuple[int, int]:
    """Height and width of an image that has pixels."""
    if header.width < 1 or header.height < 1:
        raise RecordError("family", "image without pixels", f"{header.width}x{header.height}")
    return header.height, header.width


def require_video(header: MediaHeader, *, rate: bool) -> tuple[int, int]:
    """Height and width of a video that has frames and, where `rate`, a frame rate."""
    if header.width < 1 or header.height < 1 or header.frames < 1:
        detail = f"{header.frames} frames of {header.width}x{header.height}"
        raise RecordError("family", "video without frames", detail)
    if rate and header.fps <= 0:
        raise RecordError("family", "video without a frame rate", f"fps {header.fps}")
    return header.height, header.width


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameChoice:
    """How frames are sampled: a fixed number, a rate per second, or (both None) all of them."""

    num_frames: int | None = None
    fps: float | None = None

    def kwargs(self) -> ProcessorKwargs:
        """Arguments of the video processor. Both names are given, as a missing one would be filled from its settings
        and refused beside the other; older processors cannot sample all frames, so those are not sampled."""
        sampled = self.num_frames is not None or self.fps is not None
        return {"do_sample_frames": sampled, "num_frames": self.num_frames, "fps": self.fps}


def frame_choice(limits: MediaLimits, video: Config, *, fallback: FrameChoice, number_wins: bool = True) -> FrameChoice:
    """The sampling that limits ask for, else the settings, else the fallback.

    `number_wins`: the processor reads its own num_frames even where the call says None, so fps cannot replace it.
    """
    own_number, own_fps = video.get("num_frames"), video.get("fps")
    if limits.num_frames is not None and limits.fps is not None:
        raise ConfigError(
            "limits num_frames and fps",
            got=f"num_frames {limits.num_frames} and fps {limits.fps}",
            expected="one of the two",
            fix="leave one out",
        )
    if limits.num_frames is not None:
        return FrameChoice(num_frames=limits.num_frames)
    if limits.fps is not None:
        if number_wins and own_number is not None:
            raise ConfigError(
                "limit fps",
                got=f"fps {limits.fps} with num_frames {own_number} in the processor's settings, which wins",
                expected="num_frames",
                fix="limit num_frames instead, or remove num_frames from the video processor's settings",
            )
        return FrameChoice(fps=limits.fps)
    if own_number is not None:
        return FrameChoice(num_frames=int(own_number))
    return FrameChoice(fps=own_fps) if own_fps is not None else fallback


def require_equal_frames(headers: Sequence[MediaHeader], expansions: Sequence[Expansion]) -> None:
    """Refuse a sample whose videos give different numbers of frames: the processor cannot put them into one tensor."""
    videos = (made for header, made in zip(headers, expansions, strict=True) if header.kind == "video")
    if len({expansion.frames for expansion in videos}) > 1:
        raise RecordError("family", "only videos of equal sampled length go into one sample")


def too_few_frames(wanted: int, total: int) -> RecordError:
    """The error for a video that is shorter than what has to be sampled from it."""
    return RecordError("family", "video with too few frames to sample", f"{wanted} requested of {total}")
