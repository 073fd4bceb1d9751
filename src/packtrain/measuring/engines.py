"""Where units are measured: in this process, in local worker processes, or on a Ray cluster. Same results from each."""

from __future__ import annotations

import concurrent.futures
import functools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from packtrain.core.errors import ConfigError, PacktrainError, describe_exits
from packtrain.core.secrets import export_secrets, import_secrets
from packtrain.measuring.journal import UnitResult
from packtrain.measuring.work import Task, WorkItem, measure_unit

T = TypeVar("T")
R = TypeVar("R")
# With 0 a cluster that Ray starts listens on the loopback address alone: everyone who reaches one can run code in it.
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_AHEAD = 2  # units in flight for each worker: enough to keep it busy, few enough to keep memory flat


class Engine(Protocol):
    """Runs a task over work items; results come in any order."""

    def run(self, task: Task, items: Iterable[WorkItem]) -> Iterator[UnitResult]:
        """Measure every item."""
        ...


class InProcess:
    """No worker processes; the choice for small datasets and for debugging."""

    def run(self, task: Task, items: Iterable[WorkItem]) -> Iterator[UnitResult]:
        return (measure_unit(task, item) for item in items)


class LocalProcesses:
    """Worker processes on this machine. They end with their parent, however it ends."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def run(self, task: Task, items: Iterable[WorkItem]) -> Iterator[UnitResult]:
        work = functools.partial(measure_unit, task)
        return in_processes(self._workers, work, items, stage="measure", name=lambda item: item.unit.file)


def in_processes(
    workers: int, work: Callable[[T], R], items: Iterable[T], *, stage: str, name: Callable[[T], str]
) -> Iterator[R]:
    """What `work` makes of the items, in any order, in processes that end with this one; few items are in flight.

    Where a process dies, the error says which item it had in hand, by its `name`.
    """
    context = multiprocessing.get_context("spawn")
    hands = _Hands(context.RawArray("q", 2 * workers), context.Value("q", 0))
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(hands,)
    )
    pending: dict[concurrent.futures.Future[R], int] = {}
    names: dict[int, str] = {}  # of the items in flight
    processes: dict[int, Any] = {}
    complete = False
    try:
        for number, item in enumerate(items):
            if len(pending) >= _AHEAD * workers:
                yield from _finished(pending, names)
            with _no_interrupts(), _without_main():  # workers are started here, and inherit it
                names[number] = name(item)
                pending[pool.submit(_in_hand, work, number, item)] = number
            processes.update(getattr(pool, "_processes", None) or {})
        while pending:
            yield from _finished(pending, names)
        complete = True
    except concurrent.futures.process.BrokenProcessPool:
        raise _lost(stage, processes, hands, names) from None
    finally:
        if not complete:  # nobody waits for items in flight; workers hold nothing that could be lost
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.terminate()
        pool.shutdown(wait=True, cancel_futures=True)


def _finished(pending: dict[concurrent.futures.Future[R], int], names: dict[int, str]) -> Iterator[R]:
    done, _ = concurrent.futures.wait(pending, return_when=concurrent.futures.FIRST_COMPLETED)
    for future in done:
        result = future.result()  # before its item is forgotten: it may say that a process has died
        del names[pending.pop(future)]
        yield result


@dataclass(frozen=True, slots=True)
class _Hands:
    """Which item each worker has in hand, in memory that outlives it: pairs of process id and number."""

    pairs: Any
    taken: Any  # how many workers have a pair

    def take(self) -> int:
        """A pair for this process."""
        with self.taken.get_lock():
            at = int(self.taken.value)
            self.taken.value = at + 1
        return 2 * at

    def held(self) -> dict[int, int]:
        """The number of the item that each process had last."""
        pairs = list(self.pairs)
        return dict(zip(pairs[::2], pairs[1::2], strict=True))


_mine: list[tuple[_Hands, int]] = []  # of this worker process


def _in_hand(work: Callable[[T], R], number: int, item: T) -> R:
    """Work on an item, having noted that this process has it in hand."""
    for hands, at in _mine:
        hands.pairs[at : at + 2] = [os.getpid(), number]
    return work(item)


def _exit_code(process: Any) -> int | None:
    """How a process ended; where the pool's own thread was the one that waited for it, it notes that a moment later."""
    process.join(5)
    for _ in range(50):
        if process.exitcode is not None:
            break
        time.sleep(0.02)
    return None if process.exitcode is None else int(process.exitcode)


