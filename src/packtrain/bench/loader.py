"""How well packs are delivered: speed beside a plain DataLoader, time to the first batch, memory over many steps."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from PIL import Image

from packtrain.bench.data import PICTURES, LongData, forget_pages, write_long, write_pictures, write_shards
from packtrain.bench.host import in_new_process, tree_memory
from packtrain.bench.loader_speed import SpeedTask, epochs_needed, plain_loader, speed
from packtrain.config.dataset_config import DatasetConfig
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError
from packtrain.families.model_folder import resolve
from packtrain.records.synthetic import picture_chats, write_lines

PACK = 4_096  # tokens of a pack where speed is measured
SHORT_PACK = 256  # of the long datasets, for many steps in little time
SMALL = (256, 256)  # pictures there
TENTH = 10  # how much smaller the smaller of two datasets is
ROUNDS = 2  # of starts
SPAN = 100  # steps at either end of a run whose memory is compared
SAMPLES = 10  # of memory within such a span
PARTS = 10  # of all steps, after each of which the course has a sample

Access = Literal["map-style", "streaming"]


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
        result["data"] = [_data_row(one) for one in long]
        progress("time to the first batch")
        result["start"] = _start_times(_starts(*long), folder)
        result["memory"] = []
        for data in long:
            progress(f"memory over {steps:,} steps of {data.rows:,} rows")
            result["memory"].append(_memory_over_steps(data, steps, max(workers)))
    return result


def _speed(root: Path, config: DatasetConfig, samples: int, workers: tuple[int, ...]) -> dict[str, Any]:
    folder = root / "speed"
    write_pictures(folder)
    records = list(picture_chats(PICTURES, (1 + (n * 37) % 400 for n in range(samples))))
    shards = write_shards(folder / "shards", records, folder)
    config = replace(config, packing_length=PACK, epochs=epochs_needed(), cache_dir=str(folder / "cache"))
    task = SpeedTask(
        lines=replace(config, dataset_path=str(write_lines(folder / "lines.jsonl", records))),
        shards=replace(config, dataset_path=str(shards)),
        folder=config.model_name,
        workers=workers,
    )
    return {"capacity": PACK, **in_new_process(speed, task)}


def _long(root: Path, config: DatasetConfig, rows: int, steps: int) -> LongData:
    """A dataset of many short lines, each about a small picture."""
    folder = root / f"long-{rows}"
    write_pictures(folder)
    for name in PICTURES:
        with Image.open(folder / name) as picture:
            picture.resize(SMALL).save(folder / name)
    data = write_long(folder, rows, replace(config, packing_length=SHORT_PACK))
    if data.packs < steps:
        raise ConfigError(
            "--steps",
            got=steps,
            expected=f"at most the {data.packs:,} packs of the smaller dataset ({data.rows:,} rows)",
            fix="use fewer steps or more rows",
        )
    return data


def _data_row(data: LongData) -> dict[str, Any]:
    return {
        "rows": data.rows,
        "packs": data.packs,
        "fill": data.fill,
        "capacity": data.config.packing_length,
        "prepare_seconds": data.prepare_seconds,
        "data_bytes": data.data_bytes,
        "made_bytes": data.made_bytes,
    }


# ---- time to the first batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One way to begin."""

    data: LongData
    access: Access = "map-style"
    share: float = 0.0  # of the epoch's packs that are done


def _starts(small: LongData, large: LongData) -> list[Start]:
    """A tenth of the rows, then all of them from several places."""
    return [
        Start(data=small),
        *(Start(data=large, share=share) for share in (0.0, 0.01, 0.99)),
        Start(data=large, access="streaming", share=0.99),
    ]


