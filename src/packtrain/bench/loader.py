"""How well packs are delivered: speed beside a plain DataLoader, time to the first batch, memory over many steps."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal

from PIL import Image

from packtrain.bench.data import (
    PICTURES,
    LongData,
    LongSize,
    forget_pages,
    write_long,
    write_pictures,
    write_shards,
)
from packtrain.bench.host import in_new_process, tree_memory
from packtrain.bench.loader_speed import PLAIN, Speed, SpeedTask, epochs_needed, plain_loader, speed
from packtrain.bench.printing import column
from packtrain.config.dataset_config import DatasetConfig
from packtrain.core.cache_root import cache_dir
from packtrain.core.errors import ConfigError
from packtrain.families.model_folder import resolve_model
from packtrain.records.synthetic import picture_chats, write_lines

PACK = 4_096  # tokens of a pack where speed is measured
SHORT_PACK = 256  # of the long datasets, for many steps in little time
SMALL = (256, 256)  # pictures there
TENTH = 10  # how much smaller the smaller of two datasets is
ROUNDS = 2  # of starts
SPAN = 100  # steps at either end of a run whose memory is compared
SAMPLES = 10  # of memory within such a span
PARTS = 10  # of all steps, after each of which the course has a sample

_TIMES = ("import_seconds", "open_seconds", "state_seconds", "batch_seconds")

Access = Literal["map-style", "streaming"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One way to begin."""

    data: LongData
    access: Access = "map-style"
    share: float = 0.0  # of the epoch's packs that are done


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstBatch:
    """A new process until it has its first batch, step by step, and which pack that was."""

    way: str = column("", "{}")
    rows: int = column("rows", default=0)  # of the dataset
    share: float = column("epoch done", "percent")
    seconds: float = column("seconds", "{:.2f}")  # since it was launched
    import_seconds: float = column("import", "{:.2f}")
    open_seconds: float = column("open", "{:.2f}")
    state_seconds: float = column("state", "{:.3f}")
    batch_seconds: float = column("first batch", "{:.3f}")
    behind: int  # packs that are done
    pack: int | None
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCourse:
    """Mean bytes by kind of memory, over the first and over the last steps; and now and then between them."""

    rows: int
    steps: int
    workers: int
    processes: int
    batches: int
    samples: int
    first: Mapping[str, float]
    last: Mapping[str, float]
    course: tuple[Mapping[str, int], ...]  # whether growth goes on or comes to an end


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderResult:
    """All comparisons of `packtrain bench loader`."""

    model: str
    cores: int
    load: float
    speed: Speed
    data: tuple[LongSize, ...]
    start: tuple[FirstBatch, ...]
    memory: tuple[MemoryCourse, ...]


