"""Ctrl-C in the middle of a command: heard wherever it comes, and answered with what the same command would do."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Shown to a user who stopped a command.
CONTINUES = "the same command continues from what is complete"
STARTS_OVER = "nothing was written; the same command starts over"
_AGAIN = 0.02  # seconds after which a signal that was lost is sent again


class Interrupted(Exception):
    """Ctrl-C in the middle of a command: typer would end a KeyboardInterrupt itself, with words of its own."""


@contextmanager
def interruptible(then: str | Callable[[], str] = CONTINUES) -> Iterator[None]:
    """Turn Ctrl-C into our own words, and say what the same command would do."""
    try:
        yield
    except (KeyboardInterrupt, SystemError) as error:
        if not is_interrupt(error):
            raise
        raise Interrupted(then if isinstance(then, str) else then()) from None


def is_interrupt(error: BaseException) -> bool:
    """Is it Ctrl-C, or the SystemError that becomes of it while compiled code returns?"""
    cause: BaseException | None = error
    while isinstance(error, SystemError) and cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__
    return isinstance(cause, KeyboardInterrupt)


@contextmanager
def never_lost() -> Iterator[None]:
    """Send Ctrl-C again where Python had to drop it.

    Where compiled code calls back into Python, as compilers do when they have compiled a function, and in finalizers no
    exception can be raised: Python would print it and continue as if nobody had asked to stop.
    """
    before = sys.unraisablehook
    timers: list[threading.Timer] = []

    def take(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            before(dropped)
            return
        main = threading.main_thread().ident
        assert main is not None
        # Not here and now: it would be dropped again. And a signal, not a flag, for it has to end a wait.
        timer = threading.Timer(_AGAIN, signal.pthread_kill, (main, signal.SIGINT))
        timer.daemon = True
        timers.append(timer)
        timer.start()

    sys.unraisablehook = take
    try:
        yield
    except Exception as error:
        # What was left undone in that moment may fail in any way before the signal comes again, and only until then.
        if all(timer.finished.is_set() for timer in timers) or isinstance(error, Interrupted):
            raise
        raise Interrupted(CONTINUES) from error
    finally:
        sys.unraisablehook = before
        for timer in timers:
            timer.cancel()