def _lost(stage: str, processes: Mapping[int, Any], hands: _Hands, names: Mapping[int, str]) -> PacktrainError:
    """What to say of a worker that died: of what, and over which item. The others are ended by the pool."""
    held, ended = hands.held(), {}
    for pid, process in processes.items():
        code = _exit_code(process)
        if code not in (None, 0, -signal.SIGTERM):
            ended[pid] = code
    over = [names[held[pid]] for pid in ended or held if held.get(pid) in names]
    got = f"a worker process ended with {describe_exits(ended.values()) or 'a signal'}" + (
        f" while it read {', '.join(over)}" if over else ""
    )
    if not ended or -signal.SIGKILL in ended.values():
        fix = "probably out of memory: run the same command again with fewer --workers"
    else:
        fix = "check or remove that file, and please report it; then run the same command again"
    return PacktrainError(stage, got=got, fix=f"{fix}; finished work is kept")


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal: those started here leave it to the parent, who starts them whole."""
    caught: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, _: caught.append(number)) if main else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if main:
            signal.signal(signal.SIGINT, handler)
        if caught:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep workers from running the user's script again, as starting a process does where it is not guarded."""
    main = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__spec__", "__file__") if hasattr(main, name)}
    main.__spec__ = None
    if "__file__" in kept:
        del main.__file__
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


def _start_worker(hands: _Hands) -> None:
    """Do not outlive the parent: after a `kill -9` nobody else would end this process."""
    _mine[:] = [(hands, hands.take())]
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    parent = multiprocessing.parent_process()

    def end_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


class RayCluster:
    """Units as Ray tasks; a task whose worker or node is lost is run again elsewhere."""

    def __init__(self, address: str | None = None, max_retries: int = 3) -> None:
        self._address, self._max_retries = address, max_retries

    @property
    def _starts(self) -> bool:
        """Is a cluster to be started on this machine?"""
        return self._address is None and not os.environ.get("RAY_ADDRESS")

    def run(self, task: Task, items: Iterable[WorkItem]) -> Iterator[UnitResult]:
        if self._starts:
            os.environ.setdefault(_LOOPBACK, "0")
        ray = _import_ray()
        started = not ray.is_initialized()
        if started:
            self._connect(ray)
        try:
            remote = ray.remote(max_retries=self._max_retries)(_measured_elsewhere)
            shared = ray.put((task, export_secrets()))
            limit = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
            pending: list[Any] = []
            for item in items:
                if len(pending) >= limit:
                    done, pending = ray.wait(pending, num_returns=1)
                    yield from ray.get(done)
                pending.append(remote.remote(shared, item))
            while pending:
                done, pending = ray.wait(pending, num_returns=1)
                yield from ray.get(done)
        except ray.exceptions.RayError as error:
            raise _from_ray(error) from error
        finally:
            if started:
                ray.shutdown()

    def _connect(self, ray: Any) -> None:
        try:
            address = "local" if self._starts else self._address
            ray.init(address=address, log_to_driver=False, configure_logging=False, include_dashboard=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                "--address",
                got=f"{self._address}: {error}",
                expected="the address of a running Ray cluster",
                fix="leave it out to start one on this machine",
            ) from None


def _measured_elsewhere(shared: tuple[Task, str], item: WorkItem) -> UnitResult:
    """A unit on a machine that has not the environment of this one."""
    task, secrets = shared
    import_secrets(secrets)
    return measure_unit(task, item)


def _from_ray(error: Any) -> Exception:
    """A lost task in our words; what a task itself raised as it is."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):
        return cause
    return PacktrainError(
        "measure",
        got=f"Ray lost a task: {str(error).splitlines()[0]}",
        fix="run the same command again; finished work is kept",
    )


def _import_ray() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError("--engine ray", got="ray is not installed", fix="pip install 'packtrain[ray]'") from None
    return ray
