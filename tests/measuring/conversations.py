"""Random conversations with real image and video files, as a user's jsonl and as the messages a processor takes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image, ImageOps

TEXT_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "smollm3", "gemma3_text")
VISION_FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava", "llava_next", "llava_onevision"),
    *("internvl", "gemma3"),
)
FRAGMENTS = (
    *(
        "The red circle",
        " is",
        "naïve",
        " 北京",
        "🙂",
        "🦄",
        "\n",
        "\n\n",
        "  ",
        " ",
        "\t",
        "\r\n",
        "<b>",
        "[INST]",
        "</s>",
    ),
    *(
        "\u2028",
        "\u00a0",
        "e\u0301",
        "{{ x }}",
        "{% raw %}",
        "<|im_end|>",
        "<think>",
        "</think>",
        "don't",
        "12:30",
        "...",
    ),
    *("Assistant:", "ASSISTANT:", "<start_of_turn>model\n", "\ufdd0", "<|eot_id|>", "\\n", '"quoted"'),
    *("[INST]", "</s>", "...", "&amp;"),
)
# name, width, height, mode, EXIF orientation: small, thin, on the edges of patches and tiles, turned by their EXIF tag
IMAGES = (
    ("square.png", 56, 56, "RGB", 1),
    ("wide.png", 200, 50, "RGB", 1),
    ("tall.jpg", 40, 120, "RGB", 1),
    ("grey.png", 97, 61, "L", 1),
    ("clear.png", 30, 45, "RGBA", 1),
    ("palette.png", 64, 33, "P", 1),
    ("turned.jpg", 150, 70, "RGB", 6),
    ("mirrored.jpg", 90, 130, "RGB", 5),
    ("upside.jpg", 70, 40, "RGB", 3),
    ("photo.jpg", 333, 250, "RGB", 1),
    ("turned.webp", 140, 60, "RGB", 8),
    ("long.png", 512, 28, "RGB", 1),
)

Message = dict[str, Any]
# Their processors blow every picture up to tiles of one size: mostly tested with small ones.
TILED = ("idefics3", "smolvlm", "llava", "llava_next", "llava_onevision", "internvl")


def shrink(folder: Path, side: int = 4) -> Path:
    """The model folder with tiles of `side` patches a side, so that its processor is quick and its encoder small."""
    path = folder / "processor_config.json"
    config, model = (json.loads((folder / name).read_text()) for name in (path.name, "config.json"))
    vision = model["vision_config"]
    old, patch = (
        value[0] if isinstance(value, list) else value for value in (vision["image_size"], vision["patch_size"])
    )
    new = side * patch
    square = {"height": new, "width": new}
    for part in (config["image_processor"], config.get("video_processor", {})):
        if "max_image_size" in part:  # Idefics3, SmolVLM
            part["size"] = {"longest_edge": part["size"]["longest_edge"] * new // old}
            part["max_image_size"] = {"longest_edge": new}
        elif "crop_size" in part:  # LLaVA, LLaVA-NeXT
            part["size"], part["crop_size"] = {"shortest_edge": new}, square
        elif part:  # OneVision, InternVL
            part["size"] = square
    for part in (config["image_processor"], model):
        if "image_grid_pinpoints" in part:
            first = part["image_grid_pinpoints"][0][0]
            part["image_grid_pinpoints"] = [
                [edge // first * new for edge in pair] for pair in part["image_grid_pinpoints"]
            ]
    vision["image_size"] = [new, new] if isinstance(vision["image_size"], list) else new
    merged = {"internvl": 2}.get(model["model_type"], model.get("scale_factor", 1))
    for part in (config, model):
        for name in {"image_seq_len", "image_seq_length", "num_image_tokens"} & part.keys():
            part[name] = (side // merged) ** 2
    path.write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps(model))
    return folder


def write_images(folder: Path, seed: int = 0) -> list[str]:
    """The files of IMAGES, full of noise."""
    draw = np.random.default_rng(seed)
    for name, width, height, mode, orientation in IMAGES:
        pixels = draw.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).convert(mode)
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(folder / name, **({"exif": exif} if orientation != 1 else {}))
    return [name for name, *_ in IMAGES]


def write_video(path: Path, *, frames: int, fps: Fraction | int, width: int = 64, height: int = 48) -> str:
    """A short video of moving colours; the container is told by the name's ending."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            pixels = np.full((height, width, 3), (40 + 3 * number % 200, 90, 200 - 2 * number % 150), dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path.name


def conversations(
    count: int, *, images: Sequence[str] = (), most_images: int = 4, shapes: int = 15, seed: int = 0
) -> list[list[Message]]:
    """Seeded conversations of some shapes: with or without a system message, one to four turns, media anywhere in user
    messages. The texts and the pictures are different each time."""
    draw = random.Random(seed)

    def shape(number: int) -> list[tuple[str, list[str]]]:
        turns = draw.randint(1, 4)
        asked = [["text"] * draw.choice((1, 1, 1, 2)) for _ in range(turns)]
        for _ in range(min(number % 5, most_images) if images else 0):
            parts = draw.choice(asked)
            parts.insert(draw.randint(0, len(parts)), "image")
        system = [("system", ["text"])] if draw.random() < 0.4 else []
        return system + [turn for parts in asked for turn in (("user", parts), ("assistant", ["text"]))]

    def part(kind: str, least: int) -> Message:
        if kind == "image":
            return {"type": "image", "image": draw.choice(images)}
        return {"type": "text", "text": "".join(draw.choices(FRAGMENTS, k=draw.randint(least, 8)))}

    drawn = [shape(number) for number in range(min(count, shapes))]
    made = []
    for number in range(count):
        turns = drawn[number % len(drawn)]
        messages = [{"role": role, "content": [part(kind, 0) for kind in parts]} for role, parts in turns]
        messages[-1]["content"] = [part("text", 1)]  # an answer at last
        made.append(messages)
    return made


def write_jsonl(path: Path, records: Iterable[list[Message]]) -> Path:
    """One record a line, ids r0, r1, ..."""
    lines = [json.dumps({"id": f"r{n}", "messages": messages}) for n, messages in enumerate(records)]
    path.write_text("\n".join(lines) + "\n")
    return path


def opened(messages: Sequence[Message], folder: Path) -> list[Message]:
    """The messages as a processor takes them: images decoded, upright and in RGB."""

    def part(given: Mapping[str, Any]) -> Message:
        if given["type"] != "image":
            return dict(given)
        with Image.open(folder / given["image"]) as image:
            return {"type": "image", "image": ImageOps.exif_transpose(image).convert("RGB")}

    return [{"role": m["role"], "content": [part(p) for p in m["content"]]} for m in messages]


def as_strings(messages: Sequence[Message]) -> list[Message]:
    """The messages as a text model's tokenizer takes them."""
    return [{"role": m["role"], "content": "".join(p["text"] for p in m["content"])} for m in messages]
