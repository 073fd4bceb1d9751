"""Progress of a training run: a bar on a terminal, else a line every logging_steps.

The time that remains follows from the work that remains, not from the steps: steps of padded batches, and the last of
an epoch, are not all alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

from packtrain.core.numbers import clock as as_clock
from packtrain.core.numbers import duration, percent
from packtrain.runs.early_warnings import EarlyWarning
from packtrain.runs.step_metrics import EvalMetrics, StepMetrics

_RECENT = 50  # steps that the rate is taken from
_LONG = 5.0  # seconds since the last step from which on they are shown


class RemainingTime:
    """Seconds that are left, by the median rate of the last steps; what lies between steps is added in proportion."""

    def __init__(self, total: float, *, done: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._done, self._clock = total, done, clock
        self._rates: deque[float] = deque(maxlen=_RECENT)
        self._first_rate = 0.0
        self._began: float | None = None
        self._in_steps = 0.0

    def add(self, work: float, seconds: float) -> None:
        """A step did an amount of work in a number of seconds."""
        self._done += work
        rate = work / seconds if seconds > 0 else 0.0
        if self._began is None:  # the first step compiles and starts workers: better than nothing until the second
            self._began, self._first_rate = self._clock(), rate
            return
        self._in_steps += seconds
        self._rates.append(rate)

    @property
    def seconds(self) -> float | None:
        """None while nothing is known."""
        rate = median(self._rates) if self._rates else self._first_rate
        if self._done >= self._total:
            return 0.0
        return (self._total - self._done) / rate * self._between() if rate > 0 else None

    @property
    def share(self) -> float:
        """The share of the work that is done."""
        return min(1.0, self._done / self._total) if self._total else 1.0

    def _between(self) -> float:
        """All time over that of steps: evaluating and saving come again, too."""
        if self._began is None or self._in_steps <= 0:
            return 1.0
        return max(1.0, (self._clock() - self._began) / self._in_steps)


class _Since(ProgressColumn):
    """How long training has taken, and how long ago the last step ended: a long step does not look like a dead one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self.began = self.stepped = clock()

    def render(self, task: Task) -> Text:
        """Written again ten times a second, whatever the steps do."""
        now = self._clock()
        text = as_clock(now - self.began)
        if self.stepped > self.began and now - self.stepped >= _LONG:
            text += f", last step {as_clock(now - self.stepped)} ago"
        return Text(text, style="progress.elapsed", no_wrap=True)


class TrainingProgress:
    """Shows a run on a console, or as a line every `every` steps.

    `work`: real tokens of the whole run; without it one step counts like another.
    """

    def __init__(
        self,
        console: Console,
        *,
        steps: int,
        work: float | None = None,
        done_steps: int = 0,
        done_work: float = 0.0,
        quiet: bool = False,
        every: int = 10,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._steps, self._by_work, self._clock = console, steps, bool(work), clock
        total, done = (float(work), done_work) if work else (float(steps), float(done_steps))
        self._remaining = RemainingTime(total, done=done, clock=clock)
        self._quiet, self._every = quiet, every
        self._drawn = console.is_terminal and not quiet
        self._last: StepMetrics | None = None
        self._since = _Since(clock)
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("train"),
            BarColumn(bar_width=16),
            self._since,
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not self._drawn,
            transient=True,
        )
        self._task = self._bar.add_task("train", total=1.0, text=f"step {done_steps:,}/{steps:,}")

    def show(self, metrics: StepMetrics) -> None:
        """A step is done."""
        self._remaining.add(metrics.tokens if self._by_work else 1.0, metrics.step_seconds)
        first, self._last = self._last is None, metrics
        self._since.stepped = self._clock()
        self._bar.update(self._task, completed=self._remaining.share, text=self._text(metrics))
        due = first or metrics.step % self._every == 0 or metrics.step >= self._steps
        if not self._drawn and due:
            self._print(self._text(metrics))

    def evaluated(self, metrics: EvalMetrics) -> None:
        """An evaluation is done."""
        self._print(f"step {metrics.step:,}: evaluation loss {metrics.eval_loss:.4f}")

    def warn(self, warning: EarlyWarning) -> None:
        """Say an early warning, above the bar."""
        self._print(f"warning at step {warning.step:,}: {warning.message}", style="yellow")
        self._print(f"  to do: {warning.advice}", style="dim")

    def note(self, text: str) -> None:
        """Say something else, as that a checkpoint was saved."""
        self._print(text)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._drawn and self._last is not None:
            self._print(self._text(self._last))  # the bar is gone, its last word stays

    def _print(self, text: str, style: str | None = None) -> None:
        if not self._quiet:
            self._console.print(escape(text), style=style, highlight=False, soft_wrap=True)

    def _text(self, metrics: StepMetrics) -> str:
        loss = "no loss" if metrics.loss is None else f"loss {metrics.loss:.4f}"
        parts = [f"step {metrics.step:,}/{self._steps:,}", loss]
        rates = dict.fromkeys(f"{rate:.3g}" for rate in metrics.learning_rates.values())
        parts += [f"lr {'/'.join(rates)}"] if rates else []
        parts += [f"grad norm {metrics.grad_norm:.3g}"] if metrics.grad_norm is not None else []
        parts += [f"{metrics.tokens_per_second:,.0f} tokens/s", f"fill {percent(metrics.fill)}"]
        if metrics.mfu is not None:
            parts.append(f"MFU {percent(metrics.mfu)}")
        seconds = self._remaining.seconds
        if seconds is not None and metrics.step < self._steps:
            parts.append(f"{duration(seconds)} left")
        return " · ".join(parts)
