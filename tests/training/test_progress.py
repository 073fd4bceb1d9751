"""Progress: the remaining time follows the work, and nothing is drawn without a terminal."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from made_metrics import eval_of, step_of
from rich.console import Console

from packtrain.runs.early_warnings import EarlyWarning
from packtrain.training.progress import RemainingTime, TrainingProgress

WARNING = EarlyWarning(kind="data_bound", step=7, message="[red]12 %[/red] was waiting", advice="more workers")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=170, color_system=None), stream


def run(progress: TrainingProgress, clock: Clock, steps: int, seconds: float = 2.0, **given: Any) -> None:
    for step in range(1, steps + 1):
        clock.now += seconds
        progress.show(step_of(step, step_seconds=seconds, **given))


def test_time_follows_work_not_steps() -> None:
    """Ten short steps and one that is as long as all of them: half of the time is left."""
    clock = Clock()
    remaining = RemainingTime(2_000.0, clock=clock)
    for _ in range(10):
        clock.now += 1.0
        remaining.add(100.0, 1.0)
    assert remaining.seconds == pytest.approx(10.0)
    assert remaining.share == 0.5


def test_one_slow_step_does_not_change_the_rate() -> None:
    clock = Clock()
    remaining = RemainingTime(100.0, clock=clock)
    for step in range(50):
        seconds = 60.0 if step == 0 else 1.0  # it compiled
        clock.now += seconds
        remaining.add(1.0, seconds)
    assert remaining.seconds == pytest.approx(50.0)
    remaining.add(1.0, 500.0)  # a hiccup, which the clock did not even see
    assert remaining.seconds == pytest.approx(49.0)


def test_what_lies_between_steps_comes_again() -> None:
    clock = Clock()
    remaining = RemainingTime(101.0, clock=clock)
    for _ in range(51):
        clock.now += 2.0  # half of it evaluates and saves
        remaining.add(1.0, 1.0)
    assert remaining.seconds == pytest.approx(100.0)


def test_the_beginning_and_the_end() -> None:
    remaining = RemainingTime(10.0, clock=Clock())
    assert remaining.seconds is None
    remaining.add(4.0, 2.0)
    assert remaining.seconds == 3.0  # the first step is all there is
    remaining.add(7.0, 1.0)
    assert (remaining.seconds, remaining.share) == (0.0, 1.0)
    resumed = RemainingTime(10.0, done=8.0, clock=Clock())
    resumed.add(1.0, 1.0)
    assert resumed.seconds == 1.0
    nothing = RemainingTime(10.0, clock=Clock())
    nothing.add(0.0, 1.0)
    assert nothing.seconds is None


def test_a_line_now_and_then_where_nobody_watches() -> None:
    clock, (shown, stream) = Clock(), console(terminal=False)
    with TrainingProgress(shown, steps=100, work=6_400_000.0, every=15, clock=clock) as progress:
        run(progress, clock, 100)
    lines = stream.getvalue().splitlines()
    assert [line.split(" · ")[0] for line in lines] == [
        f"step {step}/100" for step in (1, 15, 30, 45, 60, 75, 90, 100)
    ]  # every 15 steps, the first and the last
    assert lines[1].split(" · ")[2:] == [
        *("lr 0.0001", "grad norm 0.801", "32,000 tokens/s", "fill 98.0 %", "MFU 44.0 %", "3 min left")
    ]
    assert "left" not in lines[-1]
    progress.show(step_of(100, loss=None))
    assert stream.getvalue().splitlines()[-1].startswith("step 100/100 · no loss · ")
    assert "\x1b" not in stream.getvalue()


def test_a_bar_where_somebody_does() -> None:
    clock, (shown, stream) = Clock(), console(terminal=True)
    with TrainingProgress(shown, steps=20, clock=clock) as progress:
        run(progress, clock, 10)
        progress.warn(WARNING)
        progress._bar.refresh()
        assert " ago" not in stream.getvalue()
        clock.now += 83.0  # a long step
        progress._bar.refresh()
    text = stream.getvalue()
    assert "1:43, last step 1:23 ago step 10/20" in text
    assert "train" in text
    assert "step 10/20" in text
    assert "20 s left" in text
    assert text.count("was waiting") == 1  # said above the bar, once
    assert "train" not in text.rsplit("step 10/20", 1)[0].splitlines()[-1]  # its last word stays


def test_warnings_are_written_as_they_are() -> None:
    shown, stream = console(terminal=False)
    progress = TrainingProgress(shown, steps=20)
    progress.warn(WARNING)
    progress.evaluated(eval_of(7, 1.25))
    progress.note("saved checkpoint-7")
    assert stream.getvalue().splitlines() == [
        "warning at step 7: [red]12 %[/red] was waiting",
        "  to do: more workers",
        "step 7: evaluation loss 1.2500",
        "saved checkpoint-7",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_quiet_is_quiet(terminal: bool) -> None:
    clock, (shown, stream) = Clock(), console(terminal)
    with TrainingProgress(shown, steps=3, quiet=True, clock=clock) as progress:
        run(progress, clock, 3, loss=math.nan, mfu=None)
        progress.warn(WARNING)
    assert stream.getvalue() == ""
