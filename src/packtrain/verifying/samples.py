"""The samples that are packed to verify: synthetic ones, as small as the model takes them, or from the user's data.

Where a family has a rule, pixels are handed to it; a model without one gets PNG files through its own processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np

from packtrain.core.errors import ConfigError, DataError, RecordError
from packtrain.core.seeds import stream
from packtrain.core.values import Cost, MediaHeader, Record
from packtrain.delivery.encode.encode import Decoded, SampleEncoder
from packtrain.delivery.encode.encoded_sample import EncodedSample
from packtrain.delivery.encode.unlisted import ProcessorEncoder, ProcessorRule, cost_rule
from packtrain.families.encoder import RecordEncoder, SizedRecord
from packtrain.families.family import Rule
from packtrain.families.registry import load_rule
from packtrain.measuring.measurer import CostRule, Measurer
from packtrain.measuring.request import Request
from packtrain.records.media import MediaStore
from packtrain.records.open import iter_units, read_unit
from packtrain.records.source import Entry
from packtrain.records.synthetic import PLOTS, TEXT_PLOTS, Plot, noise_pixels
from packtrain.verifying.check_result import PricedSample
from packtrain.verifying.packing_check import sample_kind

MOST_LOOKED_AT = 500  # of the user's records
MOST_TOKENS = 8_192  # of all samples of the user together: logits of every token are kept
LONGEST = 16_384  # tokens of the longest sample, which runs forward only

# Wide and narrow ones are cheap for models that cut images into tiles; the cheapest are taken.
_SIZES = ((96, 64), (64, 96), (128, 128), (336, 112), (112, 336), (400, 64), (64, 400), (448, 448))
_FRAMES = (4, 8, 16, 32)
_FPS = 2.0
_FILE_SIZES: Mapping[int, tuple[tuple[int, int], ...]] = {
    0: (),
    1: ((96, 64),),
    2: ((64, 96), (128, 128)),
}  # width, height, by the number of images


# ---- synthetic samples of models with a rule


def synthetic_samples(request: Request, encoder: SampleEncoder, seed: int = 0) -> list[PricedSample]:
    """Text, one image, several images and a video, where the model takes them, each with its computed cost."""
    settings = request.settings()
    family = load_rule(settings, request.limits)
    assert family is not None, "families without a rule are refused"
    costs = RecordEncoder(settings, family, loss_on=request.loss_on, add_eos=request.add_eos)
    kinds = set(family.placeholders)
    samples = []
    for number, plot in enumerate(PLOTS if kinds else TEXT_PLOTS):
        if not kinds >= set(plot.media):
            continue
        draw = stream(seed, "synthetic", str(number))
        headers = _headers(family, plot)
        record = plot.record(draw, plain=settings.chat_template is None)
        decoded = [_pixels(header, encoder, draw, f"{plot.name}-{at}") for at, header in enumerate(headers)]
        cost, _ = costs.cost(record, headers)
        samples.append(PricedSample(sample=encoder.assemble(record, decoded), cost=cost))
    return samples


def synthetic_text(encoder: SampleEncoder, tokens: int, *, chat: bool, seed: int = 0) -> EncodedSample:
    """One sample of text with this number of tokens, or a few more."""
    words = tokens
    while True:
        sample = encoder.assemble(_long_text(words, seed, plain=not chat), [])
        if tokens <= len(sample) <= 1.05 * tokens + 8 or words == 1:
            return sample
        words = max(1, int(words * 1.02 * tokens / len(sample)))


def _long_text(words: int, seed: int, *, plain: bool = False) -> Record:
    plot = Plot(name="longest", question=4, answer=words)
    return plot.record(stream(seed, "synthetic", "longest"), plain=plain)


def _headers(family: Rule, plot: Plot) -> list[MediaHeader]:
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


# ---- synthetic samples of models without a rule


def processor_samples(request: Request, encoder: ProcessorEncoder, seed: int = 0) -> list[PricedSample]:
    """Text, one image and several images, where the processor takes them, each with its cost."""
    rule, store = ProcessorRule(request), MediaStore(".")
    samples, refused = [], []
    for number, plot in enumerate(plot for plot in PLOTS if "video" not in plot.media):
        sizes = _FILE_SIZES[len(plot.media)]
        record = plot.record(stream(seed, "synthetic", str(number)), sizes)
        headers = tuple(MediaHeader(kind="image", width=width, height=height) for width, height in sizes)
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
        try:
            sample = encoder.encode(_long_text(words, seed), MediaStore("."))
        except RecordError:
            return None
        if len(sample) >= tokens:
            return sample
        words = int(words * 1.02 * tokens / len(sample)) + 1


# ---- samples from the user's data


def user_samples(
    request: Request, encoder: SampleEncoder | ProcessorEncoder, count: int, room: int | None = None
) -> tuple[list[PricedSample], EncodedSample | None]:
    """Up to `count` samples of different kinds from the beginning of the data, and the longest of all.

    The longest is None if it is among them. `room` is the longest row that the model takes.
    """
    most, most_alone = (min(bound, room or bound) for bound in (MOST_TOKENS, LONGEST))
    rule = cost_rule(request)
    measurer = Measurer(request, rule)
    by_kind: dict[str, list[PricedSample]] = {}
    looked_at = 0
    longest: tuple[int, EncodedSample | None] = (0, None)
    for entry, source in islice(_entries(request), MOST_LOOKED_AT):
        looked_at += 1
        try:
            record = measurer.record(entry, source)
            cost = _cost(rule, record, measurer, source)
            kind = sample_kind(cost.images, cost.videos)
            small = cost.tokens <= most // 2 and len(by_kind.get(kind, ())) < count
            if not small and not longest[0] < cost.tokens <= most_alone:
                continue
            sample = encoder.encode(record, measurer.store(source))
        except RecordError:
            continue  # measuring reports what is wrong with it
        if cost.tokens > longest[0]:
            longest = cost.tokens, sample
        if small:
            by_kind.setdefault(kind, []).append(PricedSample(sample=sample, cost=cost))
    chosen = _of_every_kind(by_kind, count, most)
    if len(chosen) < 2:
        raise DataError(
            "--data",
            got=f"{len(chosen)} usable among the first {looked_at:,} records",
            expected=f"at least two records of at most {most // 2:,} tokens",
            fix="run packtrain measure for the reasons; leave out --data for synthetic samples",
        )
    return chosen, None if any(one.sample is longest[1] for one in chosen) else longest[1]


def _cost(rule: CostRule, record: Record, measurer: Measurer, source: int) -> Cost:
    (price,) = rule.compute_costs([SizedRecord(record, measurer.headers(record, source))], measurer.store(source))
    if isinstance(price, RecordError):
        raise price
    return price[0]


def _entries(request: Request) -> Iterator[tuple[Entry, int]]:
    for unit in iter_units(request.specs):
        for entry in read_unit(request.specs, unit):
            yield entry, unit.source


def _of_every_kind(by_kind: dict[str, list[PricedSample]], count: int, most: int) -> list[PricedSample]:
    """Samples of each kind in turn, within the limit of tokens."""
    chosen: list[PricedSample] = []
    queues = [list(queue) for queue in by_kind.values()]
    while len(chosen) < count and any(queues):
        for queue in queues:
            if not queue or len(chosen) >= count:
                continue
            one = queue.pop(0)
            if sum(len(other.sample) for other in chosen) + len(one.sample) <= most:
                chosen.append(one)
    return chosen
