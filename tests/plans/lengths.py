"""Seeded sizes of samples shaped like LVIS, the work of a small model on them, and checks that every packing must pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tables import write_table

from packtrain.costs.table import CostTable
from packtrain.estimates.flops import WorkModel

# The shape of a model with two billion parameters.
WORK = WorkModel(
    per_token=1.1e10, per_squared_token=4.6e5, per_supervised_token=1.9e9, per_patch=2.6e9, per_squared_patch=3.9e5
)


def lvis_like(count: int, seed: int = 0, *, longest: int = 20_000) -> dict[str, np.ndarray]:
    """Columns of a cost table: one image of about 340 tokens each, median near 860 tokens, a tail up to `longest`."""
    random = np.random.default_rng(seed)
    image_tokens = np.clip(random.normal(342, 60, count), 64, 1024).astype(np.int64)
    text = random.lognormal(np.log(520), 1.13, count).astype(np.int64) + 8
    tokens = np.minimum(image_tokens + text, longest)
    text = tokens - image_tokens
    return {
        "tokens": tokens,
        "text_tokens": text,
        "image_tokens": image_tokens,
        "images": np.ones(count, np.int64),
        "patches": 4 * image_tokens,
        "max_patches_per_image": 4 * image_tokens,
        "supervised_tokens": np.maximum(text // 2, 1),
        "tail_tokens": text,
    }


def lvis_table(folder: Path, count: int, seed: int = 0, **more: Any) -> CostTable:
    """A cost table of such samples."""
    return write_table(folder, {**lvis_like(count, seed), **more.pop("columns", {})}, **more)


def check_packs(order: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, capacities: np.ndarray) -> None:
    """A partition into packs that are not empty and within every limit; sizes (samples, resources)."""
    assert sorted(order.tolist()) == list(range(len(sizes)))
    assert offsets[0] == 0
    assert offsets[-1] == len(sizes)
    assert (np.diff(offsets) > 0).all()
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        load = [sum(column) for column in zip(*sizes[order[start:end]].tolist(), strict=True)]
        assert all(used <= limit for used, limit in zip(load, capacities.tolist(), strict=True)), (start, end, load)


def packs_of(order: np.ndarray, offsets: np.ndarray) -> list[list[int]]:
    """The packs as lists."""
    return [part.tolist() for part in np.split(order, offsets[1:-1])] if len(offsets) > 1 else []
