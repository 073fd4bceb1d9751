"""The memory of a loader and its workers while it delivers: at the beginning and after many steps, by dataset size."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import mean
from typing import Any

from packtrain.bench.loader_data import LongData
from packtrain.bench.loader_process import fresh, tree_memory

SPAN = 100  # steps at either end that are compared
LOOKS = 10  # at memory within such a span
PARTS = 10  # of all steps, after each of which the course has one look


def memory_over_steps(data: LongData, steps: int, workers: int) -> dict[str, Any]:
    """Mean bytes of the first and of the last steps, in a process of its own."""
    looks = fresh(deliver, data, steps, workers)
    span = min(SPAN, max(1, steps // 2))
    first = [found for found in looks if found["step"] <= span]
    last = [found for found in looks if found["step"] > steps - span]
    return {
        "rows": data.rows,
        "steps": steps,
        "workers": workers,
        "processes": looks[-1]["processes"],
        "batches": looks[-1]["step"],
        "samples": looks[-1]["samples"],
        "first": _means(first),
        "last": _means(last),
        # Whether growth goes on or comes to an end.
        "course": [found for found in looks if found["step"] * PARTS % steps < looks[0]["step"] * PARTS],
    }


def _means(looks: Sequence[dict[str, int]]) -> dict[str, float]:
    """Bytes of each kind that the system tells."""
    return {name: mean(found[name] for found in looks) for name in looks[0] if name not in _NO_BYTES}


_NO_BYTES = ("step", "samples", "processes")


def deliver(data: LongData, steps: int, workers: int) -> list[dict[str, int]]:
    """What memory there is after some of the steps; batches are let go, as training lets go of them."""
    import torch

    from packtrain.app.datasets.build import MultiModalDataset

    torch.set_num_threads(1)
    dataset = MultiModalDataset(data.config)
    dataset.build()
    every, samples, looks = max(1, min(SPAN, steps // 2) // LOOKS), 0, []
    for step, batch in enumerate(dataset.loader(num_workers=workers), start=1):
        samples += batch.info.samples
        del batch
        if step % every == 0 or step == steps:
            looks.append({"step": step, "samples": samples, **tree_memory(os.getpid())})
        if step == steps:
            break
    return looks
