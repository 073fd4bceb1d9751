"""Callbacks of the trainer: when a run saves, evaluates and ends, early stopping, metrics, garbage collection."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtrain.delivery.trainers.mixin import JointDecision
from packtrain.runs.early_warnings import EarlyWarning, MonitorLimits
from packtrain.runs.metrics_log import Metrics, MetricsLog
from packtrain.runs.step_metrics import EvalMetrics, StepMetrics
from packtrain.training.agreement import any_rank
from packtrain.training.interrupts import Interrupts
from packtrain.training.monitors import Monitors
from packtrain.verifying.check_result import CheckReport

if TYPE_CHECKING:
    from packtrain.training.progress import TrainingProgress

_ELSEWHERE = "a signal to another rank"
# Names of states in trainer_state.json.
_SAVED, _EARLY, _MONITORS = "packtrain.flow", "packtrain.early_stopping", "packtrain.monitors"
_DUE = "evaluation_due"
_FREEZE_AFTER = (1, 10)  # steps: layers are compiled in the first ones


def saved_state(state: TrainerState, name: str) -> Any:
    """The state that the checkpoint a run resumes from has under a name; None where it has none."""
    return (state.stateful_callbacks or {}).get(name)


def save_state(state: TrainerState, name: str, value: Mapping[str, Any]) -> None:
    """Put something into the next checkpoints."""
    if state.stateful_callbacks is None:
        state.stateful_callbacks = {}
    state.stateful_callbacks[name] = value


class RunFlow(TrainerCallback):
    """No checkpoint before its time, nothing twice at one step, and an end that all ranks agree on.

    It comes after the callbacks that decide by steps and epochs, and after the joint decision of the ranks, with
    which it asks whether any of them was told to stop.
    """

    def __init__(self, interrupts: Interrupts, decision: JointDecision, *, save_delay_steps: int) -> None:
        self._interrupts, self._decision, self._delay = interrupts, decision, save_delay_steps
        decision.vote = lambda: interrupts.asked is not None
        self._saved = self._evaluated = -1  # steps
        self._may_cut = False
        self.interrupted: str | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.interrupted = None
        self._saved = state.global_step  # the checkpoint that it continues from, or nothing yet
        self._evaluated = -1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save and stop where any rank was asked to; otherwise see that no checkpoint comes too early."""
        (state.stateful_callbacks or {}).pop(_SAVED, None)
        if control.should_training_stop and args.eval_strategy == "epoch" and args.eval_delay <= (state.epoch or 0.0):
            control.should_evaluate = True  # now and not at the end of the epoch, so that it comes before saving
        self.interrupted = (self._interrupts.asked or _ELSEWHERE) if self._decision.votes else None
        if self.interrupted is not None:
            if control.should_evaluate:
                _owe(state)
            control.should_save, control.should_training_stop, control.should_evaluate = True, True, False
        elif state.global_step < self._delay:
            control.should_save = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._saved = state.global_step

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """The last step is saved, also where an evaluation makes it the last."""
        self._evaluated = step = state.global_step
        if control.should_training_stop and args.save_strategy in ("steps", "epoch") and step >= self._delay:
            control.should_save = self._saved != step

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Work done at the end of the step is not repeated at the end of the epoch."""
        step = state.global_step
        if self._evaluated == step or self.interrupted is not None:
            control.should_evaluate = False
        if self._saved == step or self.interrupted is not None or step < self._delay:
            control.should_save = False

    # ---- evaluations that are cut short or left out

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluations of the run itself may be cut short; those that users ask for are made to their end."""
        self._may_cut = True
        try:
            yield
        finally:
            self._may_cut = False

    def stops(self, device: torch.device) -> Callable[[], bool]:
        """Says before each batch of an evaluation whether it is to end; all ranks hear the same."""
        return any_rank(lambda: self._interrupts.asked is not None, device) if self._may_cut else lambda: False

    def cut(self, state: TrainerState, control: TrainerControl) -> None:
        """An evaluation was cut short: save unsaved work, and stop. A resumed run makes up for it."""
        self.interrupted = self._interrupts.asked or _ELSEWHERE
        _owe(state)
        control.should_save, control.should_training_stop = self._saved != state.global_step, True


def is_due(state: TrainerState) -> bool:
    """Was the evaluation of the step that a run continues from cut short, or left out?"""
    saved = saved_state(state, _SAVED)
    return bool(state.global_step) and isinstance(saved, dict) and saved.get(_DUE) == state.global_step


def _owe(state: TrainerState) -> None:
    """The checkpoint of this step says that its evaluation is still to be made."""
    save_state(state, _SAVED, {_DUE: state.global_step})


# ---- early stopping


