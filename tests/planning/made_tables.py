"""What the tests of studies share: cost tables made from arrays, and model shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from packtrain.core.checksums import file_sums
from packtrain.families.shape import LanguageShape, VisionShape
from packtrain.measuring.columns import COST_SCHEMA, MEDIA_SCHEMA
from packtrain.measuring.measure_summary import EntryCounts, MeasureSummary, Places, SourcePlace
from packtrain.measuring.table import COSTS, LEDGER, MEDIA, CostTable, write_summary
from packtrain.predicting.values import ModelShape, ParameterCounts

Columns = Mapping[str, np.ndarray]


def write_table(
    folder: Path,
    columns: Columns,
    *,
    mixture: Mapping[str, Mapping[str, float | None]] | None = None,
    reasons: Mapping[str, int] | None = None,
) -> CostTable:
    """A measured folder with these columns; what is left out follows from them or is 0."""
    rows = len(columns["tokens"])
    media = columns.get("image_tokens", 0) + columns.get("video_tokens", 0)
    tokens = np.asarray(columns["tokens"])
    text = tokens - media
    derived = {
        "index": np.arange(rows),
        "id": [f"sample-{number}" for number in range(rows)],
        "origin": [f"data.jsonl:{number + 1}" for number in range(rows)],
        "source": ["data"] * rows,
        "text_tokens": text,
        "tail_tokens": text,
        "tail_runs": [_turns(number) for number in columns.get("tail_tokens", text).tolist()],
        "supervised_tokens": np.maximum(text * 2 // 3, 1),
        "max_patches_per_image": columns.get("patches", np.zeros(rows, np.int64)),
    }
    zeros = np.zeros(rows, np.int64)
    found = {name: columns.get(name, derived.get(name, zeros)) for name in COST_SCHEMA.names}
    arrays = [pa.array(found[field.name]).cast(field.type) for field in COST_SCHEMA]
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(arrays, schema=COST_SCHEMA), folder / COSTS, row_group_size=4096)
    pq.write_table(MEDIA_SCHEMA.empty_table(), folder / MEDIA)
    (folder / LEDGER).write_text("")
    left_out = dict(reasons or {})
    lost = sum(left_out.values())
    counts = EntryCounts(entries=rows + lost, rows=rows, ledger=lost, reasons=left_out)
    request = {"specs": [{"name": "data", "format": "jsonl", "media_root": "."}], "limits": {}}
    summary = MeasureSummary(
        inputs={"request": request},
        places=Places(model="model", sources=(SourcePlace(path="data.jsonl", media_root="."),)),
        mixture=dict(mixture or {"data": {"repeats": None, "weight": None}}),
        counts=counts,
        files=((0, "data.jsonl"),),
        sums=file_sums(folder, (COSTS, MEDIA)),
    )
    write_summary(folder, summary)
    return CostTable.load(folder)


def _turns(tokens: int) -> str:
    """Sixteen turns, of which two thirds carry loss."""
    turns = [tokens // 48, 2 * tokens // 48] * 16
    return ",".join(map(str, [*turns, tokens - sum(turns)]))


def detection(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """One image each and texts of very different lengths, as detection sets have: most short, some above 20,000."""
    random = np.random.default_rng(seed)
    text = np.clip(np.round(random.lognormal(6.1, 1.25, rows)), 20, 40_000).astype(np.int64)
    image = random.integers(240, 430, rows)
    return {
        "tokens": text + image,
        "image_tokens": image,
        "images": np.ones(rows, np.int64),
        "patches": 4 * image,
        "objects": text // 25,
        "supervised_tokens": text * 4 // 5,
    }


def texts(lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Samples without media."""
    return {"tokens": np.asarray(lengths, np.int64)}


def films(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Short texts with videos of many patches."""
    random = np.random.default_rng(seed)
    frames = random.integers(8, 33, rows) // 2 * 2
    video = frames // 2 * 64
    text = random.integers(30, 200, rows)
    return {
        "tokens": text + video,
        "video_tokens": video,
        "videos": np.ones(rows, np.int64),
        "frames": frames,
        "patches": 16 * video,
        "max_patches_per_image": np.full(rows, 1024),
    }


# Sizes of a two-billion model with an encoder of 24 layers, as published.
TWO_B = ModelShape(
    model_type="qwen3_vl",
    language=LanguageShape(
        hidden=2048,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=6144,
        vocabulary=151_936,
        tied=True,
        context_length=262_144,
    ),
    vision=VisionShape(
        hidden=1024,
        layers=24,
        heads=16,
        intermediate=4096,
        gated=False,
        patch_elements=1536,
        full_attention_layers=24,
        patches_per_token=4,
        projector_flops_per_token=4 * 2 * (4096 * 4096 + 4096 * 2048),
        projector_elements_per_token=4 * (4096 + 4096 + 2048),
    ),
    parameters=ParameterCounts(
        embedding=311_164_928, layers=1_409_409_024, head=0, vision=304_000_000, projector=100_000_000
    ),
    counted_from="config",
)
# A small model of texts alone.
TEXT = ModelShape(
    model_type="llama",
    language=LanguageShape(
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
        vocabulary=49_152,
        tied=True,
        context_length=8192,
    ),
    vision=None,
    parameters=ParameterCounts(embedding=28_311_552, layers=106_203_456, head=0),
    counted_from="config",
)
