"""The shard cache: data files as plain bytes on a local disk, under a byte budget for all processes of a node."""

from __future__ import annotations

import math
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from packtrain.core.errors import ConfigError, DataError, PacktrainError, RecordError
from packtrain.core.retries import PAUSES, waiting
from packtrain.records.shards.address import Identity, identify
from packtrain.records.shards.cache_folder import (
    CachedFile,
    CachedHandle,
    CacheFault,
    CacheFolder,
    EntryKey,
    NoRoom,
    Writing,
    entry_key,
    file_address,
)
from packtrain.records.shards.decompression import decompress, direct_plain
from packtrain.records.shards.open_files import Handle, HandleTable, reset_in_children
from packtrain.records.span import Plain

IN_MEMORY = 256 << 20  # bytes of a table that is held in memory where there is no room on disk
NO_ROOM_REST = (1.0, 30.0)  # seconds of direct reading before the cache is tried again: at first, at most
FAULT_REST = (10.0, 120.0)
COPY_PATIENCE = 600.0  # seconds to wait for room where there is no other way
DROP_PATIENCE = 5.0  # seconds for which others may read a copy that is to be removed
PATIENCE = 60.0  # seconds for which a fetch by another process may make no progress
LOOKS = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds before looking again at what others fetch or what found no room
CLOSE_PATIENCE = 5.0  # seconds; a source may hang

