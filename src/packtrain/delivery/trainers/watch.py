"""Ranks that watch each other: when one dies, fails or hangs, all others end soon and say which one it was.

A collective waits for every rank, so one that is missing would make all others wait for a long time, and then name
nobody. Every rank writes heartbeats into a store. The watchdog of the first rank checks all of them,
those of the others check the first rank.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from packtrain.core.errors import ConfigError, PacktrainError, in_one_line
from packtrain.core.numbers import duration
from packtrain.core.public import visible

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

State = Literal["runs", "failed", "done", "ended"]
NOT_STARTED = -1  # the step of a rank that has not had its first batch
_BEFORE_ALL = (NOT_STARTED, 0)
_WATCHDOG_RANK = 0  # the rank that checks all others
_ROUNDS = 20  # heartbeats within a deadline
_LONGEST_INTERVAL = 5.0
START_DEADLINE = 1800.0  # seconds: models are compiled, and data are looked for
_RESERVE = 8  # intervals between noticing something and the last rank's end
_SOONEST = 0.25  # seconds between heartbeats of steps; longer steps are sent one by one
_ACKNOWLEDGED_WITHIN = 4  # intervals
_HURRIED = 2  # intervals without a heartbeat after which a rank is gone, once this one was told to end
_BROKEN = ("gloo", "nccl", "c10d", "processgroup", "connection closed", "connection reset", "broken pipe")


# ---- heartbeats, and what follows from them


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """The last report of one rank."""

    number: int  # grows with every heartbeat, so that nobody's clock is compared with another's
    host: str
    step: int = NOT_STARTED
    part: int = 0  # of the step
    at: str = ""  # the line of code its main thread was at
    state: State = "runs"
    message: str = ""  # why it failed or ended
    collateral: bool = False  # it failed in a way that another rank's end explains
    verdict: str = ""  # of the first rank's watchdog
    acknowledged: bool = False  # it knows the verdict

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.part

    def to_bytes(self) -> bytes:
        """Serialise for the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Heartbeat:
        """Parse the output of `to_bytes`."""
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeouts:
    """How long a rank may be in each state before the others give up, in seconds."""

    silent: float  # without a heartbeat
    behind: float  # at a step that others have left
    start: float  # until the first heartbeat, and until the first step once others have started


class Watchdog:
    """Checks heartbeats repeatedly and says, once it is sure, what is wrong. Its clock is its caller's."""

    def __init__(self, timeouts: Timeouts) -> None:
        self.timeouts = timeouts
        self._since: dict[tuple[int, str], tuple[object, float]] = {}

    def check(self, now: float, beats: Mapping[int, Heartbeat | None]) -> str:
        """A message that names the rank, its host and its last step; empty while nothing is wrong.

        A rank whose collective broke has failed, too, but names the wrong one: it is believed only if no rank turns
        out to be gone.
        """
        running = [beat.place for beat in beats.values() if beat is not None and beat.state == "runs"]
        furthest = max(running, default=_BEFORE_ALL)
        problems: list[tuple[int, int, str]] = []  # what comes first is to blame
        for rank, beat in beats.items():
            if beat is None:
                if self._lasts(now, rank, "missing", True) > self.timeouts.start:
                    problems.append((1, rank, f"rank {rank} has not started within {duration(self.timeouts.start)}"))
            elif beat.state == "ended":
                return beat.message  # the verdict of another rank
            elif beat.state == "failed":
                waited = self._lasts(now, rank, "failed", True)
                if not beat.collateral or waited > self.timeouts.silent:
                    problems.append((3 if beat.collateral else 0, rank, f"{_name(rank, beat)} failed: {beat.message}"))
            elif beat.state == "runs":
                problems += self._check_running(now, rank, beat, furthest)
        return min(problems)[2] if problems else ""

    def _check_running(
        self, now: float, rank: int, beat: Heartbeat, furthest: tuple[int, int]
    ) -> list[tuple[int, int, str]]:
        silent = self._lasts(now, rank, "silent", beat.number)
        if silent > self.timeouts.silent:
            return [(1, rank, f"{_name(rank, beat)} is gone: no heartbeat for {duration(silent)}")]
        lag = self._lasts(now, rank, "behind", (beat.place, beat.place < furthest))
        limit = self.timeouts.start if beat.step == NOT_STARTED else self.timeouts.behind
        # One that has just fallen silent is rather gone than late; that shows soon.
        if beat.place >= furthest or lag <= limit or silent > self.timeouts.silent / 4:
            return []
        others = f"while others are at step {furthest[0]}"
        at = f"; it is at {beat.at}" if beat.at else ""
        return [(2, rank, f"{_name(rank, beat)} has made no progress for {duration(lag)} {others}{at}")]

    def _lasts(self, now: float, rank: int, name: str, value: object) -> float:
        """Seconds since this value last changed."""
        last = self._since.get((rank, name))
        if last is None or last[0] != value:
            self._since[rank, name] = last = (value, now)
        return now - last[1]


