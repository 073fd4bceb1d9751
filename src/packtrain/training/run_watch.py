"""What becomes of a step's metrics: a line of metrics.jsonl, early warnings, the progress bar."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtrain.runs.history import EarlyWarning, MonitorLimits
from packtrain.runs.metrics_log import Metrics, MetricsLog
from packtrain.runs.step_metrics import EvalMetrics, StepMetrics
from packtrain.training.flow import is_due
from packtrain.training.monitors import Monitors
from packtrain.training.progress import TrainingProgress
from packtrain.verifying.check_result import Verdict

_SAVED = "packtrain.monitors"  # under this name their state stands in trainer_state.json


class RunWatch(TrainerCallback):
    """Takes every step and evaluation of a run; only the first rank writes and shows, all of them count."""

    def __init__(self, log: MetricsLog, progress: TrainingProgress, limits: MonitorLimits | None = None) -> None:
        self._log, self._progress, self._monitors = log, progress, Monitors(limits)
        self.first: StepMetrics | None = None
        self.last: StepMetrics | None = None
        self.eval_loss: float | None = None
        self.seconds_before = 0.0  # that steps and evaluations took in earlier processes of the run
        self._state: TrainerState | None = None
        self._saved = 0  # step of the newest checkpoint

    def on_proof(self, verdict: Verdict) -> None:
        """The check before the first step has passed."""
        for line in verdict.passed_in_words():
            self._progress.note(f"packing check: {line}")

    def on_step(self, metrics: StepMetrics) -> None:
        """A step is over."""
        self.first, self.last = self.first or metrics, metrics
        self._log.step(metrics)
        self._progress.show(metrics)
        self._warn(self._monitors.observe(metrics))
        self._keep()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Behind a checkpoint's step nothing is kept that will come again."""
        self._saved = state.global_step
        last, self._state = self._log.resume(state.global_step, evaluated=not is_due(state)), state
        saved = (state.stateful_callbacks or {}).get(_SAVED)
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
        found = EvalMetrics(
            step=state.global_step,
            epoch=float(state.epoch or 0.0),
            eval_loss=metrics["eval_loss"],
            samples_seen=self.last.samples_seen if self.last is not None else 0,
            seconds=metrics.get("eval_runtime"),
            eval_failures=int(metrics.get("eval_failures", 0)),
        )
        self._log.evaluation(found)
        self._progress.evaluated(found)
        self._warn(self._monitors.observe_eval(found))
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
        kept = f"what came after step {self._saved:,}" if self._saved else "the whole run, since there is no "
        "checkpoint yet"
        self._progress.note(f"stopping after this step, with a checkpoint; again to stop now and lose {kept}")

    def _go_on(self, saved: Any) -> None:
        """With what the monitors saw before; a state that cannot be read is no reason to end a run."""
        try:
            self._monitors.load_state_dict(saved)
        except Exception as error:
            self._monitors = Monitors()
            said = " ".join(f"{type(error).__name__}: {error}".split())
            self._progress.note(f"the monitors start over: their state in the checkpoint cannot be read: {said}")
        self._monitors.restarted()

    def _keep(self) -> None:
        """What was observed is part of the step's checkpoint, which is saved after this."""
        if self._state is not None and isinstance(self._state.stateful_callbacks, dict):
            self._state.stateful_callbacks[_SAVED] = self._monitors.state_dict()

    def _warn(self, warnings: tuple[EarlyWarning, ...]) -> None:
        for warning in warnings:
            self._log.warning(warning)
            self._progress.warn(warning)