Outcome = Literal["settled", "busy", "no room"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Order:
    """A file to be put into the cache, and its source."""

    key: EntryKey
    file: str
    blocks: Iterator[bytes]
    least: int = 0  # bytes of room without which there is no point in beginning


class ShardCache:
    """A folder that holds data files, decompressed. It is made again from its arguments in every process."""

    def __init__(
        self,
        folder: str | Path,
        budget_bytes: int,
        *,
        memory_bytes: int = IN_MEMORY,
        patience: float = PATIENCE,
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        if budget_bytes < 1:
            raise ConfigError("cache budget", got=budget_bytes, expected="a positive number of bytes")
        self._settings: dict[str, Any] = {"memory_bytes": memory_bytes, "patience": patience, "pauses": tuple(pauses)}
        self._memory, self._patience, self._pauses = memory_bytes, patience, tuple(pauses)
        self._folder = CacheFolder(os.path.abspath(os.path.expanduser(folder)), budget_bytes)
        self._handles = HandleTable()
        self._begin()
        reset_in_children(self)
        try:
            self._folder.prepare()
        except CacheFault as fault:
            self._notice(fault)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._member: int | None = None  # descriptor of the file that says what this process wants
        self._wanted: tuple[str, ...] = ()
        self._prefetcher = Prefetcher(self._fetch_ahead)
        self._identities: dict[str, Identity] = {}
        self._needs: dict[str, int] = {}  # bytes with which a fetch has failed for want of room
        self._rests: dict[str, tuple[float, float]] = {}  # until when a file is read directly, and the pause
        self._resting: tuple[float, float] = (0.0, 0.0)  # the same for the whole cache
        self._warned = False

    def reset_after_fork(self) -> None:
        """A child begins with nothing open, nothing wanted and no thread."""
        self._begin()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(ShardCache, **self._settings), (self._folder.path, self._folder.budget)

    @property
    def folder(self) -> str:
        return self._folder.path

    def open(self, file: str) -> AbstractContextManager[Plain]:
        """One data file; it is not evicted until the block ends.

        Read directly, forward only, where it cannot be kept. RecordError where it is missing or damaged, OSError where
        it cannot be reached.
        """
        return self._handles.use(file, self._acquire)

    @contextmanager
    def copy(self, file: str, patience: float = COPY_PATIENCE) -> Iterator[str]:
        """A local file with a data file's content, for the length of a block; waits where others have the room."""
        ready, needed = None, 0
        for _ in waiting(patience, 0.05, 1.0):
            try:
                ready = self._get_or_fetch(self._order(file, self._identity(file)))
            except CacheFault as fault:
                raise DataError("shard cache", got=str(fault), fix="free some space, or use another folder") from fault
            except NoRoom as fault:
                needed = fault.needed
            if ready is not None or needed > self._folder.budget:
                break
        if ready is None:
            raise DataError(
                "shard cache",
                got=f"{file}, of at least {needed:,} bytes, and a budget of {self._folder.budget:,}",
                fix="give it a larger budget, or use fewer workers",
            )
        try:
            yield ready.path
        finally:
            self._folder.close(ready.fd)

    def want(self, files: Sequence[str]) -> None:
        """Declare what this process needs now and next, in order; it replaces what was declared before.

        Those files are fetched ahead and evicted last. What is left out is `done`.
        """
        with self._lock:
            gone = set(self._wanted) - set(files)
            self._wanted = tuple(dict.fromkeys(files))
            self._declare(gone)

    def done(self, files: Iterable[str]) -> None:
        """Withdraw files; those that no process wants any more, and nobody is reading, are deleted at once."""
        with self._lock:
            gone = set(files)
            self._wanted = tuple(file for file in self._wanted if file not in gone)
            self._declare(gone)

    def close(self) -> None:
        """End fetching ahead and close what is idle. The cache may be used again afterwards."""
        self._prefetcher.close()
        self._handles.close()
        with self._lock:
            self._prefetcher = Prefetcher(self._fetch_ahead)
            self._wanted = ()
            member, self._member = self._member, None
            if member is not None:
                self._folder.leave(member)

    def derive(self, file: str, kind: str, blocks: Iterator[bytes]) -> CachedFile:
        """A file derived from another one, cached like a file; `blocks` are read only if it is not there yet.

        Raises NoRoom or CacheFault. The caller releases it.
        """
        return self._get_or_fetch(
            _Order(key=entry_key(file, self._identity(file), kind), file=kind + file, blocks=blocks)
        )

    def drop(self, file: str, kind: str = "") -> bool:
        """Remove a copy, or what was derived from it, that is not what it should be; False where it is still there."""
        self._handles.forget([file])
        key = entry_key(file, self._identity(file), kind)
        self._identities.pop(file, None)  # the source is looked at again, too
        try:
            return any(self._folder.remove(key) for _ in waiting(DROP_PATIENCE, 0.05, 0.05))
        except CacheFault as fault:
            self._notice(fault)
            return False

    def release(self, ready: CachedFile) -> None:
        self._folder.close(ready.fd)

    def _declare(self, gone: set[str]) -> None:
        """Tell the others and the thread."""
        self._handles.forget(gone)
        try:
            if self._member is None:
                self._member = self._folder.join()
            self._folder.declare(self._member, map(file_address, self._wanted), map(file_address, gone))
        except CacheFault as fault:
            self._notice(fault)
        self._prefetcher.want(self._wanted)

    def _identity(self, file: str) -> Identity:
        """The identity of a file when this process first looked; later changes of a source are ignored."""
        if file not in self._identities:
            self._identities[file] = identify(file, self._pauses)
        return self._identities[file]

    def _acquire(self, file: str) -> Handle:
        """A file in the cache, or directly from its source for a while."""
        identity = self._identity(file)
        if time.monotonic() >= max(self._rests.get(file, (0.0, 0.0))[0], self._resting[0]):
            try:
                ready = self._get_or_fetch(self._order(file, identity))
                self._rests.pop(file, None)
                self._resting = (0.0, 0.0)
                return CachedHandle(self._folder, ready)
            except NoRoom as fault:
                never = fault.needed > self._folder.budget
                self._rests[file] = (math.inf, 0.0) if never else _rest(self._rests.get(file), NO_ROOM_REST)
            except CacheFault as fault:
                self._notice(fault)
        until = max(self._rests.get(file, (0.0, 0.0))[0], self._resting[0])
        plain = direct_plain(file, identity, self._memory, self._pauses)
        return Handle(plain, plain.close, until)

    def _order(self, file: str, identity: Identity) -> _Order:
        blocks = decompress(file, identity, self._pauses)
        # Content is hardly ever smaller than what it is stored in, so that much room is needed before the first byte.
        return _Order(key=entry_key(file, identity), file=file, blocks=blocks, least=identity.size or 0)

    def _get_or_fetch(self, order: _Order) -> CachedFile:
        """A file in the cache, fetched by us or by another process for whose progress we wait."""
        last, since = None, time.monotonic()
        for _ in waiting(math.inf, 0.005, 0.25):
            claim = self._folder.claim(order.key)
            if isinstance(claim, CachedFile):
                return claim
            if isinstance(claim, Writing):
                return self._fetch(order, claim, spare_wanted=False, goes_on=lambda: True)
            now = time.monotonic()
            if claim != last:
                last, since = claim, now
            elif now - since > self._patience:
                raise NoRoom(0)
        raise AssertionError("patience ends sooner")

    def _fetch(self, order: _Order, writing: Writing, *, spare_wanted: bool, goes_on: Callable[[], bool]) -> CachedFile:
        """Write a whole file; whatever goes wrong, nothing of it stays."""
        try:
            if least := max(order.least, self._needs.get(order.file, 0)):
                self._folder.reserve(writing, least, least, spare_wanted=spare_wanted)
            for block in order.blocks:
                if not goes_on():
                    raise NoRoom(0)
                self._folder.write(writing, block, spare_wanted=spare_wanted)
            ready = self._folder.finish(writing)
        except BaseException as error:
            self._folder.abandon(writing)
            if isinstance(error, NoRoom):
                self._needs[order.file] = max(error.needed, self._needs.get(order.file, 0))
            elif isinstance(error, OSError):
                self._identities.pop(order.file, None)  # it may have changed
            raise
        self._needs.pop(order.file, None)
        return ready

    def _fetch_ahead(self, file: str, goes_on: Callable[[], bool]) -> Outcome:
        """One file for the thread. Faults of a source are raised when it is read."""
        if time.monotonic() < self._resting[0]:
            return "no room"
        try:
            identity = self._identity(file)
            claim = self._folder.claim(entry_key(file, identity))
            if isinstance(claim, Writing):
                claim = self._fetch(self._order(file, identity), claim, spare_wanted=True, goes_on=goes_on)
        except NoRoom as fault:
            return "settled" if fault.needed > self._folder.budget else "no room"
        except CacheFault as fault:
            self._notice(fault)
            return "no room"
        except (OSError, RecordError, PacktrainError):
            return "settled"
        if not isinstance(claim, CachedFile):
            return "busy"
        self._folder.close(claim.fd)
        return "settled"

    def _notice(self, fault: CacheFault) -> None:
        """The folder cannot be used: say so once, and leave it alone for a while."""
        self._resting = _rest(self._resting, FAULT_REST)
        if not self._warned:
            self._warned = True
            warnings.warn(f"shard cache: {fault}; data are read without it until it works again", stacklevel=2)


class Prefetcher:
    """A thread that calls `fetch(file, goes_on)` for what a process will need next, in order, as far as there is room.

    A daemon thread, so it ends with its process.
    """

    def __init__(self, fetch: Callable[[str, Callable[[], bool]], Outcome]) -> None:
        self._fetch = fetch
        self._files: tuple[str, ...] = ()
        self._settled: set[str] = set()
        self._wake = threading.Event()
        self._ended = False
        self._thread: threading.Thread | None = None

    def want(self, files: Sequence[str]) -> None:
        """Replace what is to be fetched."""
        self._files = tuple(files)
        self._settled &= set(files)
        if self._files and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="packtrain-prefetch", daemon=True)
            self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """End, and wait a little for the file in hand to be given up."""
        self._ended = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_PATIENCE)

    def _run(self) -> None:
        idle = 0
        while not self._ended:
            self._wake.clear()
            before = len(self._settled)
            waiting = self._round()
            idle = 0 if len(self._settled) != before else min(idle + 1, len(LOOKS) - 1)
            self._wake.wait(LOOKS[idle] if waiting else None)

    def _round(self) -> bool:
        """Try every file once; is there one to come back to?"""
        waiting = False
        for file in self._files:
            if self._ended or self._wake.is_set():
                return True
            if file in self._settled:
                continue
            outcome = self._fetch(file, lambda file=file: not self._ended and file in self._files)  # type: ignore[misc]
            if outcome == "settled":
                self._settled.add(file)
                continue
            waiting = True
            if outcome == "no room":
                break  # what comes later must not take the room
        return waiting


def _rest(before: tuple[float, float] | None, bounds: tuple[float, float]) -> tuple[float, float]:
    """Until when to rest, and for how long: twice as long as the last time."""
    pause = min(bounds[1], max(bounds[0], 2 * before[1] if before else 0.0))
    return time.monotonic() + pause, pause
