"""How long something takes, when the machine has other things to do as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TypeVar

T = TypeVar("T")


def timed(work: Callable[[], T], *, rounds: int = 9, seconds: float = 1.0) -> tuple[T, float]:
    """What the work returns, and its seconds: the median of some rounds, fewer once `seconds` are spent.

    A round counts as the smaller of elapsed and processor time: the one is too long where other programs hold the core,
    the other where the work uses several.
    """
    found: list[float] = []
    begun = time.perf_counter()
    while not found or (len(found) < rounds and time.perf_counter() - begun < seconds):
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        found.append(min(time.perf_counter() - wall, time.process_time() - cpu))
    return result, median(found)
