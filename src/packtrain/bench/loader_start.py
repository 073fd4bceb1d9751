"""Time to the first batch of a new process: at the start of an epoch, and when resuming from a state."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from packtrain.bench.loader_data import LongData, forget_pages
from packtrain.bench.loader_process import fresh
from packtrain.config.dataset_config import DatasetConfig

ROUNDS = 2
Access = Literal["map-style", "streaming"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """One way to begin."""

    data: LongData
    access: Access = "map-style"
    share: float = 0.0  # of the epoch's packs that are done


def starts(small: LongData, large: LongData) -> list[Start]:
    """A tenth of the rows, then all of them from several places."""
    return [
        Start(data=small),
        *(Start(data=large, share=share) for share in (0.0, 0.01, 0.99)),
        Start(data=large, access="streaming", share=0.99),
    ]


def start_times(cases: Sequence[Start], folder: str) -> list[dict[str, Any]]:
    """All cases and a plain DataLoader, one after the other, several rounds; every number is a median."""
    plain = cases[-1].data
    rounds = []
    for _ in range(ROUNDS):
        found = [_first_batch_of(case) for case in cases]
        forget_pages(_files(plain))
        found.append(fresh(plain_first_batch, plain.config.dataset_path, folder, time.time()))
        rounds.append(found)
    named: list[dict[str, Any]] = [
        *({"way": case.access, "rows": case.data.rows, "share": case.share} for case in cases),
        {"way": "plain DataLoader", "rows": plain.rows, "share": 0.0},
    ]
    return [{**name, **_medians([found[number] for found in rounds])} for number, name in enumerate(named)]


def _medians(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Seconds as medians; what is no time is the same in every round."""
    times = {name: median(one[name] for one in rounds) for name in rounds[0] if name.endswith("seconds")}
    return {**rounds[0], **times}


def _files(data: LongData) -> list[Path]:
    cache = Path(str(data.config.cache_dir))
    return [Path(str(data.config.dataset_path)), *(file for file in cache.rglob("*") if file.is_file())]


def _first_batch_of(case: Start) -> dict[str, Any]:
    forget_pages(_files(case.data))
    return fresh(first_batch, case.data.config, case.access, case.share, time.time())


def first_batch(config: DatasetConfig, access: Access, share: float, launched: float) -> dict[str, Any]:
    """In a new process: seconds since it was launched, step by step, and which pack came first."""
    from packtrain.app.datasets.build import MultiModalDataset, MultiModalIterableDataset

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
    from packtrain.bench.loader_plain import plain_loader

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
