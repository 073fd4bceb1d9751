"""What the training benchmark trains on: synthetic samples of the LVIS shape, put into packs or padded batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Dataset

from packtrain.bench.lengths import PATCHES_PER_TOKEN, lvis_tokens
from packtrain.core.seeds import stream
from packtrain.delivery.encode.encoded_sample import EncodedSample, PackedRow, PackKey
from packtrain.delivery.encode.synthetic_samples import SyntheticSamples
from packtrain.packing.arrays import pack_arrays
from packtrain.predicting.values import Load

Batching = Literal["packed", "random", "sorted", "grouped"]
Batches = list[np.ndarray]  # numbers of the samples of each batch
POOL = 4_096  # samples that are put into batches; only some of the batches are trained on
PROMPT = 50  # tokens of a sample's text that carry no loss: with them, shares are those of the set's description
_SIDE_PER_TOKEN = isqrt(PATCHES_PER_TOKEN)  # patches along each side of what becomes one token
PATCHES_PER_PACK = 1.5  # for each token of the capacity: packs of short samples only would hold thrice the mean


@dataclass(frozen=True, kw_only=True, eq=False)
class Pool:
    """Samples by numbers: tokens, and the sides of their one image in tokens."""

    tokens: np.ndarray
    rows: np.ndarray
    columns: np.ndarray

    @classmethod
    def of_lvis_shape(cls, *, longest: int, samples: int = POOL, scale: int = 1, images: bool = True) -> Pool:
        """Samples no longer than `longest`; `scale` divides all lengths, for tiny models.

        Without `images` samples are as long, and all of them is text.
        """
        tokens, image = lvis_tokens(samples, 0)
        tokens, image = tokens // scale, np.maximum(image // scale, 1)
        kept = (tokens <= longest) & (tokens > image + 2)
        rows = np.maximum(np.sqrt(image[kept] * 0.75).astype(np.int64), 1)
        return cls(tokens=tokens[kept], rows=rows * images, columns=image[kept] // rows * images)

    @cached_property
    def image_tokens(self) -> np.ndarray:
        return self.rows * self.columns

    @cached_property
    def patches(self) -> np.ndarray:
        return PATCHES_PER_TOKEN * self.image_tokens

    @cached_property
    def supervised(self) -> np.ndarray:
        return np.maximum(self.tokens - self.image_tokens - PROMPT, 1)

    def load(self, batches: Batches, *, padded: bool) -> Load:
        """What the real tokens of some batches are together; padding is not counted."""
        chosen = np.concatenate(batches)
        tokens, patches = self.tokens[chosen], self.patches[chosen]
        return Load.from_counts(
            tokens=int(tokens.sum()),
            squared_tokens=int((tokens * tokens).sum()),
            longest=int(tokens.max()),
            samples=len(chosen),
            rows=len(chosen) if padded else len(batches),
            supervised_tokens=int(self.supervised[chosen].sum()),
            vision_tokens=int(self.image_tokens[chosen].sum()),
            patches=int(patches.sum()),
            squared_patches=int((patches * patches).sum()),
            largest_patches=int(patches.max()),
            images=int((patches > 0).sum()),
        )


def put_into_batches(pool: Pool, how: Batching, *, size: int, limit: int | None = None) -> Batches:
    """All samples in batches: packs of `size` tokens, or `size` samples and at most `limit` padded tokens."""
    if how == "packed":
        capacities = {"tokens": size, "patches": int(PATCHES_PER_PACK * size)}
        packing = pack_arrays({"tokens": pool.tokens, "patches": pool.patches}, capacities)
        return [packing.pack(number) for number in range(packing.num_packs)]
    order = _ordered(pool.tokens, how, size)
    batches: Batches = []
    for start in range(0, len(order), size):
        rest = order[start : start + size]
        while len(rest):
            count = max(1, min(len(rest), (limit or 2**62) // int(pool.tokens[rest].max())))
            batches.append(rest[:count])
            rest = rest[count:]
    return batches


def _ordered(tokens: np.ndarray, how: Batching, size: int) -> np.ndarray:
    if how == "sorted":
        return np.argsort(tokens, kind="stable")
    if how == "random":
        return stream(0, "order of samples").permutation(len(tokens))
    from transformers.trainer_pt_utils import LengthGroupedSampler

    generator = torch.Generator().manual_seed(0)
    lengths = tokens.tolist()
    return np.array(list(LengthGroupedSampler(size, lengths=lengths, generator=generator)))


def evenly_chosen(pool: Pool, batches: Batches, count: int, seed: int = 0) -> Batches:
    """Some batches that stand for all: equally far apart in the order of their work, shuffled."""
    work = [int(pool.tokens[batch].sum() + pool.patches[batch].sum()) for batch in batches]
    order = np.argsort(work, kind="stable")
    places = ((np.arange(count) + 0.5) * len(batches) / count).astype(np.int64)
    return [batches[at] for at in stream(seed, "order of batches").permutation(order[places])]


class MadeRows(Dataset[PackedRow]):
    """Batches as rows of encoded samples, made when asked for, as a reader would."""

    def __init__(self, pool: Pool, batches: Batches, config: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._pool, self._batches = pool, batches
        self._made = SyntheticSamples(config, dtype=dtype, shared_patches=int(pool.patches.max()))

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> PackedRow:
        samples = tuple(self._sample(int(row)) for row in self._batches[number])
        return PackedRow(key=PackKey(0, number), samples=samples)

    def _sample(self, row: int) -> EncodedSample:
        pool = self._pool
        return self._made.sample_of_sizes(
            row,
            int(pool.tokens[row]),
            supervised=int(pool.supervised[row]),
            height=_SIDE_PER_TOKEN * int(pool.rows[row]),
            width=_SIDE_PER_TOKEN * int(pool.columns[row]),
        )
