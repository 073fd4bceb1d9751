"""Worker processes: which signals they hear, the memory they share, and what their loader says of those that die.

Signals to a whole group, as terminals and launchers send them, are for the process that trains: it has to save. A
worker begins with them blocked, leaves the group, and forgets those that came meanwhile. Until it has left, torch's own
handlers, or none, would end it. A worker whose process is gone notices that by itself.

Batches are in shared memory that has no name, so nothing of it is left when its processes are killed.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from packtrain.core.errors import MemoryLimitError

WORKER_DIED = re.compile(r"DataLoader worker \(|DataLoader timed out")  # how torch says it
_PIDS = re.compile(r"\d+")
_SHM = "/dev/shm"
_FULL = re.compile(r"(allocate|map) shared memory|unable to (write to|open|resize) (shared|file </torch_)")


class Waiting(Protocol):
    """An iteration over the batches of a loader."""

    waiting: bool  # is it inside `next`, so that it can say what has happened?
    pids: frozenset[int]  # of its workers


_watched: weakref.WeakSet[Waiting] = weakref.WeakSet()
_installed: list[Any] = []


def defer_worker_deaths(waits: Waiting) -> None:
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


def empty_batch_tensor(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory for a tensor; of a worker, memory that it shares, so that handing it over does not copy it again."""
    size = math.prod(shape) * dtype.itemsize
    if get_worker_info() is None or not size:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.empty(0, dtype=dtype).set_(_storage(size), 0, tuple(shape))


def _storage(size: int) -> torch.UntypedStorage:
    if not hasattr(os, "memfd_create"):
        return torch.UntypedStorage._new_shared(size)
    # A file in /dev/shm, as torch makes it, stays there where its process is killed before it could be unlinked, and
    # /dev/shm of a container is small.
    descriptor = os.memfd_create("packtrain-batch", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)
    finally:
        os.close(descriptor)  # the storage has its own


class SharedBatches:
    """A collator whose batches are, in a worker, all in such memory."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, rows: Any) -> Any:
        batch = self.collate(rows)
        if get_worker_info() is not None and isinstance(batch, dict):
            for name, value in batch.items():
                if isinstance(value, Tensor) and value.device.type == "cpu" and not value.is_shared():
                    batch[name] = empty_batch_tensor(value.shape, value.dtype).copy_(value)
        return batch
