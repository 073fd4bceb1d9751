"""Seeded sizes of samples shaped like LVIS, the work of a small model on them, and what every packing must pass."""

from __future__ import annotations

import hashlib
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from tables import write_table

from packtrain.measuring.table import CostTable
from packtrain.packing.arrays import pack_matrix
from packtrain.packing.greedy import next_fit
from packtrain.packing.pack_plan import ENTRY_SCHEMA, PACK_SCHEMA, EpochCounts, EpochPacks, PackPlan, PlanSummary
from packtrain.packing.packing_config import PackingConfig
from packtrain.predicting.flops import WorkModel

KINDS = ("best_fit", "first_fit", "next_fit", "window_50", "knapsack", "none")

# The shape of a model with two billion parameters.
WORK = WorkModel(
    per_token=1.1e10, per_squared_token=4.6e5, per_supervised_token=1.9e9, per_patch=2.6e9, per_squared_patch=3.9e5
)


def own_next_fit(sizes: np.ndarray, capacities: np.ndarray, seed: int | None) -> list[list[int]]:
    """A packer as users write them."""
    order = np.arange(len(sizes)) if seed is None else np.random.default_rng(seed).permutation(len(sizes))
    packs_in, number = next_fit(sizes, order, capacities)
    sizes[:] = capacities[:] = 0  # which is its own business
    return np.split(order, np.searchsorted(packs_in, np.arange(1, number))) if number else []


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


def runs_of(labels: list[bool]) -> str:
    """Lengths of spans, the first without loss."""
    found = [len(list(same)) for _, same in groupby(labels)]
    return ",".join(map(str, found if labels and not labels[0] else [0, *found]))


def lvis_table(folder: Path, count: int, seed: int = 0, **more: Any) -> CostTable:
    """A cost table of such samples."""
    return write_table(folder, {**lvis_like(count, seed), **more.pop("columns", {})}, **more)


def made_plan(epochs: list[dict[str, Any]], **config: Any) -> PackPlan:
    """A plan whose packs hold what `epochs` says; each pack has one entry."""
    files = []
    for columns in epochs:
        count = len(columns["tokens"])
        filled = {name: columns.get(name, np.zeros(count)) for name in PACK_SCHEMA.names}
        filled |= {"end": np.arange(1, count + 1), "samples": columns.get("samples", np.ones(count))}
        packs = pa.table([pa.array(filled[f.name]).cast(f.type) for f in PACK_SCHEMA], schema=PACK_SCHEMA)
        files.append(EpochPacks(pa.table([pa.array(np.arange(count))], schema=ENTRY_SCHEMA), packs))
    summary = PlanSummary(
        config=PackingConfig(**{"packing_length": 10**9, "epochs": len(files), **config}),
        inputs={},
        packer_version=1,
        cost_table="",
        work=WORK,
        files=len(files),
        epochs=tuple(EpochCounts(packs=file.num_packs, entries=file.num_entries) for file in files),
    )
    return PackPlan(summary, files)


def packed(kind: str, sizes: np.ndarray, capacities: np.ndarray, seed: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Packs by strategy."""
    return pack_matrix(sizes, capacities, kind, seed, "fast")


def digest_of(kind: str, resources: int, seed: int | None) -> str:
    """A short name of the packs that a strategy makes of 300 samples under one or two limits."""
    columns = lvis_like(300, seed=7, longest=12_000)
    sizes = np.stack([columns["tokens"], columns["patches"]][:resources], axis=1)
    order, offsets = packed(kind, sizes, np.array([20_000, 16_000][:resources]), seed)
    return hashlib.sha256(repr((order.tolist(), offsets.tolist())).encode()).hexdigest()[:16]


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
