"""How long something takes, when the machine has other things to do as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(work: Callable[[], T], *, rounds: int = 5, seconds: float = 1.0) -> tuple[T, float]:
    """What the work returns, and its seconds: the fastest of a few rounds, fewer once `seconds` are spent.

    A round counts as the smaller of elapsed and processor time: the one is too long where other programs hold the core,
    the other where the work uses several.
    """
    fastest, begun = float("inf"), time.perf_counter()
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        result = work()
        fastest = min(fastest, time.perf_counter() - wall, time.process_time() - cpu)
        if time.perf_counter() - begun > seconds:
            break
    return result, fastest
