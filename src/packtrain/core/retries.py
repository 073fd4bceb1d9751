"""Retries after a pause, for faults of disks, networks and servers that pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import sleep
from typing import TypeVar

Answer = TypeVar("Answer")


class Unreachable(OSError):
    """A source that did not answer in all its attempts, or never will: not to be retried."""


def of_the_moment(error: Exception) -> bool:
    """Is this a fault of a disk or a network that may be gone when it is tried again?"""
    return isinstance(error, OSError) and not isinstance(error, Unreachable)


def retried(
    ask: Callable[[], Answer], pauses: Sequence[float], *, passes: Callable[[Exception], bool] = of_the_moment
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
