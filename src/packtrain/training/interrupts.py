"""Ctrl-C and SIGTERM end a run at the end of its step, with a checkpoint; a second signal ends it immediately.

Python runs handlers between two lines of the main thread, which does not come to one while it waits in a kernel, a
compiler or a collective. So another thread hears signals too, as they come.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ONE_REQUEST = 5.0  # seconds in which several SIGTERM are one: launchers and schedulers both send it
_GRACE = 3.0  # seconds that the main thread has to end by itself
_STOPPED = 130  # exit code


class Interrupts:
    """Takes signals while a run lasts. `asked` names the first that came; ranks agree on it elsewhere.

    `on_first` is called when it has come, in a thread of its own. `lost` says what ending immediately costs.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.asked: str | None = None
        self.on_first: Callable[[], None] = lambda: None
        self.lost: Callable[[], str] = lambda: "--resume continues from the newest checkpoint"
        self._clock = clock
        self._since = 0.0  # when the first came
        self._before: dict[signal.Signals, Any] = {}
        self._main_ends = threading.Event()  # the main thread is ending
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._fd_before = -1

    def __enter__(self) -> Interrupts:
        self.asked, self.on_first = None, lambda: None
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._main_ends.clear()
            self._sockets = ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            self._fd_before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(ours,), name="signals", daemon=True).start()
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._main_ends.set()
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}
        if self._sockets is not None:
            signal.set_wakeup_fd(self._fd_before)
            self._sockets[1].close()  # ends the listener, which closes the other
            self._sockets = None
        self.asked = None  # of no run

    def _take(self, number: int, frame: FrameType | None) -> None:
        """In the main thread."""
        if self._is_second(number, self.asked, self._since):
            self._main_ends.set()
            raise KeyboardInterrupt
        if self.asked is None:
            self.asked, self._since = signal.Signals(number).name, self._clock()

    def _listen(self, ours: socket.socket) -> None:
        """In the other thread, whatever the main thread does."""
        first, since = None, 0.0
        with ours:
            while heard := ours.recv(64):
                for number in heard:
                    if number not in _SIGNALS:
                        continue
                    if self._is_second(number, first, since):
                        self._end_now(signal.Signals(number).name)
                    elif first is None:
                        first, since = signal.Signals(number).name, self._clock()
                        self.on_first()

    def _is_second(self, number: int, first: str | None, since: float) -> bool:
        return first is not None and (number == signal.SIGINT or self._clock() - since >= _ONE_REQUEST)

    def _end_now(self, name: str) -> None:
        if not self._main_ends.wait(_GRACE):
            from packtrain.delivery.trainers.watch import end_process

            end_process(
                f"ended by a second {name}: the current step neither finished nor reached a safe point to stop; "
                f"{self.lost()}",
                code=_STOPPED,
            )
