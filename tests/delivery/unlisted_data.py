"""What the tests of unlisted models share: their small folders, records about pictures, a data file."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
from PIL import Image

from packtrain.bench.unlisted_models import write_unlisted
from packtrain.core.values import Media, MediaHeader, MediaRef, Message, Record, Text
from packtrain.delivery.encode.unlisted import ProcessorEncoder
from packtrain.measuring.request import Request
from packtrain.records.synthetic import WORDS

Turn = tuple[str, Sequence[tuple[int, int] | str]]  # who, and texts and sizes of pictures


@functools.cache
def shared() -> Path:
    """Models and data, made once."""
    return Path(mkdtemp(prefix="unlisted-"))


@functools.cache
def folder_of(model_type: str) -> Path:
    """The small model folder of a type, without weights."""
    return write_unlisted(model_type, shared() / "models" / model_type)


@functools.cache
def weights_of(model_type: str) -> Path:
    """The small model folder of a type, with random weights."""
    from packtrain.modeling.load import build_model

    folder = write_unlisted(model_type, shared() / "weights" / model_type)
    build_model(str(folder)).save_pretrained(folder)
    return folder


def request_for(model_type: str, **options: Any) -> Request:
    return Request(specs=(), model=str(folder_of(model_type)), **options)


@functools.cache
def encoder_of(model_type: str, *, packing: bool = True) -> ProcessorEncoder:
    """The encoder of a type, made once."""
    return ProcessorEncoder(request_for(model_type), packing=packing)


def png(width: int, height: int, seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def chat(*turns: Turn, name: str = "chat", seed: int = 0) -> Record:
    """A record of turns; where a size stands there is a picture full of noise."""
    messages, pictures = [], 0
    for role, parts in turns:
        made: list[Text | Media] = []
        for part in parts:
            if isinstance(part, str):
                made.append(Text(part))
                continue
            pictures += 1
            data = png(*part, seed=100 * seed + pictures)
            made.append(Media("image", MediaRef(name=f"{name}-{pictures}", data=data)))
        messages.append(Message(role=role, parts=tuple(made)))
    return Record(id=name, origin="data.jsonl:1", source="s", messages=tuple(messages))


def headers_of(record: Record) -> tuple[MediaHeader, ...]:
    sizes = [Image.open(io.BytesIO(medium.ref.data or b"")).size for medium in record.media()]
    return tuple(MediaHeader(kind="image", width=width, height=height) for width, height in sizes)


def write_chats(folder: Path, count: int = 12, pictures: Sequence[int] = (0, 1, 1, 2)) -> Path:
    """Chats with so many pictures in turn, of different sizes, and answers of different lengths."""
    path = folder / "data.jsonl"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    draw, lines = np.random.default_rng(0), []
    for number in range(count):
        content = []
        for place in range(pictures[number % len(pictures)]):
            name = f"{number}_{place}.png"
            width, height = ((96, 64), (64, 160), (120, 80), (100, 100))[(number + place) % 4]
            (folder / name).write_bytes(png(width, height, seed=10 * number + place))
            content.append({"type": "image", "image": name})
        question, answer = (" ".join(draw.choice(WORDS, words)) for words in (5, int(draw.integers(3, 24))))
        asked = {"role": "user", "content": [*content, {"type": "text", "text": question}]}
        lines.append(json.dumps({"id": f"r{number}", "messages": [asked, {"role": "assistant", "content": answer}]}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
