"""Synthetic data, the same for the same seed: sentences, pixels, conversations, and a small dataset of pictures.

The dataset looks like users' own: pictures with annotated objects, conversations about them, and some faults. Object
counts are as skewed as in large detection sets: most pictures show a few objects, some show more than a hundred.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from packtrain.core.seeds import stream
from packtrain.core.values import Media, MediaKind, MediaRef, Message, Record, Text

_SENTENCE = "a red circle stands left of two small bars and behind them is one green square in the corner"
WORDS = tuple(_SENTENCE.split())
PLOT_WORDS = ("red", "boat", "seven", "under", "the", "bridge", "slowly", "counts", "green", "lamps", "and", "rain")
COLOURS = {
    "red": (208, 52, 44),
    "orange": (233, 139, 32),
    "yellow": (235, 205, 60),
    "green": (60, 150, 80),
    "blue": (48, 105, 192),
    "purple": (128, 72, 160),
    "white": (240, 240, 236),
    "black": (36, 36, 40),
}
SHAPES = ("circle", "square", "triangle", "bar", "diamond")
SIZES = ((640, 480), (480, 640), (640, 427), (500, 375), (800, 600), (320, 240), (1024, 512))
BROKEN = 8  # records that cannot be used, one for each fault below

Obj = dict[str, Any]
JsonRecord = dict[str, Any]  # one line of a data file


# ---- texts, pixels, conversations


def sentence(random: np.random.Generator, words: int, vocabulary: Sequence[str] = WORDS) -> str:
    """This many words, drawn at random."""
    return " ".join(random.choice(vocabulary, words).tolist())


def noise_pixels(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Random bytes: every image and every frame differs from all others."""
    return random.integers(0, 256, shape, dtype=np.uint8)


