"""How well packs are delivered: speed beside a plain DataLoader, time to the first batch, memory over many steps."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from packtrain.bench.loader_data import LongData, records, write_lines, write_long, write_pictures, write_shards
from packtrain.bench.loader_memory import memory_over_steps
from packtrain.bench.loader_process import fresh
from packtrain.bench.loader_speed import SpeedTask, epochs_needed, speed
from packtrain.bench.loader_start import start_times, starts
from packtrain.bench.result_tables import show_loader as show_bench
from packtrain.config.dataset_config import DatasetConfig
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError
from packtrain.families.model_folder import resolve

__all__ = ["bench_loader", "show_bench"]

PACK = 4_096  # tokens of a pack where speed is measured
SHORT_PACK = 256  # of the long datasets, for many steps in little time
SMALL = (256, 256)  # pictures there
TENTH = 10  # how much smaller the smaller of two datasets is


def bench_loader(
    *,
    samples: int,
    rows: int,
    steps: int,
    workers: tuple[int, ...],
    model: str,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """All comparisons, on data made for them; `rows` are those of the larger of two datasets."""
    folder = str(resolve(model, cache_dir() / "models").absolute())
    result: dict[str, Any] = {
        "model": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        config = DatasetConfig(dataset_path=temporary, model=folder, workers=1, check=0, seed=0)
        progress(f"speed: {samples:,} samples, workers {', '.join(map(str, workers))}")
        result["speed"] = _speed(root, config, samples, workers)
        long = []
        for size in (rows // TENTH, rows):
            progress(f"a dataset of {size:,} rows")
            long.append(_long(root, config, size, steps))
        result["data"] = [_about(one) for one in long]
        progress("time to the first batch")
        result["start"] = start_times(starts(*long), folder)
        result["memory"] = []
        for data in long:
            progress(f"memory over {steps:,} steps of {data.rows:,} rows")
            result["memory"].append(memory_over_steps(data, steps, max(workers)))
    return result


def _speed(root: Path, config: DatasetConfig, samples: int, workers: tuple[int, ...]) -> dict[str, Any]:
    folder = root / "speed"
    pictures = write_pictures(folder)
    found = records(samples, pictures, lambda n: 1 + (n * 37) % 400)
    shards = write_shards(folder / "shards", found, folder)
    config = replace(config, packing_length=PACK, epochs=epochs_needed(), cache_dir=str(folder / "cache"))
    task = SpeedTask(
        lines=replace(config, dataset_path=str(write_lines(folder / "lines.jsonl", found))),
        shards=replace(config, dataset_path=str(shards)),
        folder=config.model_name,
        workers=workers,
    )
    return {"capacity": PACK, **fresh(speed, task)}


def _long(root: Path, config: DatasetConfig, rows: int, steps: int) -> LongData:
    """A dataset of many short lines, each about a small picture."""
    folder = root / f"long-{rows}"
    images = write_pictures(folder)
    for name in images:
        with Image.open(folder / name) as picture:
            picture.resize(SMALL).save(folder / name)
    data = write_long(folder, rows, replace(config, packing_length=SHORT_PACK), images)
    if data.packs < steps:
        raise ConfigError(
            "--steps",
            got=steps,
            expected=f"at most the {data.packs:,} packs of the smaller dataset ({data.rows:,} rows)",
            fix="use fewer steps or more rows",
        )
    return data


def _about(data: LongData) -> dict[str, Any]:
    return {
        "rows": data.rows,
        "packs": data.packs,
        "fill": data.fill,
        "capacity": data.config.packing_length,
        "prepare_seconds": data.prepare_seconds,
        "data_bytes": data.data_bytes,
        "made_bytes": data.made_bytes,
    }