def _start_times(cases: Sequence[Start], folder: str) -> list[dict[str, Any]]:
    """All cases and a plain DataLoader, one after the other, several rounds; every number is a median."""
    plain = cases[-1].data
    rounds = []
    for _ in range(ROUNDS):
        times = [_first_batch_of(case) for case in cases]
        forget_pages(_files(plain))
        times.append(in_new_process(plain_first_batch, plain.config.dataset_path, folder, time.time()))
        rounds.append(times)
    named: list[dict[str, Any]] = [
        *({"way": case.access, "rows": case.data.rows, "share": case.share} for case in cases),
        {"way": "plain DataLoader", "rows": plain.rows, "share": 0.0},
    ]
    return [{**name, **_medians([times[number] for times in rounds])} for number, name in enumerate(named)]


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds as medians; what is no time is the same in every round."""
    times = {name: median(one[name] for one in rounds) for name in rounds[0] if name.endswith("seconds")}
    return {**rounds[0], **times}


def _files(data: LongData) -> list[Path]:
    cache = Path(str(data.config.cache_dir))
    return [Path(str(data.config.dataset_path)), *(file for file in cache.rglob("*") if file.is_file())]


def _first_batch_of(case: Start) -> dict[str, Any]:
    forget_pages(_files(case.data))
    return in_new_process(first_batch, case.data.config, case.access, case.share, time.time())


def first_batch(config: DatasetConfig, access: Access, share: float, launched: float) -> dict[str, Any]:
    """In a new process: seconds since it was launched, step by step, and which pack came first."""
    from packtrain.app.datasets import MultiModalDataset, MultiModalIterableDataset

    _load_libraries()
    imported = time.time()
    dataset = (MultiModalDataset if access == "map-style" else MultiModalIterableDataset)(config)
    dataset.build()
    built = time.time()
    loader = dataset.loader()
    behind = int(dataset.plan.epoch(0).num_packs * share)
    loader.load_state_dict({**loader.state_dict(), "next_pack": behind})
    placed = time.time()
    batch = next(iter(loader))
    delivered = time.time()
    return {
        "import_seconds": imported - launched,
        "open_seconds": built - imported,
        "state_seconds": placed - built,
        "batch_seconds": delivered - placed,
        "seconds": delivered - launched,
        "behind": behind,
        "pack": batch.info.keys[0].pack,
        "samples": batch.info.samples,
    }


def plain_first_batch(path: str, folder: str, launched: float) -> dict[str, Any]:
    """The same of a plain DataLoader, which begins at the beginning."""
    _load_libraries()
    imported = time.time()
    loader = plain_loader(Path(path), folder, batch_size=8, workers=0)
    built = time.time()
    batch = next(iter(loader))
    delivered = time.time()
    return {
        "import_seconds": imported - launched,
        "open_seconds": built - imported,
        "state_seconds": 0.0,
        "batch_seconds": delivered - built,
        "seconds": delivered - launched,
        "behind": 0,
        "pack": None,
        "samples": batch["samples"],
    }


def _load_libraries() -> None:
    """What every program that trains such a model has loaded, so that the rest is the loader's own time."""
    import torch
    from transformers import AutoImageProcessor, AutoProcessor, AutoVideoProcessor  # noqa: F401

    torch.set_num_threads(1)


# ---- memory


def _memory_over_steps(data: LongData, steps: int, workers: int) -> dict[str, Any]:
    """Mean bytes of the first and of the last steps, in a process of its own."""
    course = in_new_process(deliver, data, steps, workers)
    span = min(SPAN, max(1, steps // 2))
    first = [sample for sample in course if sample["step"] <= span]
    last = [sample for sample in course if sample["step"] > steps - span]
    return {
        "rows": data.rows,
        "steps": steps,
        "workers": workers,
        "processes": course[-1]["processes"],
        "batches": course[-1]["step"],
        "samples": course[-1]["samples"],
        "first": _mean_bytes(first),
        "last": _mean_bytes(last),
        # Whether growth goes on or comes to an end.
        "course": [sample for sample in course if sample["step"] * PARTS % steps < course[0]["step"] * PARTS],
    }


def _mean_bytes(samples: Sequence[dict[str, int]]) -> dict[str, float]:
    """Of each kind of memory that the system tells apart."""
    counts = ("step", "samples", "processes")
    return {name: mean(sample[name] for sample in samples) for name in samples[0] if name not in counts}


def deliver(data: LongData, steps: int, workers: int) -> list[dict[str, int]]:
    """Memory after some of the steps; batches are let go, as training lets go of them."""
    import torch

    from packtrain.app.datasets import MultiModalDataset

    torch.set_num_threads(1)
    dataset = MultiModalDataset(data.config)
    dataset.build()
    every, samples, course = max(1, min(SPAN, steps // 2) // SAMPLES), 0, []
    for step, batch in enumerate(dataset.loader(num_workers=workers), start=1):
        samples += batch.info.samples
        del batch
        if step % every == 0 or step == steps:
            course.append({"step": step, "samples": samples, **tree_memory(os.getpid())})
        if step == steps:
            break
    return course
