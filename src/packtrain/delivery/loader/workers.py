"""Worker processes: which signals they hear, and what their loader says of those that die.

Signals to a whole group, as terminals and launchers send them, are for the process that trains: it has to save. A
worker begins with them blocked, leaves the group, and forgets those that came meanwhile. Until it has left, torch's own
handlers, or none, would end it. A worker whose process is gone notices that by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, Protocol

from packtrain.core.errors import MemoryLimitError

WORKER_DIED = re.compile(r"DataLoader worker \(|DataLoader timed out")  # how torch says it
_PIDS = re.compile(r"\d+")
_SHM = "/dev/shm"
_FULL = re.compile(r"(allocate|map) shared memory|unable to (write to|open|resize) (shared|file </torch_)")


class WaitState(Protocol):
    """An iteration over the batches of a loader."""

    waiting: bool  # is it inside `next`, so that it can say what has happened?
    pids: frozenset[int]  # of its workers


_watched: weakref.WeakSet[WaitState] = weakref.WeakSet()
_installed: list[Any] = []


def defer_worker_deaths(waits: WaitState) -> None:
    """Keep torch from raising the death of these workers in the middle of whatever the caller does meanwhile.

    Its handler of SIGCHLD still runs. The loader looks at its workers before every batch, so nothing is lost by that.
    """
    _watched.add(waits)
    if threading.current_thread() is not threading.main_thread():
        return  # torch has no handler there either
    current = signal.getsignal(signal.SIGCHLD)
    if not callable(current) or current in _installed:
        return

    def handler(number: int, frame: Any) -> None:
        try:
            current(number, frame)
        except RuntimeError as error:
            if not WORKER_DIED.match(str(error)) or not _is_deferred(str(error)):
                raise

    _installed[:] = [handler]
    signal.signal(signal.SIGCHLD, handler)


def _is_deferred(message: str) -> bool:
    """Does this concern workers of a loader that is not being asked for a batch just now?"""
    pids = set(map(int, _PIDS.findall(message)))
    concerned = [waits for waits in _watched if waits.pids & pids]
    return bool(concerned) and not any(waits.waiting for waits in concerned)


def shared_memory_full(error: Exception) -> MemoryLimitError | None:
    """The error to raise if /dev/shm is full, e.g. from batches of the user's own collator; else None."""
    if not _FULL.search(str(error)):
        return None
    size = shutil.disk_usage(_SHM) if os.path.isdir(_SHM) else None
    free = f"; {size.free:,} of its {size.total:,} bytes are free" if size is not None else ""
    return MemoryLimitError(
        f"shared memory ({_SHM})",
        got=f"too small for the batches of the workers{free}",
        expected="space for workers x prefetch_factor batches",
        fix="give the container more (docker run --shm-size=16g, or --ipc=host), or use fewer workers: with "
        "dataloader_num_workers: 0 (num_workers=0) none is needed",
    )


def exit_codes(workers: Iterable[Any]) -> list[int]:
    """The exit codes of workers that have ended."""
    return [worker.exitcode for worker in workers if worker.exitcode is not None]


def advice(codes: Sequence[int]) -> str:
    """The way out, by what the workers died of."""
    crashes = [code for code in codes if code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT, -signal.SIGFPE)]
    if crashes:
        return "a library crashed: reproduce it on these files with num_workers 0, and please report it"
    return "usually the system killed it (out of memory): use fewer workers or a smaller prefetch_factor"


# ---- signals

_TO_GROUPS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@contextmanager
def signals_blocked(*, forks: bool) -> Iterator[None]:
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
