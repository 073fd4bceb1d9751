"""Which samples the check before the first step looks at: every modality and the longest, within a step's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from packtrain.core.errors import DataError
from packtrain.delivery.encode.encoded_sample import IGNORED, TEXT, EncodedSample

MOST_SAMPLES = 4  # one of each kind
MOST_TOKENS = 2_000  # of text; media are what they are
KINDS = ("text", "image", "images", "video")
_LEAST_ROOM = 8  # tokens that make a sample


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRoom:
    """What one row of a training step holds."""

    tokens: int = MOST_TOKENS
    patches: int | None = None  # of the vision encoder; None: nobody said
    alignment: int = 1  # samples are filled up to multiples of it

    def taken(self, samples: Sequence[EncodedSample]) -> int:
        """Tokens of the row that they fill."""
        return sum(-(-len(sample) // self.alignment) * self.alignment for sample in samples)

    @property
    def least(self) -> int:
        """Tokens that make a sample."""
        return max(_LEAST_ROOM, self.alignment)

    def holds(self, samples: Sequence[EncodedSample]) -> bool:
        """Do these fit into one row?"""
        patches = sum(sample.vision.patches for sample in samples if sample.vision is not None)
        return self.taken(samples) <= self.tokens and (self.patches is None or patches <= self.patches)


def kind_of(images: int, videos: int) -> str:
    """The kind of a sample, one of KINDS."""
    return "video" if videos else "images" if images > 1 else "image" if images else "text"


def sample_described(sample: EncodedSample) -> str:
    """A sample in words."""
    kind = kind_of(sample.num_images, sample.num_videos)
    return f"{sample.id} ({kind if kind != 'images' else f'{sample.num_images} images'}, {len(sample):,} tokens)"


def short_samples(
    samples: Sequence[EncodedSample], room: RowRoom | None = None
) -> tuple[list[EncodedSample], tuple[str, ...]]:
    """The shortest sample of every kind, filled up with short ones, at least two; and what found no room.

    Where they are too long, the beginning of their text is taken.
    """
    room = room or RowRoom()
    piece = max(2, min(room.tokens, MOST_TOKENS) // 4 // room.alignment * room.alignment)
    usable = sorted((sample for sample in samples if (sample.labels[1:] != IGNORED).any()), key=len)
    usable = usable or [_text_of(sample, piece, number=0) for sample in samples]
    if not usable:
        raise DataError("the check before the first step", got="no samples", expected="at least one on every rank")
    chosen: list[EncodedSample] = []
    left_out = []
    for kind in KINDS:
        shortest = next((one for one in usable if kind_of(one.num_images, one.num_videos) == kind), None)
        if shortest is None or kind == "text":
            continue
        beside = room.least if not chosen else 0  # a row needs a neighbour
        if replace(room, tokens=room.tokens - beside).holds([*chosen, shortest]):
            chosen.append(shortest)
        else:
            left_out.append(f"{kind}: the shortest sample of the first packs is too long ({len(shortest):,} tokens)")
    rest = replace(room, tokens=min(room.tokens, room.taken(chosen) + MOST_TOKENS))
    for sample in sorted(usable, key=lambda one: (bool(one.media), len(one))):
        fresh = len(chosen) < MOST_SAMPLES and all(sample is not one for one in chosen)
        if fresh and rest.holds([*chosen, sample]):
            chosen.append(sample)
    if len(chosen) == 1 and room.taken(chosen) + room.least > room.tokens:
        chosen = []  # it leaves no room for another
    while len(chosen) < 2:
        size = min(piece, (room.tokens - room.taken(chosen)) // room.alignment * room.alignment)
        chosen.append(_text_of(usable[len(chosen) % len(usable)], size, number=len(chosen) + 1))
    return sorted(chosen, key=len), tuple(left_out)


def longest_of(row: Sequence[EncodedSample]) -> int:
    """The number of the longest sample, of those that carry loss where some do."""
    carry = [at for at, sample in enumerate(row) if (sample.labels[1:] != IGNORED).any()]
    return max(carry or range(len(row)), key=lambda at: len(row[at]))


def _text_of(sample: EncodedSample, tokens: int, *, number: int) -> EncodedSample:
    """The first tokens of a sample's text, all of which are looked at."""
    ids = sample.input_ids[sample.token_kinds == TEXT][:tokens]
    labels = ids.clone()
    labels[0] = IGNORED
    return replace(
        sample,
        id=f"{sample.id} (text, {number})",
        input_ids=ids,
        labels=labels,
        position_ids=torch.arange(len(ids)).expand(len(sample.position_ids), -1),
        token_kinds=torch.full_like(ids, TEXT),
        media={},
        num_images=0,
        num_videos=0,
        vision=None,
    )