def noise_image(random: np.random.Generator, name: str, width: int, height: int) -> Media:
    """An image of noise, as the bytes of a PNG file."""
    file = io.BytesIO()
    Image.fromarray(noise_pixels(random, height, width, 3)).save(file, "PNG")
    return Media("image", MediaRef(name=name, data=file.getvalue()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """What one synthetic conversation holds."""

    name: str
    media: tuple[MediaKind, ...] = ()
    question: int = 6  # words
    answer: int = 8

    def record(
        self, random: np.random.Generator, image_sizes: Iterable[tuple[int, int]] | None = None, *, plain: bool = False
    ) -> Record:
        """The conversation, with PNG images of these sizes (width, height) or with media whose pixels are elsewhere."""
        question, answer = (
            f"{sentence(random, words, PLOT_WORDS).capitalize()}." for words in (self.question, self.answer)
        )
        names = [f"{self.name}-{at}" for at in range(len(self.media))]
        if image_sizes is None:
            media = [Media(kind, MediaRef(name=name, path=name)) for kind, name in zip(self.media, names, strict=True)]
        else:
            media = [noise_image(random, name, *size) for name, size in zip(names, image_sizes, strict=True)]
        return chat_record(self.name, question, answer, media, plain=plain)


PLOTS = (
    Plot(name="text", answer=12),
    Plot(name="image", media=("image",)),
    Plot(name="two-images", media=("image", "image"), answer=4),
    Plot(name="video", media=("video",), question=3),
    Plot(name="image-again", media=("image",), question=4),  # of the same size: swapped pixels would fit
    Plot(name="long-text", question=20, answer=30),
)
TEXT_PLOTS = (
    Plot(name="text", answer=12),
    Plot(name="short-text", question=2, answer=2),
    Plot(name="long-text", question=20, answer=30),
    Plot(name="text-again", question=9, answer=5),
)


def chat_record(name: str, question: str, answer: str, media: Iterable[Media] = (), *, plain: bool = False) -> Record:
    """One question about media, and its answer; `plain`: running text without media."""
    asked = Message(role="user", parts=(*media, Text(question)))
    messages: tuple[Message, ...] = (asked, Message(role="assistant", parts=(Text(answer),)))
    if plain:
        messages = (Message(role="user", parts=(Text(f"{question} {answer}"),)),)
    return Record(id=name, origin="synthetic", source="synthetic", messages=messages, plain=plain)


def picture_chats(
    pictures: Sequence[str], words: Iterable[int], vocabulary: Sequence[str] = WORDS, *, seed: int = 0
) -> Iterator[JsonRecord]:
    """Chats about one picture each, in turn, with answers of these numbers of words."""
    random = stream(seed, "picture chats")
    for number, count in enumerate(words):
        shown = {"type": "image", "image": pictures[number % len(pictures)]}
        turns = [
            {"role": "user", "content": [shown, {"type": "text", "text": "What is in it?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": sentence(random, count, vocabulary)}]},
        ]
        yield {"id": f"{number:06d}", "messages": turns}


def write_lines(path: Path, records: Iterable[JsonRecord]) -> Path:
    """One record a line."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return path


def picture_names(pictures: int) -> list[str]:
    """The pictures of a dataset as its records name them."""
    return [f"images/{number:05d}.jpg" for number in range(pictures)]


# ---- a small dataset


def write_dataset(folder: Path, pictures: int = 320, seed: int = 0) -> Path:
    """Write `data.jsonl` and its images; returns the path of the data file."""
    random = stream(seed, "demo")
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    names = picture_names(pictures)
    records = [json.dumps(_detection(folder, name, number, random)) for number, name in enumerate(names)]
    records += [json.dumps(_several_images(number, pictures, random)) for number in range(pictures // 16)]
    records += [json.dumps(_text_only(number, random)) for number in range(pictures // 16)]
    records += _broken(images)
    random.shuffle(records)
    path = folder / "data.jsonl"
    path.write_text("\n".join(records) + "\n", encoding="utf-8")
    return path


def _detection(folder: Path, name: str, number: int, random: np.random.Generator) -> JsonRecord:
    """A picture with annotated objects."""
    width, height = SIZES[int(random.integers(len(SIZES)))]
    count = int(np.clip(round(float(random.lognormal(1.9, 1.1))), 1, 160))
    objects = [_object(width, height, random) for _ in range(count)]
    _draw(width, height, objects, random).save(folder / name, quality=85)
    return {
        "id": f"picture-{number:05d}",
        "images": [name],
        "width": width,
        "height": height,
        "objects": [{"desc": o["desc"], "bbox_2d": o["bbox_2d"]} for o in objects],
    }


def _object(width: int, height: int, random: np.random.Generator) -> Obj:
    side = int(np.clip(random.lognormal(3.4, 0.6), 8, min(width, height) // 2))
    x, y = int(random.integers(0, width - side)), int(random.integers(0, height - side))
    colour = list(COLOURS)[int(random.integers(len(COLOURS)))]
    shape = SHAPES[int(random.integers(len(SHAPES)))]
    return {"desc": f"{colour} {shape}", "bbox_2d": [x, y, x + side, y + side], "colour": colour, "shape": shape}


def _draw(width: int, height: int, objects: list[Obj], random: np.random.Generator) -> Image.Image:
    top, bottom = random.integers(150, 225, 3), random.integers(90, 170, 3)
    shade = np.linspace(0, 1, height)[:, None, None]
    ground = (top * (1 - shade) + bottom * shade).astype(np.uint8)
    picture = Image.fromarray(np.broadcast_to(ground, (height, width, 3)).copy())
    draw = ImageDraw.Draw(picture)
    for item in objects:
        _SHAPE_DRAWERS[item["shape"]](draw, item["bbox_2d"], COLOURS[item["colour"]])
    return picture


def _polygon(points: Callable[[int, int, int, int], list[tuple[float, float]]]) -> Callable[..., None]:
    def draw(canvas: ImageDraw.ImageDraw, box: list[int], colour: tuple[int, int, int]) -> None:
        canvas.polygon(points(*box), fill=colour, outline=(20, 20, 20))

    return draw


_SHAPE_DRAWERS: dict[str, Callable[..., None]] = {
    "circle": lambda canvas, box, colour: canvas.ellipse(box, fill=colour, outline=(20, 20, 20)),
    "square": lambda canvas, box, colour: canvas.rectangle(box, fill=colour, outline=(20, 20, 20)),
    "triangle": _polygon(lambda a, b, c, d: [((a + c) / 2, b), (c, d), (a, d)]),
    "bar": _polygon(
        lambda a, b, c, d: [(a, (2 * b + d) / 3), (c, (2 * b + d) / 3), (c, (b + 2 * d) / 3), (a, (b + 2 * d) / 3)]
    ),
    "diamond": _polygon(lambda a, b, c, d: [((a + c) / 2, b), (c, (b + d) / 2), ((a + c) / 2, d), (a, (b + d) / 2)]),
}


def _several_images(number: int, pictures: int, random: np.random.Generator) -> JsonRecord:
    """A conversation over two to five pictures."""
    chosen = random.choice(pictures, int(random.integers(2, 6)), replace=False)
    content: list[dict[str, str]] = [{"type": "image", "image": f"images/{i:05d}.jpg"} for i in chosen.tolist()]
    content.append({"type": "text", "text": "Which of these pictures shows the most objects?"})
    return {
        "id": f"compare-{number:03d}",
        "messages": [
            {"role": "user", "content": content},
            {"role": "assistant", "content": f"The {('first', 'second')[number % 2]} one looks the most crowded."},
            {"role": "user", "content": "And the fewest?"},
            {"role": "assistant", "content": "The last one."},
        ],
    }


def _text_only(number: int, random: np.random.Generator) -> JsonRecord:
    a, b = random.integers(2, 60, 2).tolist()
    return {
        "id": f"sum-{number:03d}",
        "conversations": [
            {"from": "human", "value": f"A box holds {a} red and {b} blue marbles. How many marbles are in it?"},
            {"from": "gpt", "value": f"There are {a} + {b} = {a + b} marbles in the box."},
        ],
    }


def _broken(images: Path) -> list[str]:
    """One record for each of the faults that real datasets have."""
    whole = (images / "00000.jpg").read_bytes()
    (images / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (images / "empty.jpg").write_bytes(b"")
    (images / "text.jpg").write_text("this is not a picture")

    def asks(image: str, role: str = "user", text: str = "<image>\nWhat is this?") -> str:
        turns = [{"role": role, "content": text}, {"role": "assistant", "content": "A picture."}]
        return json.dumps({"messages": turns, "images": [image]})

    return [
        '{"id": "cut-off", "messages": [{"role": "user", "content": "What is',
        asks("images/missing.jpg"),
        asks("images/cut.jpg"),
        asks("images/empty.jpg"),
        asks("images/text.jpg"),
        asks("../outside.jpg"),
        asks("images/00000.jpg", role="narrator"),
        asks("images/00000.jpg", text="<image><image>\nWhat are these?"),
    ]
