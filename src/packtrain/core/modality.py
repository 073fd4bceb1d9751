"""Kinds of media as values: the names of their tokens, costs, limits and tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from packtrain.core.values import MediaKind

TEXT_KIND = 0  # the token kind of everything that no encoder replaces


@dataclass(frozen=True, kw_only=True, slots=True)
class Modality:
    """One kind of media."""

    name: MediaKind
    token_kind: int  # of its tokens in an encoded sample, as transformers' mm_token_type_ids
    tokens: str  # column of the cost table: the tokens that it becomes
    counted: str | None  # and how many there are
    limits: tuple[str, ...] = ()  # of MediaLimits
    encoder: str  # the part of the model that takes it
    features: str  # the tensor that the encoder is run on
    sizes: str | None = None  # the tensor of (time, height, width), in families whose sizes vary


MODALITIES: Mapping[MediaKind, Modality] = {
    one.name: one
    for one in (
        Modality(
            name="image",
            token_kind=1,
            tokens="image_tokens",
            counted="images",
            limits=("min_pixels", "max_pixels", "max_img_size"),
            encoder="vision",
            features="pixel_values",
            sizes="image_grid_thw",
        ),
        Modality(
            name="video",
            token_kind=2,
            tokens="video_tokens",
            counted="videos",
            limits=("video_min_pixels", "video_max_pixels", "num_frames", "fps", "max_frames"),
            encoder="vision",
            features="pixel_values_videos",
            sizes="video_grid_thw",
        ),
        Modality(
            name="audio",
            token_kind=3,
            tokens="audio_tokens",
            counted=None,
            encoder="audio",
            features="input_features",
        ),
    )
}


def count_media(kinds: Iterable[MediaKind]) -> dict[str, int]:
    """How many media there are of each modality that is counted.

    >>> count_media(["image", "image"])
    {'images': 2, 'videos': 0}
    """
    numbers = Counter(kinds)
    return {one.counted: numbers[one.name] for one in MODALITIES.values() if one.counted is not None}


VISION = tuple(one for one in MODALITIES.values() if one.encoder == "vision")
PIXELS = tuple(one.features for one in VISION)
GRIDS = tuple(one.sizes for one in VISION if one.sizes is not None)
VISION_TOKENS = tuple(one.tokens for one in VISION)
