"""Early warnings: for every kind a history that raises it, and one like it that does not."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from made_metrics import GIB, eval_of, healthy, step_of

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.runs.early_warnings import KINDS, MonitorLimits
from packtrain.runs.step_metrics import EvalMetrics, StepMetrics
from packtrain.training.monitor_rules import RULES
from packtrain.training.monitors import EarlyWarning, Monitors

History = Iterable[StepMetrics | EvalMetrics]
UP_DOWN = (1.0, -0.9, 0.4)


def warnings_of(history: History, monitors: Monitors | None = None) -> list[EarlyWarning]:
    monitors = monitors or Monitors()
    found: list[EarlyWarning] = []
    for metrics in history:
        watch: Callable[[Any], Iterable[EarlyWarning]]
        watch = monitors.observe if isinstance(metrics, StepMetrics) else monitors.observe_eval
        found += watch(metrics)
    return found


def kinds_of(history: History) -> set[str]:
    return {warning.kind for warning in warnings_of(history)}


def after(steps: int, *changes: dict[str, Any]) -> list[StepMetrics]:
    """A healthy run, and then steps that differ from it."""
    return [*healthy(steps), *(step_of(steps + 1 + number, **change) for number, change in enumerate(changes))]


def every(steps: int, **change: Any) -> list[StepMetrics]:
    return [step_of(step, **change) for step in range(1, steps + 1)]


def flat_loss(steps: int, slope: float = 0.0, **change: Any) -> list[StepMetrics]:
    return [replace(step_of(step, **change), loss=2.0 - slope * step + 0.01 * (step % 7)) for step in range(steps)]


def calmer(steps: int, norm: float) -> list[StepMetrics]:
    """A gradient norm that was high for long and is low for some steps, then another."""
    return after(0, *[{"grad_norm": 8.0}] * 70, *[{"grad_norm": 0.5}] * steps, {"grad_norm": norm})


def noisy(steps: int, slope: float) -> list[StepMetrics]:
    """A loss that wobbles by a tenth."""
    noise = random.Random(3)
    return [step_of(step, loss=2 - slope * step + noise.gauss(0, 0.2)) for step in range(1, steps + 1)]


def shaking(steps: int, before: float, after: float) -> list[StepMetrics]:
    """The loss goes up and down by a share of itself, which changes in the middle."""
    sizes = [after if step > steps // 2 else before for step in range(1, steps + 1)]
    return [step_of(step, loss=2 + 2 * size * UP_DOWN[step % 3]) for step, size in enumerate(sizes, start=1)]


def shaking_norm(steps: int, before: float, after: float) -> list[StepMetrics]:
    """The same of the gradient norm."""
    sizes = [after if step > steps // 2 else before for step in range(1, steps + 1)]
    return [step_of(step, grad_norm=1 + size * UP_DOWN[step % 3]) for step, size in enumerate(sizes, start=1)]


def jump(size: float, loss: float) -> list[StepMetrics]:
    """A loss around 2 that goes up and down, then another."""
    return [*shaking(60, size, size), step_of(61, loss=loss)]


def evaluated(losses: list[float], train: list[float]) -> Iterator[StepMetrics | EvalMetrics]:
    """Twenty steps with a training loss, then an evaluation, and again."""
    step = 0
    for loss, trained in zip(losses, train, strict=True):
        for number in range(20):
            step += 1
            yield step_of(step, loss=trained - 0.001 * number)
        yield eval_of(step, loss, epoch=step / 20)


UNTAUGHT = {"loss": None, "supervised_tokens": 0, "grad_norm": 0.0}

ZERO = {"language": 0.0, "vision": 0.0}
UNEQUAL = {"spread": 1.3, "rank_seconds": (1.4, 2.6), "step_seconds": 2.6, "predicted_seconds": 2.6}
# kind -> histories that raise it, and histories like them that do not; where there is a limit, just on its two sides
CASES: dict[str, tuple[list[History], list[History]]] = {
    "loss_not_finite": (
        [after(1, {"loss": math.nan}), after(30, {"loss": math.inf})],
        [after(30, {"loss": 1e6}), healthy(30)],
    ),
    "loss_spike": (
        # by a fifth where it is smooth, by six deviations of 0.147 where it is not, also while it falls
        # four times as high in the first steps
        [
            *(jump(0.001, 2.45), jump(0.1, 3.1), after(17, {"loss": 50.0}), after(100, {"loss": 5.0})),
            *(
                after(15, {"loss": 50.0}),
                [step_of(at, loss=loss) for at, loss in enumerate((8.0, 16.0, 90.0, 832.0), 1)],
            ),
        ],
        [
            *(jump(0.001, 2.35), jump(0.1, 2.85), after(15, {"loss": 5.0}), after(40, {"loss": 0.1}), healthy(300)),
            [step_of(at, loss=loss) for at, loss in enumerate((0.1, 0.02, 0.9), 1)],
        ],
    ),
    "gradient_high": (
        [after(40, {"grad_norm": 9.0}), calmer(40, 6.0)],
        [calmer(28, 6.0), after(40, {"grad_norm": 7.0}), after(15, {"grad_norm": 9.0}), after(40, {"grad_norm": None})],
    ),
    "gradient_exploding": (
        [after(40, *[{"grad_norm": 9.0}] * 5), after(2, *[{"grad_norm": math.nan}] * 3)],
        [after(40, *[{"grad_norm": 9.0}] * 2), after(2, *[{"grad_norm": math.inf}] * 2, {}), healthy(60)],
    ),
    "gradient_zero": (
        [after(3, {"grad_norm": 0.0}), after(3, UNTAUGHT)],
        [after(3, {"grad_norm": 1e-9}), every(3, grad_norm=None)],
    ),
    "learning_rate_zero": (
        [after(5, *[{"learning_rates": ZERO}] * 3)],
        [after(5, *[{"learning_rates": ZERO}] * 2), every(9, learning_rates={"language": 1e-5, "vision": 0.0})],
    ),
    "memory_near_limit": (
        [after(2, {"memory_bytes": 74 * GIB})],
        [after(2, {"memory_bytes": 73 * GIB}), every(5, memory_bytes=None, memory_limit=None)],
    ),
    "data_bound": (
        [every(23, data_wait_seconds=0.22)],
        # a tenth at most, too few steps, the start of a process
        [
            every(60, data_wait_seconds=0.19),
            every(22, data_wait_seconds=0.22),
            after(0, *[{"data_wait_seconds": 1.9}] * 3, *[{}] * 30),
        ],
    ),
    "unequal_ranks": ([every(23, **UNEQUAL)], [every(22, **UNEQUAL), every(60, **{**UNEQUAL, "spread": 1.14})]),
    "plateau": (
        [flat_loss(200), flat_loss(200, slope=0.000105), flat_loss(245, samples=50), noisy(1300, 0.0)],
        # learning slowly, learning behind noise, warming up, at the end of its schedule, too few samples, too few steps
        [
            flat_loss(200, slope=0.00016),
            noisy(1500, 0.0005),
            [step_of(step, loss=2.0, learning_rates={"language": step * 1e-6}) for step in range(1, 200)],
            [*healthy(20), *flat_loss(200, learning_rates={"language": 1e-6})],
            flat_loss(235, samples=50),
            flat_loss(140, samples=5000),
        ],
    ),
    "instability": (
        [shaking(120, 0.009, 0.03), shaking_norm(120, 0.02, 0.8)],
        [shaking(120, 0.011, 0.03), shaking(120, 0.002, 0.015), shaking(80, 0.009, 0.03), shaking_norm(120, 0.02, 0.2)],
    ),
    "time_mismatch": (
        [every(30, predicted_seconds=1.5), every(30, predicted_seconds=2.7)],
        [
            every(30, predicted_seconds=1.65),
            every(30, predicted_seconds=None),
            every(30, data_wait_seconds=1.0, predicted_seconds=1.0),  # waiting is another matter
            [*every(3, step_seconds=60.0), *every(15)],
        ],
    ),
    "memory_mismatch": (
        [
            every(30, predicted_memory_bytes=GIB * 107 // 2),
            every(30, predicted_memory_bytes=67 * GIB),
        ],
        [every(30, predicted_memory_bytes=GIB * 111 // 2), every(30, memory_bytes=None)],
    ),
    "overfitting": (
        [evaluated([2.0, 1.8, 1.81, 1.822], [2.0, 1.5, 1.2, 1.0])],
        [
            evaluated([2.0, 1.8, 1.85, 1.8], [2.0, 1.5, 1.2, 1.0]),  # not for good
            evaluated([2.0, 1.8, 1.81, 1.815], [2.0, 1.5, 1.2, 1.0]),  # not by much
            evaluated([2.0, 1.8, 1.85, 1.9], [2.0, 1.5, 1.6, 1.7]),  # training gets worse as well
        ],
    ),
}


def test_every_kind_has_its_cases() -> None:
    assert set(CASES) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_raised_where_it_should_be(kind: str) -> None:
    for number, history in enumerate(CASES[kind][0]):
        found = [warning for warning in warnings_of(history) if warning.kind == kind]
        assert found, f"history {number}"
        assert all(later.step - one.step >= 200 for one, later in pairwise(found)), "it is repeated"
        assert found[0].message
        assert found[0].advice


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_not_raised_by_what_only_looks_like_it(kind: str) -> None:
    for number, history in enumerate(CASES[kind][1]):
        steps = list(history)
        assert steps, "nothing was tested"
        assert kind not in kinds_of(steps), f"history {number}"


def test_a_healthy_run_is_left_in_peace() -> None:
    assert warnings_of(healthy(700)) == []  # its loss still falls


def learning(noise: float, seed: int, steps: int = 2000) -> Iterator[StepMetrics]:
    """A run that learns to its end, with noise from step to step, a warm-up and a cosine."""
    chance = random.Random(seed)
    for step in range(1, steps + 1):
        rate = 1e-4 * min(1, step / 60) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
        loss = 0.8 + 3 * math.exp(-step / 400) + 0.3 * math.exp(-step / 3000)
        yield step_of(
            step,
            loss=loss * math.exp(chance.gauss(0, noise)),
            grad_norm=(0.6 + 2 * math.exp(-step / 100)) * math.exp(chance.gauss(0, 0.3)),
            learning_rates={"language": rate},
            step_seconds=2 * math.exp(chance.gauss(0, 0.05)),
        )


def test_a_run_that_learns_is_left_in_peace() -> None:
    assert warnings_of(learning(0.05, 0)) == []


@pytest.mark.full
@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1, 0.2])
def test_noise_hardly_ever_raises_a_warning(noise: float) -> None:
    assert sum(len(warnings_of(learning(noise, seed))) for seed in range(6)) <= 1


def test_a_step_without_loss_is_named_as_the_cause() -> None:
    found = warnings_of(after(40, UNTAUGHT, UNTAUGHT))
    assert [warning.kind for warning in found] == ["gradient_zero"], "neither a spike nor a broken loss"
    assert "the step has no supervised tokens" in found[0].message
    assert "overlong" in found[0].advice


def test_one_outlier_does_not_hide_the_next() -> None:
    steps = [*healthy(40), step_of(41, loss=50.0), *healthy(10, 42), step_of(52, loss=7.5)]
    found = warnings_of(steps, Monitors(MonitorLimits(cooldown=5)))
    assert [warning.step for warning in found if warning.kind == "loss_spike"] == [41, 52]


def test_the_same_is_said_once_per_cool_down() -> None:
    steps = every(450, memory_bytes=79 * GIB, predicted_memory_bytes=79 * GIB)
    found = [warning.step for warning in warnings_of(steps) if warning.kind == "memory_near_limit"]
    assert found == [1, 201, 401]


def test_unequal_ranks_are_told_from_unequal_work() -> None:
    (plan,) = warnings_of(every(30, **UNEQUAL, work_spread=1.28))
    (machine,) = warnings_of(every(30, **UNEQUAL, work_spread=1.01))
    assert "packs_per_step" in plan.advice
    assert "rank 1" in machine.advice
    assert "in 20 of 20 steps it was rank 1" in machine.message


def test_a_new_process_may_take_its_time() -> None:
    slow = [step_of(step, data_wait_seconds=50.0, step_seconds=60.0) for step in range(41, 44)]
    quiet, told = Monitors(), Monitors()
    for monitors in (quiet, told):
        warnings_of(healthy(40), monitors)
    quiet.restarted()
    assert warnings_of([*slow, *healthy(20, 44)], quiet) == []
    assert "data_bound" in {warning.kind for warning in warnings_of([*slow, *healthy(20, 44)], told)}


def test_a_run_is_watched_on_from_any_state() -> None:
    """Saved before every step, through JSON, each tail gives the same warnings."""
    history = [
        *evaluated([2.0, 1.8, 1.85, 1.9], [2.0, 1.5, 1.2, 1.0]),
        *(step_of(step, loss=1.0, data_wait_seconds=0.5) for step in range(81, 300)),
        step_of(300, loss=math.nan, grad_norm=math.inf),
        step_of(301, loss=9.0, grad_norm=math.inf),
        step_of(302, loss=1.0, grad_norm=math.inf),
    ]
    monitors, states, whole = Monitors(), [], []
    for metrics in history:
        states.append(json.dumps(monitors.state_dict(), allow_nan=False))
        whole.append(warnings_of([metrics], monitors))
    assert {warning.kind for found in whole for warning in found} >= {
        *("overfitting", "data_bound", "plateau", "loss_not_finite", "loss_spike", "gradient_exploding")
    }
    for step in [*range(0, len(history), 17), *range(len(history) - 4, len(history))]:
        again = Monitors()
        again.load_state_dict(json.loads(states[step]))
        assert [warnings_of([metrics], again) for metrics in history[step:]] == whole[step:], f"from {step}"


def test_another_state_is_refused() -> None:
    for state in ({}, {"version": 2, "last": {"nonsense": 3}}, {"version": 2, "last": {}, "steps": [[1, 2]]}):
        with pytest.raises(ArtifactError, match="state of the monitors"):
            Monitors().load_state_dict(state)


def test_limits_are_checked_at_birth() -> None:
    with pytest.raises(ConfigError, match=r"monitors\.cooldown"):
        MonitorLimits(cooldown=0)


# ---- watching never ends a run


def test_a_rule_that_fails_is_one_warning_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(history: Any, limits: Any) -> None:
        raise ZeroDivisionError("float division\nby zero")

    monkeypatch.setattr("packtrain.training.monitors.RULES", {**RULES, "data_bound": broken})
    found = warnings_of(after(30, {"loss": math.nan}))
    assert {one.kind for one in found} == {"data_bound", "loss_not_finite"}, "the others go on"
    failed = [one for one in found if one.kind == "data_bound"]
    assert len(failed) == 1
    assert "this check failed: ZeroDivisionError: float division by zero" in failed[0].message


def test_slow_rules_that_fail_do_not_end_a_run() -> None:
    monitors = Monitors(MonitorLimits(plateau_samples=1, plateau_steps=1))  # one loss has no variance
    found = warnings_of(healthy(5), monitors)
    assert [(one.kind, "StatisticsError" in one.message) for one in found] == [("plateau", True)]


def test_a_loss_of_exactly_nothing_before_a_jump() -> None:
    found = warnings_of([*every(20, loss=0.0), step_of(21, loss=0.5)])
    said = [one.message for one in found if one.kind == "loss_spike"]
    assert said == ["the loss is 0.5, above the 0 before"]


def test_no_rule_fails_whatever_the_numbers_are() -> None:
    draw = random.Random(5)
    odd = (0.0, 1e-320, 3e38, -3e38, 1.0, math.nan, math.inf, -math.inf, 2.5)  # as far as fp32 reaches
    for limits in (
        MonitorLimits(),
        MonitorLimits(window=1, min_steps=1, timing_window=1, timing_warmup_steps=0, cooldown=1),
    ):
        for _ in range(6):
            few = draw.sample(odd, 3)
            history = [
                step_of(
                    step,
                    loss=draw.choice(few),
                    grad_norm=draw.choice([*few, None]),
                    step_seconds=abs(draw.choice(few)),
                    predicted_seconds=draw.choice([*few, None]),
                    memory_bytes=draw.choice([0, 1, None]),
                    predicted_memory_bytes=draw.choice([0, 1, 1 << 60, None]),
                    spread=draw.choice(few),
                    rank_seconds=draw.choice([(), (1.0,), (1.0, math.nan)]),
                    learning_rates=draw.choice([{}, {"language": draw.choice(few)}]),
                    samples=draw.choice([0, 3_000]),
                )
                for step in range(1, 250)
            ]
            found = warnings_of(history, Monitors(limits))
            assert [one for one in found if "this check failed" in one.message] == []
