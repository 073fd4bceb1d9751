"""The loss on data that is not trained: summed over the tokens of all ranks, without a trace in the training run."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtrain.delivery.collate.batch_values import Batch
from packtrain.delivery.trainers.token_loss import Evaluated
from packtrain.training.agreement import summed
from packtrain.training.loss import weight_of

_SAVED = "packtrain.early_stopping"  # under this name it stands in trainer_state.json


class EvaluationStopped(Exception):
    """The run is to end; what was evaluated so far is no evaluation."""


def evaluate(
    model: Any,
    batches: Iterable[Batch],
    total: Callable[[Any, Batch], Tensor],
    device: torch.device,
    stops: Callable[[], bool] = lambda: False,
) -> Evaluated:
    """Sum of token losses over their number. `total` gives the sum of one batch; every rank has as many batches.

    `stops` is asked before each batch and answers all ranks alike; EvaluationStopped is raised where it says yes.
    """
    sum_of_losses = torch.zeros((), dtype=torch.float64, device=device)
    weight, samples, tokens, number, failures = 0.0, 0, 0, 0, 0
    with kept_random_state(), _evaluating(model), torch.no_grad():
        for batch in batches:
            if stops():
                raise EvaluationStopped
            sum_of_losses += total(model, batch).double()
            weight += weight_of(batch.info)
            samples, tokens, number = samples + batch.info.whole_samples, tokens + batch.info.tokens, number + 1
            failures += sum(not entry.filtered for entry in batch.info.failures)
        found = summed([sum_of_losses, weight, samples, tokens, number, failures], device).tolist()
    return Evaluated.of(found)


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Random numbers continue afterwards as if nothing had been drawn, so that looking changes no run."""
    before, numbers, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    gpu = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numbers)
        torch.set_rng_state(cpu)
        if gpu is not None:
            torch.cuda.set_rng_state(gpu)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Without dropout, and every module back in the mode that it was in."""
    was = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in was:
            module.training = training


class EarlyStopping(TrainerCallback):
    """Ends a run when its evaluations have not become better for a while. What it counts is part of checkpoints."""

    def __init__(self, *, patience: int, threshold: float = 0.0) -> None:
        self._patience, self._threshold = patience, threshold
        self._best: float | None = None
        self._worse = 0  # evaluations since the best

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Go on with what was counted before a checkpoint; a run that was ended here stays ended."""
        saved = (state.stateful_callbacks or {}).get(_SAVED) if state.global_step else None
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
        if state.stateful_callbacks is None:
            state.stateful_callbacks = {}
        state.stateful_callbacks[_SAVED] = {"best": self._best, "worse": self._worse}
        if self._worse >= self._patience:
            control.should_training_stop = True

    def _better(self, value: float, greater: bool) -> bool:
        """Not-a-number never is."""
        if math.isnan(value):
            return False
        gain = math.inf if self._best is None else (value - self._best) * (1 if greater else -1)
        return gain > self._threshold
