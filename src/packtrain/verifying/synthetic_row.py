"""Samples that need no data: conversations with synthetic pictures and clips, as small as the model takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packtrain.core.errors import ConfigError, RecordError
from packtrain.core.seeds import stream
from packtrain.core.values import MediaHeader, MediaKind, Record
from packtrain.delivery.encode.encode import Decoded, SampleEncoder
from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.families.encoder import RecordEncoder
from packtrain.families.family import Rule
from packtrain.families.registry import load_rule
from packtrain.measuring.request import Request
from packtrain.records.synthetic import chat_record, noise_pixels, sentence
from packtrain.verifying.check_result import PricedSample

# Wide and narrow ones are cheap for models that cut images into tiles; the cheapest are taken.
_SIZES = ((96, 64), (64, 96), (128, 128), (336, 112), (112, 336), (400, 64), (64, 400), (448, 448))
_FRAMES = (4, 8, 16, 32)
_FPS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plot:
    """The contents of one synthetic sample."""

    name: str
    media: tuple[MediaKind, ...] = ()
    question: int = 6  # words
    answer: int = 8


_PLOTS = (
    _Plot(name="text", answer=12),
    _Plot(name="image", media=("image",)),
    _Plot(name="two-images", media=("image", "image"), answer=4),
    _Plot(name="video", media=("video",), question=3),
    _Plot(name="image-again", media=("image",), question=4),  # of the same size: swapped pixels would fit
    _Plot(name="long-text", question=20, answer=30),
)
_TEXTS = (
    _Plot(name="text", answer=12),
    _Plot(name="short-text", question=2, answer=2),
    _Plot(name="long-text", question=20, answer=30),
    _Plot(name="text-again", question=9, answer=5),
)


def synthetic_samples(request: Request, encoder: SampleEncoder, seed: int = 0) -> list[PricedSample]:
    """Text, one image, several images and a video, where the model takes them, each with its computed cost."""
    settings = request.settings()
    family = load_rule(settings, request.limits)
    assert family is not None, "families without a rule are refused"
    costs = RecordEncoder(settings, family, loss_on=request.loss_on, add_eos=request.add_eos)
    kinds = set(family.placeholders)
    samples = []
    for number, plot in enumerate(_PLOTS if kinds else _TEXTS):
        if not kinds >= set(plot.media):
            continue
        draw = stream(seed, "synthetic", str(number))
        headers = _headers(family, plot)
        record = _record(plot, draw, chat=settings.chat_template is not None)
        decoded = [_pixels(header, encoder, draw, f"{plot.name}-{at}") for at, header in enumerate(headers)]
        cost, _ = costs.cost(record, headers)
        samples.append(PricedSample(sample=encoder.assemble(record, decoded), cost=cost))
    return samples


def synthetic_text(encoder: SampleEncoder, tokens: int, *, chat: bool, seed: int = 0) -> EncodedSample:
    """One sample of text with this number of tokens, or a few more."""
    words = tokens
    while True:
        draw = stream(seed, "synthetic", "longest")
        plot = _Plot(name="longest", question=4, answer=words)
        sample = encoder.assemble(_record(plot, draw, chat=chat), [])
        if tokens <= len(sample) <= 1.05 * tokens + 8 or words == 1:
            return sample
        words = max(1, int(words * 1.02 * tokens / len(sample)))


def _headers(family: Rule, plot: _Plot) -> list[MediaHeader]:
    """The cheapest sizes that the family takes, different ones for the images of one sample."""
    images = sum(kind == "image" for kind in plot.media)
    sizes = _cheapest_images(family, max(1, images)) if images else []
    return [sizes.pop(0) if kind == "image" else _cheapest_video(family) for kind in plot.media]


def _cheapest_images(family: Rule, count: int) -> list[MediaHeader]:
    sized: list[tuple[int, int, int, MediaHeader]] = []
    for width, height in _SIZES:
        header = MediaHeader(kind="image", width=width, height=height)
        try:
            expansion = family.image(header, count)
        except RecordError:
            continue
        sized.append((expansion.media_tokens, expansion.patches, len(sized), header))
    return [header for *_, header in sorted(sized, key=lambda item: item[:3])[:count]] or _none("image")


def _cheapest_video(family: Rule) -> MediaHeader:
    for frames in _FRAMES:
        for width, height in ((96, 64), (128, 128), (448, 448)):
            header = MediaHeader(
                kind="video", width=width, height=height, frames=frames, fps=_FPS, seconds=frames / _FPS
            )
            try:
                family.video(header)
            except RecordError:
                continue
            return header
    return _none("video")[0]


def _none(kind: str) -> list[MediaHeader]:
    raise ConfigError(
        f"synthetic {kind}",
        got="no image size that the processor's settings accept",
        fix="pass your own data with --data",
    )


def _pixels(header: MediaHeader, encoder: SampleEncoder, draw: np.random.Generator, name: str) -> Decoded:
    """Noise: every pixel differs from every other sample's."""
    shape = (header.height, header.width, 3)
    if header.kind == "image":
        return Decoded.image(noise_pixels(draw, *shape), name)
    indices = encoder.frame_indices(header)
    frames = noise_pixels(draw, len(indices), *shape)
    return Decoded(header=header, pixels=frames, indices=indices, name=name)


def _record(plot: _Plot, draw: np.random.Generator, *, chat: bool) -> Record:
    question, answer = (f"{sentence(draw, words).capitalize()}." for words in (plot.question, plot.answer))
    return chat_record(plot.name, question, answer, plot.media, plain=not chat)
