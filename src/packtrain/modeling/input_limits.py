"""The media limits of a run in a processor's own files, so that loading them gives the same tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from packtrain.core.errors import PacktrainError, RecordError
from packtrain.core.values import MediaHeader, MediaLimits
from packtrain.families.family import ProcessorSettings, Rule
from packtrain.families.registry import load_rule

_PROCESSOR = "processor_config.json"
_FILES = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
_OLD_BOUNDS = ("min_pixels", "max_pixels")  # which would overrule `size`
_SAMPLING = ("num_frames", "fps")
# Media by which two rules are compared: small, usual, large and long ones.
_SIDES = ((20, 28), (224, 224), (480, 640), (1500, 2000), (3000, 240), (4032, 3024))
_CLIPS = ((8, 4.0), (30, 10.0), (240, 24.0), (1800, 30.0))
Part = Mapping[str, Any]


def limited_parts(settings: ProcessorSettings, limits: MediaLimits) -> dict[str, Part] | None:
    """Image and video settings with these limits in them; None where they cannot say the same as the limits do."""
    family = load_rule(settings, limits)
    if family is None:
        return None
    given = family.processor_kwargs()
    found: dict[str, Part] = {}
    if images := given.get("images_kwargs"):
        kept = {
            name: value for name, value in settings.image.items() if name not in _OLD_BOUNDS or "size" not in images
        }
        found["image_processor"] = {**kept, **images}
    video = settings.video or settings.image
    if "video" in family.placeholders and (given.get("videos_kwargs") or "image_processor" in found):
        sampled = any(getattr(limits, name) is not None for name in (*_SAMPLING, "max_frames"))
        own = given.get("videos_kwargs", {}) if sampled else {}
        kept = {name: value for name, value in video.items() if name not in _SAMPLING or not sampled}
        found["video_processor"] = {**kept, **own}  # with nulls: classes have defaults of their own
    changed = replace(
        settings, image=found.get("image_processor", settings.image), video=found.get("video_processor", settings.video)
    )
    plain = load_rule(changed, MediaLimits())
    return found if plain is not None and _counts(plain) == _counts(family) else None


def write_limits(folder: Path, parts: Mapping[str, Part]) -> None:
    """Put the settings where the files of a folder have them."""
    outer = _read(folder / _PROCESSOR)
    for name, part in parts.items():
        if name in outer:
            outer[name] = dict(part)
            _write(folder / _PROCESSOR, outer)
        else:
            _write(folder / _FILES[name], dict(part))


def _counts(family: Rule) -> list[Any]:
    """What a rule makes of media of many sizes; a medium that it refuses, by the words."""
    media: list[MediaHeader] = [MediaHeader(kind="image", height=height, width=width) for height, width in _SIDES]
    if "video" in family.placeholders:
        media += [
            MediaHeader(kind="video", height=height, width=width, frames=frames, fps=fps, seconds=frames / fps)
            for height, width in _SIDES[1:4]
            for frames, fps in _CLIPS
        ]
    found: list[Any] = []
    for header in media:
        try:
            found.append(family.image(header, 1) if header.kind == "image" else family.video(header))
        except (PacktrainError, RecordError) as error:
            found.append(str(error))
    return found


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
