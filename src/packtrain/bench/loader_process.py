"""Measurements in processes of their own, and the memory of a process with all its children, by kind."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
# What /proc calls it, and what we do. Pages that several processes have are counted in equal parts (PSS).
_KINDS = {"Rss": "rss", "Pss": "pss", "Pss_Anon": "anonymous", "Pss_File": "file", "Pss_Shmem": "shared"}


def fresh(work: Callable[..., T], *arguments: object) -> T:
    """The result of a process that does nothing else, with one thread."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=_alone) as pool:
        return pool.submit(work, *arguments).result()


def _alone() -> None:
    """Workers of a DataLoader have one thread each, so the process that has no workers gets no more."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"


def tree_memory(pid: int) -> dict[str, int]:
    """Bytes by kind, of a process and its descendants; resident memory alone where the system tells no more."""
    total: Counter[str] = Counter(processes=0)
    waiting = [pid]
    while waiting:
        process = Path("/proc") / str(waiting.pop())
        try:
            found = _memory(process)
            children = [(task / "children").read_text() for task in (process / "task").iterdir()]
        except OSError:  # it has ended meanwhile
            continue
        total.update(found, processes=1)
        waiting += [int(child) for text in children for child in text.split()]
    return dict(total)


def _memory(process: Path) -> dict[str, int]:
    rollup = process / "smaps_rollup"
    if rollup.exists():
        lines = [line.split() for line in rollup.read_text().splitlines()[1:]]
        return {_KINDS[name[:-1]]: int(size) << 10 for name, size, *_ in lines if name[:-1] in _KINDS}
    status = (process / "status").read_text().splitlines()
    return {"rss": sum(int(line.split()[1]) << 10 for line in status if line.startswith("VmRSS:"))}
