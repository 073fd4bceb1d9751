"""Progress bars on stderr: how far, what is being done, for how long already."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from packtrain.core.numbers import clock


class ElapsedColumn(ProgressColumn):
    """How long it has taken, and about how long it still takes."""

    def render(self, task: Task) -> Text:
        """Rich's estimate; none where it has none."""
        said = f"elapsed {clock(task.finished_time if task.finished else task.elapsed)}"
        if not task.finished and task.time_remaining is not None:
            said += f", ~{clock(task.time_remaining)} left"
        return Text(said, style="progress.elapsed")


class Bar:
    """A bar that vanishes at the end; nothing is drawn without a terminal."""

    def __init__(
        self,
        verb: str,
        console: Console,
        *,
        quiet: bool,
        counts: tuple[ProgressColumn, ...] = (),
    ) -> None:
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn(verb),
            BarColumn(),
            *counts,
            TextColumn("{task.fields[detail]}"),
            ElapsedColumn(),
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
