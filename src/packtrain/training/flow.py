"""When a run saves, evaluates and ends, beside what Trainer's arguments say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtrain.delivery.trainers.mixin import JointDecision
from packtrain.training.agreement import votes_of_all
from packtrain.training.interrupts import Interrupts

_ELSEWHERE = "a signal to another rank"
_SAVED = "packtrain.flow"  # under this name it stands in trainer_state.json
_DUE = "evaluation_due"


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
        """What was done at the end of the step is not done again at the end of the epoch."""
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
        return votes_of_all(lambda: self._interrupts.asked is not None, device) if self._may_cut else lambda: False

    def cut(self, state: TrainerState, control: TrainerControl) -> None:
        """An evaluation was cut short: save what is not saved yet, and stop. A resumed run makes up for it."""
        self.interrupted = self._interrupts.asked or _ELSEWHERE
        _owe(state)
        control.should_save, control.should_training_stop = self._saved != state.global_step, True


def is_due(state: TrainerState) -> bool:
    """Was the evaluation of the step that a run continues from cut short, or left out?"""
    found = (state.stateful_callbacks or {}).get(_SAVED)
    return bool(state.global_step) and isinstance(found, dict) and found.get(_DUE) == state.global_step


def _owe(state: TrainerState) -> None:
    """The checkpoint of this step says that its evaluation is still to be made."""
    if isinstance(state.stateful_callbacks, dict):
        state.stateful_callbacks[_SAVED] = {_DUE: state.global_step}
