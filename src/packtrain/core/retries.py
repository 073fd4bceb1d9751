"""Retries after a pause, for faults of disks, networks and servers that pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import monotonic, sleep
from typing import TypeVar

Answer = TypeVar("Answer")
PAUSES = (0.1, 0.5, 2.0, 8.0)  # seconds before each new attempt


class Unreachable(OSError):
    """A source that did not answer in all its attempts, or never will: not to be retried."""


def is_transient(error: Exception) -> bool:
    """Is this a fault of a disk or a network that may be gone when it is tried again?"""
    return isinstance(error, OSError) and not isinstance(error, Unreachable)


def retry(
    ask: Callable[[], Answer], pauses: Sequence[float] = PAUSES, *, passes: Callable[[Exception], bool] = is_transient
) -> Answer:
    """The result of `ask`, tried again after each pause while its error may pass; at last its error."""
    for pause in (*pauses, None):
        try:
            return ask()
        except Exception as error:
            if pause is None or not passes(error):
                raise
            sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def waiting(patience: float, first: float, most: float) -> Iterator[None]:
    """The turns of a loop that waits: one at once, others after pauses that double from `first` up to `most` seconds.

    It ends when `patience` seconds are over.
    """
    end, pause = monotonic() + patience, first
    while True:
        yield
        if monotonic() > end:
            return
        sleep(pause)
        pause = min(2 * pause, most)
