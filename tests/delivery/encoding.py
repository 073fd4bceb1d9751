"""What the tests of encoding share: media files, records that show them in every way, tiny models."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from packtrain.core.values import (
    Media,
    MediaHeader,
    MediaLimits,
    MediaRef,
    Message,
    Part,
    PartLimits,
    Record,
    Text,
    TokenIds,
)
from packtrain.delivery.encode.encode import SampleEncoder
from packtrain.families.encoder import RecordEncoder
from packtrain.families.part_limits import with_limits
from packtrain.families.registry import load_rule
from packtrain.measuring.request import Request
from packtrain.records.media import MediaStore
from packtrain.records.source import SourceSpec

sys.path.append(str(Path(__file__).parents[1] / "measuring"))  # conversations, as the tests of measuring make them

TEXT_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma3_text")
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "llava_onevision", "internvl")
IMAGE_FAMILIES = (*VIDEO_FAMILIES, "idefics3", "llava", "llava_next", "gemma3")
QWEN = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
IMAGES = {"photo.png": (120, 90), "large.png": (333, 250), "tall.png": (40, 200), "wide.png": (512, 40)}
VIDEOS = {"slow.mkv": (24, 8), "other.mkv": (24, 8)}  # frames and rate


def medium(name: str, **limits: Any) -> Media:
    kind: Any = "image" if name.endswith(("png", "jpg")) else "video"
    return Media(kind, MediaRef(name=name, path=name), PartLimits(**limits) if limits else None)


def record(*parts: Part | str, answer: str = "a red circle, 🙂 and a naïve square") -> Record:
    """A question of texts and media (by file name), and its answer."""
    names = (*IMAGES, *VIDEOS)
    asked = tuple((medium(p) if p in names else Text(p)) if isinstance(p, str) else p for p in parts)
    messages = (Message(role="user", parts=asked), Message(role="assistant", parts=(Text(answer),)))
    return Record(id="r7", origin="data.jsonl:8", source="s", messages=messages)


def twice(first: Record, second: Record) -> Record:
    """Both conversations in one."""
    return replace(first, messages=first.messages + second.messages)


TEXTS = {
    "text": record("hello there"),
    "turns": twice(record("one", answer="two"), record("three", answer="four 北京")),
    "empty question": record("", answer="something"),
    "plain pair": replace(record("The sky is\n", answer="\nblue."), plain=True),
    "tokens": replace(record(), messages=(), tokens=TokenIds(ids=tuple(range(40, 50)), supervised=((0, 2), (5, 10)))),
}
SHOWN = {
    "image": record("photo.png", "what?\n"),
    "wide image": record("look: ", "wide.png"),
    "images": record("large.png", "and", "tall.png", "then", "photo.png", "?"),
    "turns": twice(record("photo.png", "this?"), record("and ", "wide.png")),
}
PLAYED = {
    "video": record("look: ", "slow.mkv", "what?"),
    "videos": record("slow.mkv", "and", "other.mkv", "?"),
}
MIXED = {"mixed": record("slow.mkv", "photo.png", "between", "large.png", "other.mkv", "?")}


def records_for(family: str) -> dict[str, Record]:
    """Every kind of record that a family takes."""
    found = dict(TEXTS)
    if family in IMAGE_FAMILIES:
        found |= {f"image, {name}": shown for name, shown in SHOWN.items()}
    if family in VIDEO_FAMILIES:
        found |= PLAYED
    if family in VIDEO_FAMILIES and family != "smolvlm":
        found |= MIXED
    return found


def write_image(path: Path, width: int, height: int, **options: Any) -> Path:
    """An image full of noise."""
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, **options)
    return path


def write_video(path: Path, frames: int, fps: int, size: tuple[int, int] = (64, 48)) -> Path:
    """A video whose frames get brighter."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        (stream.width, stream.height), stream.pix_fmt = size, "yuv420p"
        for number in range(frames):
            shade = 20 + (200 * number + len(path.stem)) // frames
            pixels = np.full((size[1], size[0], 3), shade, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def write_media(folder: Path) -> Path:
    """All files that the records show."""
    for name, size in IMAGES.items():
        write_image(folder / name, *size)
    for name, (frames, fps) in VIDEOS.items():
        write_video(folder / name, frames, fps)
    return folder


def request_for(model: Path, root: Path, *, limits: dict[str, Any] | None = None, **options: Any) -> Request:
    spec = SourceSpec(name="s", path=str(root), format="jsonl", media_root=str(root))
    return Request(specs=(spec,), model=str(model), limits=MediaLimits(**(limits or {})), **options)


def small_tiles(folder: Path, family: str) -> Path:
    """The model folder with small tiles, where the family would make many large ones of every picture."""
    from conversations import shrink

    return folder if family in (*QWEN, *TEXT_FAMILIES, "gemma3") else shrink(folder)


def headers_of(record: Record, store: MediaStore) -> tuple[MediaHeader, ...]:
    return tuple(with_limits(store.header(medium.kind, medium.ref), medium) for medium in record.media())


def pricing(encoder: SampleEncoder) -> RecordEncoder:
    """What measuring prices records with, for the same request."""
    request = encoder.request
    settings = request.settings()
    family = load_rule(settings, request.limits)
    assert family is not None
    return RecordEncoder(settings, family, loss_on=request.loss_on, add_eos=request.add_eos)
