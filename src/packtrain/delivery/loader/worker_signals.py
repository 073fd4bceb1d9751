"""Signals to a whole group, as terminals and launchers send them, are for the process that trains: it has to save.

A worker begins with them blocked, leaves the group, and forgets those that came meanwhile. Until it has left, torch's
own handlers, or none, would end it. A worker whose process is gone notices that by itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

_TO_GROUPS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def held_back(*, forks: bool) -> Iterator[None]:
    """Blocks them in processes that begin meanwhile; for this one they come when it is over."""
    if not forks:  # other processes need it, and starting it undoes what is blocked
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _TO_GROUPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_group(worker: int) -> None:
    """A DataLoader's `worker_init_fn`."""
    os.setpgid(0, 0)
    while came := signal.sigpending().intersection(_TO_GROUPS):
        signal.sigwait(came)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TO_GROUPS)
