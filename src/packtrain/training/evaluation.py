"""The loss on data that is not trained: summed over the tokens of all ranks, without a trace in the training run."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from packtrain.batches.values import Batch
from packtrain.core.errors import DataError
from packtrain.training.agreement import summed
from packtrain.training.loss import weight_of

_SAVED = "packtrain.early_stopping"  # under this name it stands in trainer_state.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """One pass over the data of evaluation, by all ranks."""

    loss: float
    samples: int
    tokens: int
    batches: int
    failures: int = 0  # samples that could not be decoded, and are in none of the others

    def metrics(self, prefix: str, seconds: float) -> dict[str, float]:
        """Under the names that Trainer gives them."""
        found = {
            "loss": self.loss,
            "samples": float(self.samples),
            "tokens": float(self.tokens),
            "failures": float(self.failures),
            "runtime": round(seconds, 4),
            "samples_per_second": round(self.samples / max(seconds, 1e-9), 3),
        }
        return {f"{prefix}_{name}": value for name, value in found.items()}

    def warn(self, prefix: str, *, first: bool) -> None:
        """A loss over fewer samples is another number, and must not pass for the same. The first rank says it."""
        if first and self.failures:
            warnings.warn(
                f"{prefix}: {self.failures:,} of {self.samples + self.failures:,} samples could not be decoded, so the "
                f"loss is that of the others; evaluations with other {prefix}_failures cannot be compared with it",
                stacklevel=2,
            )


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
    counts = [int(count) for count in found[2:]]
    if not found[1]:
        raise DataError(
            "evaluation",
            got=f"{counts[0]:,} samples without a supervised token; {counts[3]:,} could not be decoded",
            expected="at least one that carries loss",
            fix="look into the ledger of the evaluation data",
        )
    return Evaluated(
        loss=found[0] / found[1], samples=counts[0], tokens=counts[1], batches=counts[2], failures=counts[3]
    )


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Random numbers go on afterwards as if nothing had been drawn, so that looking changes no run."""
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
