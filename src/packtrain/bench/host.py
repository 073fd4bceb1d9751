"""Tools of the benchmarks: the clock, new processes, the memory of processes, and facts about the host."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")
# What /proc calls it, and what we do. Pages that several processes share are counted in equal parts (PSS).
_KINDS = {"Rss": "rss", "Pss": "pss", "Pss_Anon": "anonymous", "Pss_File": "file", "Pss_Shmem": "shared"}
_CPU_STATS = (Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat"))
_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


# ---- the clock


def time_work(work: Callable[[], T], *, rounds: float = 9, seconds: float = 1.0) -> tuple[T, float]:
    """What the work returns, and its seconds: the median of some rounds, fewer once `seconds` are spent.

    A round counts as the smaller of elapsed and processor time: the one is too long where other programs hold the core,
    the other where the work uses several.
    """
    times: list[float] = []
    begun = time.perf_counter()
    while not times or (len(times) < rounds and time.perf_counter() - begun < seconds):
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        times.append(min(time.perf_counter() - wall, time.process_time() - cpu))
    return result, median(times)


# ---- processes and their memory


def in_new_process(work: Callable[..., T], *arguments: object) -> T:
    """The result of a process that does nothing else, with one thread."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=_use_one_thread) as pool:
        return pool.submit(work, *arguments).result()


def _use_one_thread() -> None:
    """Workers of a DataLoader have one thread each, so a process without workers gets no more."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["OMP_NUM_THREADS"] = "1"


def tree_memory(pid: int) -> dict[str, int]:
    """Bytes by kind, of a process and its descendants; only resident memory where the system does not say more."""
    total: Counter[str] = Counter(processes=0)
    waiting = [pid]
    while waiting:
        process = Path("/proc") / str(waiting.pop())
        try:
            memory = _process_memory(process)
            children = [(task / "children").read_text() for task in (process / "task").iterdir()]
        except OSError:  # it has ended meanwhile
            continue
        total.update(memory, processes=1)
        waiting += [int(child) for text in children for child in text.split()]
    return dict(total)


def _process_memory(process: Path) -> dict[str, int]:
    rollup = process / "smaps_rollup"
    if rollup.exists():
        lines = [line.split() for line in rollup.read_text().splitlines()[1:]]
        return {_KINDS[name[:-1]]: int(size) << 10 for name, size, *_ in lines if name[:-1] in _KINDS}
    return {"rss": _status_bytes(process, "VmRSS:")}


def peak_memory() -> int:
    """The largest resident memory of this process so far, in bytes; unlike getrusage, nothing of its parent's."""
    return _status_bytes(Path("/proc/self"), "VmHWM:")


def _status_bytes(process: Path, name: str) -> int:
    lines = (process / "status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


# ---- the host


def host_facts(threads: int) -> dict[str, Any]:
    """Processors that there are and that may be used, the container's share of them, and threads of one process."""
    return {
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_limit": _read_text(_CPU_LIMIT),
        "threads": threads,
    }


def throttled_seconds() -> float | None:
    """How long this container was kept from running so far, because it had used up its share; None: not known."""
    for path in _CPU_STATS:
        for line in _read_text(path).splitlines():
            name, _, value = line.partition(" ")
            if name in ("throttled_usec", "throttled_time") and value.isdigit():
                return int(value) / (1e6 if name == "throttled_usec" else 1e9)
    return None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
