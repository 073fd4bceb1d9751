"""Early warnings: every step and evaluation of a run -> what should be known now, each kind once in a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from packtrain.core.errors import ArtifactError
from packtrain.runs.early_warnings import KINDS, EarlyWarning, Kind, MonitorLimits
from packtrain.runs.step_metrics import (
    EvalMetrics,
    StepMetrics,
    named_numbers,
    numbers_of_names,
    step_from_plain,
    to_plain,
)
from packtrain.training.monitor_rules import RULES, Diagnosis, History, Overfitting, Plateau

_STATE = 2


class Monitors:
    """Watches one run. Every kind of warning is given at most once per cool-down.

    The state is a JSON value; from it a run goes on as if nothing had been. A new process calls `restarted`, so that
    the time it takes to compile and to start its workers is not held against the run.
    """

    def __init__(self, limits: MonitorLimits | None = None) -> None:
        self._limits = limits if limits is not None else MonitorLimits()
        self._kept = max(2 * self._limits.window, 128)
        self._steps: list[StepMetrics] = []
        self._plain: list[dict[str, Any]] = []  # the same, for states
        self._unsteady: set[int] = set()  # of them, the first ones of a process
        self._last: dict[str, int] = {}  # kind -> the step at which it was said
        self._plateau, self._overfitting = Plateau(self._limits), Overfitting(self._limits)
        self.restarted()

    def restarted(self) -> None:
        """The next steps are the first of a process."""
        self._settling = self._limits.timing_warmup_steps

    def observe(self, metrics: StepMetrics) -> tuple[EarlyWarning, ...]:
        """The warnings that a step gives rise to."""
        self._steps = [*self._steps, metrics][-self._kept :]
        self._plain = [*self._plain, named_numbers(to_plain(metrics))][-self._kept :]
        self._unsteady = {step for step in self._unsteady if step >= self._steps[0].step}
        if self._settling:
            self._unsteady.add(metrics.step)
        self._settling = max(0, self._settling - 1)
        self._overfitting.trained(metrics.loss)
        history = History(steps=self._steps, steady=self._steady())
        diagnoses = {kind: _run_rule(partial(rule, history, self._limits)) for kind, rule in RULES.items()}
        diagnoses["plateau"] = _run_rule(partial(self._plateau.after, metrics))
        return self._after_cooldown(diagnoses, metrics.step)

    def observe_eval(self, metrics: EvalMetrics) -> tuple[EarlyWarning, ...]:
        """The warnings that an evaluation gives rise to."""
        return self._after_cooldown({"overfitting": _run_rule(partial(self._overfitting.after, metrics))}, metrics.step)

    def state_dict(self) -> dict[str, Any]:
        """Everything that a warning could depend on, as JSON."""
        return {
            "version": _STATE,
            "steps": list(self._plain),
            "unsteady": sorted(self._unsteady),
            "last": dict(self._last),
            "settling": self._settling,
            "plateau": self._plateau.state_dict(),
            "overfitting": self._overfitting.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state."""
        try:
            if state["version"] != _STATE or not set(state["last"]) <= set(KINDS):
                raise ValueError("another version")
            self._plain = [dict(one) for one in state["steps"]]
            self._steps = [step_from_plain(numbers_of_names(one)) for one in self._plain]
            self._unsteady, self._settling = set(map(int, state["unsteady"])), int(state["settling"])
            self._last = {str(kind): int(step) for kind, step in state["last"].items()}
            self._plateau.load_state_dict(state["plateau"])
            self._overfitting.load_state_dict(state["overfitting"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            got, expected = str(dict(state))[:200], f"version {_STATE}"
            raise ArtifactError("state of the monitors", got=got, expected=expected) from error

    def _steady(self) -> list[StepMetrics]:
        """The last steps, those of a starting process left out."""
        window, settling = self._limits.timing_window, self._limits.timing_warmup_steps
        return [one for one in self._steps[-window - settling :] if one.step not in self._unsteady][-window:]

    def _after_cooldown(self, diagnoses: Mapping[Kind, Diagnosis | None], step: int) -> tuple[EarlyWarning, ...]:
        warnings = []
        for kind, what in diagnoses.items():
            if what is None or step - self._last.get(kind, -self._limits.cooldown) < self._limits.cooldown:
                continue
            self._last[kind] = step
            warnings.append(EarlyWarning(kind=kind, step=step, message=what.message, advice=what.advice))
        return tuple(warnings)


def _run_rule(rule: Callable[[], Diagnosis | None]) -> Diagnosis | None:
    """The diagnosis of a rule. Monitoring must never end a run, so a rule that fails is reported as a diagnosis."""
    try:
        return rule()
    except Exception as error:
        return Diagnosis(
            f"this check failed: {' '.join(f'{type(error).__name__}: {error}'.split())}",
            "training continues without it; please report this with the preceding lines of metrics.jsonl",
        )
