"""When a run saves, evaluates and ends, beside what Trainer's arguments say."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtrain.training.agreement import summed, world_size
from packtrain.training.interrupts import Interrupts

_ELSEWHERE = "a signal to another rank"


class RunFlow(TrainerCallback):
    """No checkpoint before its time, nothing twice at one step, and an end that all ranks agree on.

    It stands behind the callbacks that decide by steps and epochs.
    """

    def __init__(self, interrupts: Interrupts, *, save_delay_steps: int, device: torch.device) -> None:
        self._interrupts, self._delay, self._device = interrupts, save_delay_steps, device
        self._saved = self._evaluated = -1  # steps
        self.interrupted: str | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.interrupted = None
        self._saved = state.global_step  # the checkpoint that it goes on from, or nothing yet
        self._evaluated = -1

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save and stop where any rank was asked to; otherwise see that no checkpoint comes too early."""
        asked = self._interrupts.asked
        if world_size() > 1 and summed([float(asked is not None)], self._device).item() and asked is None:
            asked = _ELSEWHERE
        self.interrupted = asked
        if asked is not None:
            control.should_save, control.should_training_stop, control.should_evaluate = True, True, False
        elif state.global_step < self._delay:
            control.should_save = False

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._saved = state.global_step

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._evaluated = state.global_step

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """What was done at the end of the step is not done again at the end of the epoch."""
        step = state.global_step
        if self._evaluated == step or self.interrupted is not None:
            control.should_evaluate = False
        if self._saved == step or self.interrupted is not None or step < self._delay:
            control.should_save = False
