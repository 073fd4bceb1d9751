"""What the host has for a benchmark: processors, threads, and how long the system held it back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_STATS = (Path("/sys/fs/cgroup/cpu.stat"), Path("/sys/fs/cgroup/cpu/cpu.stat"))
_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def about_host(threads: int) -> dict[str, Any]:
    """Processors that there are and that may be used, the container's share of them, and threads of one process."""
    return {
        "cpus": os.cpu_count(),
        "usable_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_limit": _text(_LIMIT),
        "threads": threads,
    }


def throttled_seconds() -> float | None:
    """How long this container was kept from running so far, because it had used up its share; None: not known."""
    for path in _STATS:
        for line in _text(path).splitlines():
            name, _, value = line.partition(" ")
            if name in ("throttled_usec", "throttled_time") and value.isdigit():
                return int(value) / (1e6 if name == "throttled_usec" else 1e9)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
