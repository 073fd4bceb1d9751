"""The memory of a process and all its children together, each shared page counted once (PSS)."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path


def tree_pss(pid: int) -> int:
    """Bytes of proportional memory of a process and its descendants; processes that end meanwhile count nothing."""
    total, waiting = 0, [pid]
    while waiting:
        process = Path("/proc") / str(waiting.pop())
        try:
            rollup = (process / "smaps_rollup").read_text()
            children = [(task / "children").read_text() for task in (process / "task").iterdir()]
        except OSError:
            continue
        total += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
        waiting += [int(child) for text in children for child in text.split()]
    return total


def peak_pss(command: list[str], every: float = 0.1) -> int:
    """The largest memory of a command and its children while it runs."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0
    while process.poll() is None:
        peak = max(peak, tree_pss(process.pid))
        time.sleep(every)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {process.stderr.read() if process.stderr else ''}")
    return peak