class EarlyStopping(TrainerCallback):
    """Ends a run when its evaluations have not become better for a while. What it counts is part of checkpoints."""

    def __init__(self, *, patience: int, threshold: float = 0.0) -> None:
        self._patience, self._threshold = patience, threshold
        self._best: float | None = None
        self._worse = 0  # evaluations since the best

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Go on with what was counted before a checkpoint; a run that was ended here stays ended."""
        saved = saved_state(state, _EARLY) if state.global_step else None
        self._best, self._worse = (saved["best"], saved["worse"]) if saved else (None, 0)
        if self._worse >= self._patience:
            control.should_training_stop = True

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        name = args.metric_for_best_model or "loss"
        value = (metrics or {}).get(name if name.startswith("eval_") else f"eval_{name}")
        if value is None:  # an evaluation of other data
            return
        if self._better(value, bool(args.greater_is_better)):
            self._best, self._worse = value, 0
        else:
            self._worse += 1
        save_state(state, _EARLY, {"best": self._best, "worse": self._worse})
        if self._worse >= self._patience:
            control.should_training_stop = True

    def _better(self, value: float, greater: bool) -> bool:
        """Not-a-number never is."""
        if math.isnan(value):
            return False
        gain = math.inf if self._best is None else (value - self._best) * (1 if greater else -1)
        return gain > self._threshold


# ---- metrics


class RunLogger(TrainerCallback):
    """Takes every step and evaluation of a run; only the first rank writes and shows, all of them count."""

    def __init__(self, log: MetricsLog, progress: TrainingProgress, limits: MonitorLimits | None = None) -> None:
        self._log, self._progress = log, progress
        self._limits, self._monitors = limits, Monitors(limits)
        self.first: StepMetrics | None = None
        self.last: StepMetrics | None = None
        self.eval_loss: float | None = None
        self.seconds_before = 0.0  # that steps and evaluations took in earlier processes of the run
        self._state: TrainerState | None = None
        self._saved = 0  # step of the newest checkpoint

    def on_packing_check(self, report: CheckReport) -> None:
        """The check before the first step has passed."""
        for line in report.summary_lines():
            self._progress.note(f"packing check: {line}")

    def on_step(self, metrics: StepMetrics) -> None:
        """A step is over."""
        self.first, self.last = self.first or metrics, metrics
        self._log.step(metrics)
        self._progress.show(metrics)
        self._warn(self._monitors.observe(metrics))
        self._keep()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Drop the metrics after a checkpoint's step, since they will come again."""
        self._saved = state.global_step
        last, self._state = self._log.resume(state.global_step, evaluated=not is_due(state)), state
        saved = saved_state(state, _MONITORS)
        if state.global_step and saved is not None:
            self._go_on(saved)
        self.last = last
        before = self._log.written() if state.global_step else Metrics()
        self.eval_loss = before.evaluations[-1].eval_loss if before.evaluations else None
        self.seconds_before = sum(step.step_seconds for step in before.steps)
        self.seconds_before += sum(one.seconds or 0.0 for one in before.evaluations)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """An evaluation is over."""
        if metrics is None or "eval_loss" not in metrics:
            return
        self.eval_loss = metrics["eval_loss"]
        evaluation = EvalMetrics(
            step=state.global_step,
            epoch=float(state.epoch or 0.0),
            eval_loss=metrics["eval_loss"],
            samples_seen=self.last.samples_seen if self.last is not None else 0,
            seconds=metrics.get("eval_runtime"),
            eval_failures=int(metrics.get("eval_failures", 0)),
        )
        self._log.evaluation(evaluation)
        self._progress.evaluated(evaluation)
        self._warn(self._monitors.observe_eval(evaluation))
        self._keep()

    def before_saving(self) -> None:
        """A checkpoint must not be ahead of the metrics that it goes on from."""
        self._log.sync()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """A checkpoint is complete."""
        self._saved = state.global_step
        self._progress.note(f"checkpoint saved at step {state.global_step:,}")

    def on_interrupt(self) -> None:
        """Ctrl-C is answered at once, however long the step lasts."""
        all_of_it = "the whole run, since there is no checkpoint yet"
        lost = f"what came after step {self._saved:,}" if self._saved else all_of_it
        self._progress.note(f"stopping after this step, with a checkpoint; again to stop now and lose {lost}")

    def _go_on(self, saved: Any) -> None:
        """With what the monitors saw before; a state that cannot be read is no reason to end a run."""
        try:
            self._monitors.load_state_dict(saved)
        except Exception as error:
            self._monitors = Monitors(self._limits)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self._progress.note(f"the monitors start over: their state in the checkpoint cannot be read: {reason}")
        self._monitors.restarted()

    def _keep(self) -> None:
        """Put the observations into the step's checkpoint, which is saved after this."""
        if self._state is not None:
            save_state(self._state, _MONITORS, self._monitors.state_dict())

    def _warn(self, warnings: tuple[EarlyWarning, ...]) -> None:
        for warning in warnings:
            self._log.warning(warning)
            self._progress.warn(warning)


# ---- garbage collection


def freeze_objects() -> None:
    """Leave the objects that are alive now out of collections until `gc.unfreeze`."""
    gc.collect()
    gc.freeze()


class FreezeObjects(TrainerCallback):
    """A run, as a context: the garbage collector passes over what is alive after the first steps, until the run ends.

    Models, compiled code and their guards are some million objects, which live as long as the run does. A full
    collection looks at each of them, for a tenth of a second or more in which nothing is sent to the GPU.
    """

    def __init__(self) -> None:
        self._steps = 0

    def __enter__(self) -> None:
        self._steps = 0

    def __exit__(self, *error: object) -> None:
        gc.unfreeze()

    def on_step_end(self, *args: Any, **values: Any) -> None:
        """A step of the optimizer is done."""
        self._steps += 1
        if self._steps in _FREEZE_AFTER:
            freeze_objects()
