"""Synthetic samples of models without a rule: real PNG files through the model's own processor."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

from packtrain.core.errors import DataError, RecordError
from packtrain.core.seeds import stream
from packtrain.core.values import Media, MediaHeader, MediaRef, Message, Record, Text
from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.delivery.encode.unlisted import ProcessorEncoder, ProcessorRule
from packtrain.families.encoder import SizedRecord
from packtrain.measuring.request import Request
from packtrain.records.media import MediaStore
from packtrain.records.synthetic import noise_pixels, sentence
from packtrain.verifying.check_result import PricedSample

_SIZES = ((96, 64), (64, 96), (128, 128))  # width, height; the first two have as many pixels
_PLOTS = (  # name, images by their size, words of the question and of the answer
    ("text", (), 6, 12),
    ("image", (0,), 6, 8),
    ("two-images", (1, 2), 6, 4),
    ("image-again", (0,), 4, 8),  # of the same size: swapped pixels would fit
    ("long-text", (), 20, 30),
)


def processor_samples(request: Request, encoder: ProcessorEncoder, seed: int = 0) -> list[PricedSample]:
    """Text, one image and several images, where the processor takes them, each with its cost."""
    rule, store = ProcessorRule(request), MediaStore(".")
    samples, refused = [], []
    for record, headers in _records(seed):
        (price,) = rule.compute_costs([SizedRecord(record, headers)], store)
        if isinstance(price, RecordError):
            refused.append(f"{record.id}: {price.reason}")
            continue
        try:
            samples.append(PricedSample(sample=encoder.encode(record, store), cost=price[0]))
        except RecordError as error:
            refused.append(f"{record.id}: {error.reason}")
    if len(samples) < 2:
        raise DataError(
            "synthetic samples",
            got="; ".join(refused),
            expected="at least two that the processor takes",
            fix="pass your own data with --data",
        )
    return samples


def processor_text(encoder: ProcessorEncoder, tokens: int, *, seed: int = 0) -> EncodedSample | None:
    """One sample of text with at least this number of tokens; None where the processor takes no text alone."""
    words = tokens
    while True:
        draw = stream(seed, "synthetic", "longest")
        try:
            sample = encoder.encode(_record(draw, "longest", (), 4, words), MediaStore("."))
        except RecordError:
            return None
        if len(sample) >= tokens:
            return sample
        words = int(words * 1.02 * tokens / len(sample)) + 1


def _records(seed: int) -> Iterator[tuple[Record, tuple[MediaHeader, ...]]]:
    for number, (name, images, question, answer) in enumerate(_PLOTS):
        record = _record(stream(seed, "synthetic", str(number)), name, images, question, answer)
        yield record, tuple(MediaHeader(kind="image", width=w, height=h) for w, h in (_SIZES[at] for at in images))


def _record(draw: np.random.Generator, name: str, images: tuple[int, ...], question: int, answer: int) -> Record:
    asked, answered = (f"{sentence(draw, words).capitalize()}." for words in (question, answer))
    media = [_image(draw, f"{name}-{number}", *_SIZES[at]) for number, at in enumerate(images)]
    messages = (
        Message(role="user", parts=(*media, Text(asked))),
        Message(role="assistant", parts=(Text(answered),)),
    )
    return Record(id=name, origin="synthetic", source="synthetic", messages=messages)


def _image(draw: np.random.Generator, name: str, width: int, height: int) -> Media:
    """Noise: every pixel differs from every other sample's."""
    file = io.BytesIO()
    Image.fromarray(noise_pixels(draw, height, width, 3)).save(file, "PNG")
    return Media("image", MediaRef(name=name, data=file.getvalue()))
