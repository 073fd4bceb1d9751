"""A small dataset in every form in which faults are tried: lines with pictures beside them, and compressed shards."""

from __future__ import annotations

import gzip
import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import zstandard
from PIL import Image

SAMPLES, SHARDS = 54, 6
PACKS_PER_STEP = 4
EPOCHS = 2
COMPRESS = {
    "tar": bytes,
    "tar.gz": lambda data: gzip.compress(data, 6, mtime=0),
    "tar.zst": zstandard.ZstdCompressor(level=3, write_checksum=True).compress,
}


def picture(number: int, size: tuple[int, int] = (32, 32)) -> bytes:
    """Noise, so that every byte of the file matters; the same for the same number."""
    draw = random.Random(number)
    pixels = Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1]))
    buffer = io.BytesIO()
    pixels.save(buffer, "PNG")
    return buffer.getvalue()


def has_picture(number: int) -> bool:
    return number % 3 == 0


def record(number: int, image: str | None) -> dict[str, Any]:
    text = " ".join(f"word{number * 7 + place}" for place in range(1 + number % 9))
    question = [{"type": "image", "image": image}] if image else []
    return {
        "id": f"r{number:02d}",
        "messages": [
            {"role": "user", "content": [*question, {"type": "text", "text": text}]},
            {"role": "assistant", "content": [{"type": "text", "text": text[::-1]}]},
        ],
    }


def make_lines(folder: Path) -> Path:
    """data.jsonl, and the pictures of every third record beside it."""
    folder.mkdir(parents=True)
    lines = []
    for number in range(SAMPLES):
        name = f"{number:02d}.png" if has_picture(number) else None
        if name:
            (folder / name).write_bytes(picture(number))
        lines.append(json.dumps(record(number, name)))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "data.jsonl"


def make_shards(folder: Path, ending: str = "tar.gz", first: int = 0) -> Path:
    """The same records, in shards of SAMPLES / SHARDS."""
    folder.mkdir(parents=True)
    each = SAMPLES // SHARDS
    for shard in range(SHARDS):
        numbers = range(first + shard * each, first + (shard + 1) * each)
        (folder / f"shard-{shard:03d}.{ending}").write_bytes(COMPRESS[ending](_archive(numbers)))
    return folder


def _archive(numbers: range) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for number in numbers:
            parts = {"json": json.dumps(record(number, "png" if has_picture(number) else None)).encode()}
            if has_picture(number):
                parts["png"] = picture(number)
            for name, data in parts.items():
                info = tarfile.TarInfo(f"{number:03d}.{name}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def config(data: Path | str, cache: Path, **settings: Any) -> dict[str, Any]:
    """The settings of a DatasetConfig; shards are packed in windows of two."""
    usual: dict[str, Any] = {
        "dataset_path": str(data),
        "model": "tiny:qwen3_vl",
        "packing_length": 128,
        "packs_per_step": PACKS_PER_STEP,
        "epochs": EPOCHS,
        "seed": 5,
        "workers": 1,
        "check": 0,
        "cache_dir": str(cache),
    }
    if not str(data).endswith(".jsonl"):
        usual["packing_window"] = 2 * SAMPLES // SHARDS
    return {**usual, **settings}


def flip(path: Path, at: int) -> None:
    """Change one bit of one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
