"""Ctrl-C and SIGTERM end a run at the end of its step, with a checkpoint; a second Ctrl-C ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Takes signals while a run lasts. `asked` names the first that came; ranks agree on it elsewhere.

    Schedulers send SIGTERM more than once, so only a second Ctrl-C is taken for impatience.
    """

    def __init__(self) -> None:
        self.asked: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self.asked = None
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}
        self.asked = None  # of no run

    def _take(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self.asked is not None:
            raise KeyboardInterrupt
        self.asked = self.asked or name
