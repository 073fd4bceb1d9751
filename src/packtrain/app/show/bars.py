"""Progress bars on stderr: how far, what is being done, for how long already."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn, TimeElapsedColumn


class Bar:
    """A bar that vanishes at the end; nothing is drawn where nobody watches."""

    def __init__(
        self,
        verb: str,
        console: Console,
        *,
        quiet: bool,
        counts: tuple[ProgressColumn, ...] = (),
        ending: tuple[ProgressColumn, ...] = (),
    ) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn(verb),
            BarColumn(),
            *counts,
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            *ending,
            console=console,
            disable=quiet or not console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task(verb, total=None, detail="")

    def show(self, done: int, total: int | None, detail: str) -> None:
        """Move the bar."""
        self._bar.update(self._task, total=total, completed=done, detail=detail)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