def _name(rank: int, beat: Heartbeat) -> str:
    step = f"last step {beat.step}" if beat.step != NOT_STARTED else "before its first step"
    return f"rank {rank} on {beat.host} ({step})"


# ---- one rank


def end_process(message: str, *, code: int = 1) -> None:
    """End this process immediately: its main thread may wait in a collective that nothing can interrupt."""
    os.write(2, f"{visible(message)}\n".encode("utf-8", "backslashreplace"))  # sys.stderr may be locked by that thread
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


class RankWatchdog:
    """One rank's part of the watch.

    with RankWatchdog.of_group(deadline=120) as watch:
        for step, batch in enumerate(loader):
            watch.beat(step)          # the batch is here: a rank whose data do not come is behind the others
            ...

    Only a rank whose steps lag behind is called late: a step, an evaluation or a checkpoint that takes all ranks long
    ends nobody, and a rank that hangs at a step all have reached is not told from the others. More beats (`part`)
    within a step make that rarer. `store` must not be in use elsewhere, since a client of a store serves one call at a
    time.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        deadline: float = 120.0,  # seconds until all ranks have ended
        step_deadline: float | None = None,  # the same for a rank that falls behind; None: deadline
        start_deadline: float = START_DEADLINE,  # until every rank has started its first step
        host: str | None = None,
        action: Callable[[str], None] = end_process,
    ) -> None:
        slowest = deadline if step_deadline is None else step_deadline
        if not 0 < deadline <= slowest or start_deadline < deadline:
            got = f"deadline {deadline}, step_deadline {step_deadline}, start_deadline {start_deadline}"
            raise ConfigError("rank watch", got=got, expected="0 < deadline <= step_deadline, start_deadline")
        if not 0 <= rank < world_size:
            raise ConfigError("rank watch", got=f"rank {rank} of {world_size}", expected="a rank below the world size")
        self._store, self._rank, self._world_size, self._action = store, rank, world_size, action
        self._interval = min(deadline / _ROUNDS, _LONGEST_INTERVAL)
        reserve = _RESERVE * self._interval
        self._timeouts = Timeouts(silent=deadline - reserve, behind=slowest - reserve, start=start_deadline)
        self._own = Heartbeat(number=0, host=host or socket.gethostname())
        self._sent_at = 0.0  # when the last heartbeat was sent
        self._watched = range(world_size) if rank == _WATCHDOG_RANK else (_WATCHDOG_RANK,)
        self._heartbeats: dict[int, Heartbeat | None] = dict.fromkeys(self._watched)
        self._rounds = 0  # in which the store answered
        self._lock = threading.Lock()
        self._wake = threading.Event()  # send now
        self._round_ended = threading.Condition()  # a round has ended, or a verdict is there
        self._stopped = threading.Event()
        self._verdict = ""
        self._threads: list[threading.Thread] = []

    @classmethod
    def of_group(cls, group: ProcessGroup | None = None, **settings: object) -> RankWatchdog:
        """A watch over the ranks of a process group, with a store of its own on the first rank. All ranks call it."""
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if rank == _WATCHDOG_RANK else None
        places: list[tuple[str, int] | None] = [None for _ in range(world_size)]
        dist.all_gather_object(places, (host, store.port) if store is not None else None, group=group)
        if store is None:
            place = places[_WATCHDOG_RANK]
            assert place is not None, "the first rank has just sent it"
            store = dist.TCPStore(*place, is_master=False, wait_for_workers=False)
        return cls(store, rank, world_size, **settings)  # type: ignore[arg-type]

    # ---- what a rank reports

    def beat(self, step: int, part: int = 0) -> None:
        """This rank has made progress. Costs nothing: another thread sends it."""
        self._update(step=step, part=part)

    def fail(self, error: BaseException) -> str:
        """This rank fails; returns the verdict if another rank is to blame, else an empty string.

        An error that another rank's end would explain waits for the verdict; any other returns once it is sent.
        """
        first = in_one_line(error)[:500]
        collateral = _is_collateral(error)
        self._update(state="failed", message=first, collateral=collateral, at=_where(error))
        self._wait_for_round()
        if collateral or self._rank == _WATCHDOG_RANK:  # the first rank keeps the store until the others know
            self._wait(lambda: bool(self._verdict), self._timeouts.silent + _RESERVE * self._interval)
        self._stop()
        return "" if self._verdict.startswith(f"rank {self._rank} ") else self._verdict

    def hurry(self) -> None:
        """This process was told to end. If that is because a rank is gone, its launcher will not wait for long."""
        self._timeouts = replace(self._timeouts, silent=min(self._timeouts.silent, _HURRIED * self._interval))

    def close(self) -> None:
        """This rank is done. The first one stays until all are: its watchdog checks them, and it may hold the store."""
        self._update(state="done")
        self._wait_for_round()
        if self._rank == _WATCHDOG_RANK:
            self._wait(lambda: all(beat is not None and beat.state != "runs" for beat in self._heartbeats.values()))
        self._stop()

    def start(self) -> RankWatchdog:
        """Start sending heartbeats and checking those of others."""
        if self._world_size > 1 and not self._threads:
            for target in (self._exchange, self._monitor):
                self._threads.append(threading.Thread(target=target, name=f"rank watch {target.__name__}", daemon=True))
                self._threads[-1].start()
        return self

    def __enter__(self) -> RankWatchdog:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif blame := self.fail(error):
            raise PacktrainError(blame) from error

    # ---- the two threads: one may hang in the store, the other notices

    def _exchange(self) -> None:
        """Write this rank's heartbeat and read those of others, until stopped."""
        store = dist.PrefixStore("rank-watch", self._store)
        known: set[int] = set()
        while not self._stopped.is_set():
            self._wake.clear()
            try:
                store.set(str(self._rank), self._next_heartbeat().to_bytes())
                known |= {rank for rank in self._watched if rank not in known and store.check([str(rank)])}
                heartbeats = dict.fromkeys(self._watched) | _read(store, sorted(known))
            except RuntimeError:  # the store is gone, or does not answer; the monitor decides what that means
                self._wake.wait(self._interval)
                continue
            with self._round_ended:
                self._heartbeats, self._rounds = heartbeats, self._rounds + 1
                self._round_ended.notify_all()
            self._wake.wait(self._interval)

    def _monitor(self) -> None:
        """Check what was read, until there is a verdict."""
        watchdog, now, last, rounds = Watchdog(self._timeouts), 0.0, 0.0, 0
        before = time.monotonic()
        while not self._stopped.is_set():
            with self._round_ended:
                self._round_ended.wait_for(partial(self._has_news, rounds), self._interval)
            # Time in which this process itself was stopped says nothing about others.
            now += min(time.monotonic() - before, self._timeouts.silent / 2)
            before = time.monotonic()
            verdict = ""
            with self._round_ended:
                if self._rounds != rounds:
                    rounds, last = self._rounds, now
                    first = self._heartbeats[_WATCHDOG_RANK]
                    watchdog.timeouts = self._timeouts
                    verdict = (first.verdict if first is not None else "") or watchdog.check(now, self._heartbeats)
            if not verdict and now - last > self._timeouts.silent:
                verdict = self._lost_store_message()
            if verdict and not self._stopped.is_set():
                self._end(verdict)
                return

    def _has_news(self, rounds: int) -> bool:
        return self._rounds != rounds or self._stopped.is_set()

    def _end(self, verdict: str) -> None:
        """Tell the others, then end this process, unless its own error is doing so."""
        failed = self._own.state == "failed"
        if self._rank == _WATCHDOG_RANK:
            self._update(verdict=verdict)
            # The store may end with this process.
            self._wait(partial(self._all_acknowledged, verdict), _ACKNOWLEDGED_WITHIN * self._interval)
        self._update(acknowledged=True, **({} if failed else {"state": "ended", "message": verdict}))
        self._wait_for_round(self._interval)
        with self._round_ended:
            self._verdict = verdict
            self._round_ended.notify_all()
        if not failed:
            self._stopped.set()
            step = f"at step {self._own.step}" if self._own.step >= 0 else "before its first step"
            self._action(f"{verdict}\n  rank {self._rank} on {self._own.host} ends {step}, instead of waiting forever")

    def _all_acknowledged(self, verdict: str) -> bool:
        """Has every rank acknowledged the verdict that still needs to? One that is gone does not."""
        gone = {rank for rank in self._heartbeats if verdict.startswith(f"rank {rank} ") and " is gone: " in verdict}
        others = [s for rank, s in self._heartbeats.items() if rank not in {self._rank, *gone} and s is not None]
        return all(s.acknowledged or s.state == "done" or (s.state == "failed" and not s.collateral) for s in others)

    def _lost_store_message(self) -> str:
        first = self._heartbeats[_WATCHDOG_RANK]
        if self._rank == _WATCHDOG_RANK or first is None:
            return f"the watchdog store does not answer; rank {_WATCHDOG_RANK} may be gone"
        step = f"last step {first.step}" if first.step >= 0 else "before its first step"
        return f"rank {_WATCHDOG_RANK} on {first.host} ({step}) is gone, or its watchdog store"

    # ---- small parts

    def _update(self, **news: object) -> None:
        """Change this rank's heartbeat and send it; short steps are not sent one by one."""
        with self._lock:
            self._own = replace(self._own, **news)  # type: ignore[arg-type]
        if "step" not in news or time.monotonic() - self._sent_at > _SOONEST:
            self._wake.set()

    def _next_heartbeat(self) -> Heartbeat:
        with self._lock:
            at = self._own.at if self._own.state == "failed" else _where_is_main()
            self._own = replace(self._own, number=self._own.number + 1, at=at)
            self._sent_at = time.monotonic()
            return self._own

    def _wait_for_round(self, limit: float | None = None) -> None:
        """Until the last update is in the store: the round under way may have begun before it."""
        goal = self._rounds + 2
        self._wake.set()
        end = time.monotonic() + (self._timeouts.silent if limit is None else limit)
        while self._threads and not self._verdict and self._rounds < goal and time.monotonic() < end:
            self._wake.set()
            self._wait(lambda: self._rounds >= goal, self._interval / 4)

    def _wait(self, ready: Callable[[], bool], limit: float | None = None) -> None:
        if not self._threads:
            return
        with self._round_ended:
            self._round_ended.wait_for(lambda: ready() or bool(self._verdict), limit)

    def _stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        with self._round_ended:
            self._round_ended.notify_all()


def _read(store: Store, ranks: list[int]) -> dict[int, Heartbeat | None]:
    keys = [str(rank) for rank in ranks]
    values = store.multi_get(keys) if keys and store.has_extended_api() else [store.get(key) for key in keys]
    return {rank: Heartbeat.from_bytes(value) for rank, value in zip(ranks, values, strict=True)}


def _is_collateral(error: BaseException) -> bool:
    """Could the end of another rank be the reason?"""
    text = str(error).lower()
    is_broken = isinstance(error, RuntimeError | OSError) and any(word in text for word in _BROKEN)
    return isinstance(error, dist.DistError) or is_broken


def _where_is_main() -> str:
    """The line at which this process's main thread is."""
    frame = sys._current_frames().get(threading.main_thread().ident or -1)
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else ""


def _where(error: BaseException) -> str:
    """The line at which an error was raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{_short(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}" if trace is not None else ""


def _short(path: str) -> str:
    return "/".join(path.split(os.sep)[-2:])