def bench_loader(
    *,
    samples: int,
    rows: int,
    steps: int,
    workers: tuple[int, ...],
    model: str,
    progress: Callable[[str], None] = lambda _: None,
) -> LoaderResult:
    """All comparisons, on data made for them; `rows` are those of the larger of two datasets."""
    folder = str(resolve_model(model, cache_dir() / "models").absolute())
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        config = DatasetConfig(dataset_path=temporary, model=folder, workers=1, check=0, seed=0)
        progress(f"speed: {samples:,} samples, workers {', '.join(map(str, workers))}")
        speed = _speed(root, config, samples, workers)
        long: list[LongData] = []
        for size in (rows // TENTH, rows):
            progress(f"a dataset of {size:,} rows")
            long.append(_long(root, config, size, steps))
        progress("time to the first batch")
        start = _start_times(_starts(*long), folder)
        memory: list[MemoryCourse] = []
        for data in long:
            progress(f"memory over {steps:,} steps of {data.size.rows:,} rows")
            memory.append(_memory_over_steps(data, steps, max(workers)))
    return LoaderResult(
        model=model,
        cores=cores,
        load=load,
        speed=speed,
        data=tuple(one.size for one in long),
        start=start,
        memory=tuple(memory),
    )


def _speed(root: Path, config: DatasetConfig, samples: int, workers: tuple[int, ...]) -> Speed:
    folder = root / "speed"
    write_pictures(folder)
    records = list(picture_chats(PICTURES, (1 + (n * 37) % 400 for n in range(samples))))
    shards = write_shards(folder / "shards", records, folder)
    config = replace(config, packing_length=PACK, epochs=epochs_needed(), cache_dir=str(folder / "cache"))
    task = SpeedTask(
        lines=replace(config, dataset_path=str(write_lines(folder / "lines.jsonl", records))),
        shards=replace(config, dataset_path=str(shards)),
        folder=config.model_name,
        capacity=PACK,
        workers=workers,
    )
    return in_new_process(speed, task)


def _long(root: Path, config: DatasetConfig, rows: int, steps: int) -> LongData:
    """A dataset of many short lines, each about a small picture."""
    folder = root / f"long-{rows}"
    write_pictures(folder)
    for name in PICTURES:
        with Image.open(folder / name) as picture:
            picture.resize(SMALL).save(folder / name)
    data = write_long(folder, rows, replace(config, packing_length=SHORT_PACK))
    if data.size.packs < steps:
        raise ConfigError(
            "--steps",
            got=steps,
            expected=f"at most the {data.size.packs:,} packs of the smaller dataset ({data.size.rows:,} rows)",
            fix="use fewer steps or more rows",
        )
    return data


# ---- time to the first batch


def _starts(small: LongData, large: LongData) -> list[Start]:
    """A tenth of the rows, then all of them from several places."""
    return [
        Start(data=small),
        *(Start(data=large, share=share) for share in (0.0, 0.01, 0.99)),
        Start(data=large, access="streaming", share=0.99),
    ]


def _start_times(cases: Sequence[Start], folder: str) -> tuple[FirstBatch, ...]:
    """All cases and a plain DataLoader, one after the other, several rounds."""
    plain = cases[-1].data
    rounds = []
    for _ in range(ROUNDS):
        times = [_first_batch_of(case) for case in cases]
        forget_pages(_files(plain))
        times.append(in_new_process(plain_first_batch, plain.config.dataset_path, folder, time.time()))
        rounds.append(times)
    sizes = [*(case.data.size.rows for case in cases), plain.size.rows]
    return tuple(_medians(times, rows) for times, rows in zip(zip(*rounds, strict=True), sizes, strict=True))


def _medians(rounds: Sequence[FirstBatch], rows: int) -> FirstBatch:
    """Seconds as medians; what is no time is the same in every round."""
    times = {name: median(getattr(one, name) for one in rounds) for name in ("seconds", *_TIMES)}
    return replace(rounds[0], rows=rows, **times)


def _files(data: LongData) -> list[Path]:
    cache = Path(str(data.config.cache_dir))
    return [Path(str(data.config.dataset_path)), *(file for file in cache.rglob("*") if file.is_file())]


def _first_batch_of(case: Start) -> FirstBatch:
    forget_pages(_files(case.data))
    return in_new_process(first_batch, case.data.config, case.access, case.share, time.time())


def first_batch(config: DatasetConfig, access: Access, share: float, launched: float) -> FirstBatch:
    """In a new process: from its launch to the batch that follows this share of the packs."""
    from packtrain.app.datasets import MultiModalDataset, MultiModalIterableDataset

    _load_libraries()
    times = [launched, time.time()]
    dataset = (MultiModalDataset if access == "map-style" else MultiModalIterableDataset)(config)
    dataset.build()
    times.append(time.time())
    loader = dataset.loader()
    behind = int(dataset.plan.epoch(0).num_packs * share)
    loader.load_state_dict({**loader.state_dict(), "next_pack": behind})
    times.append(time.time())
    info = next(iter(loader)).info
    return _timed(times, way=access, share=share, behind=behind, pack=info.keys[0].pack, samples=info.samples)


def plain_first_batch(path: str, folder: str, launched: float) -> FirstBatch:
    """The same of a plain DataLoader, which begins at the beginning."""
    _load_libraries()
    times = [launched, time.time()]
    loader = plain_loader(Path(path), folder, batch_size=8, workers=0)
    times += [time.time()] * 2
    samples = next(iter(loader))["samples"]
    return _timed(times, way=PLAIN, share=0.0, behind=0, pack=None, samples=samples)


def _timed(times: list[float], **facts: Any) -> FirstBatch:
    """The batch is there now; times are the ends of the steps before it."""
    times = [*times, time.time()]
    steps: dict[str, Any] = dict(zip(_TIMES, (after - before for before, after in pairwise(times)), strict=True))
    return FirstBatch(**facts, **steps, seconds=times[-1] - times[0])


def _load_libraries() -> None:
    """What every program that trains such a model has loaded, so that the rest is the loader's own time."""
    import torch
    from transformers import AutoImageProcessor, AutoProcessor, AutoVideoProcessor  # noqa: F401

    torch.set_num_threads(1)


# ---- memory


def _memory_over_steps(data: LongData, steps: int, workers: int) -> MemoryCourse:
    """In a process of its own."""
    course = in_new_process(deliver, data, steps, workers)
    span = min(SPAN, max(1, steps // 2))
    return MemoryCourse(
        rows=data.size.rows,
        steps=steps,
        workers=workers,
        processes=course[-1]["processes"],
        batches=course[-1]["step"],
        samples=course[-1]["samples"],
        first=_mean_bytes([sample for sample in course if sample["step"] <= span]),
        last=_mean_bytes([sample for sample in course if sample["step"] > steps - span]),
        course=tuple(sample for sample in course if sample["step"] * PARTS % steps < course[0]["step"] * PARTS),
    )


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
