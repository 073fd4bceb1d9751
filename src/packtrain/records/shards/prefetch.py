"""A thread that fetches what a process will need next, in order, as far as there is room."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

Outcome = Literal["settled", "busy", "no room"]
PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds before looking again at what others fetch or what found no room
CLOSE_PATIENCE = 5.0  # seconds; a source may hang


class Prefetcher:
    """Calls `fetch(file, goes_on)` for one file after the other. A daemon thread, so it ends with its process."""

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
            idle = 0 if len(self._settled) != before else min(idle + 1, len(PAUSES) - 1)
            self._wake.wait(PAUSES[idle] if waiting else None)

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
