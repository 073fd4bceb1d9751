"""Ctrl-C and SIGTERM end a run at the end of a step with a checkpoint; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from small_run import dataset, losses, same, trainer_of, weights
from transformers import TrainerCallback

from packtrain.training.checkpoints import find_latest
from packtrain.training.interrupts import Interrupts


class Signal(TrainerCallback):
    """Sends a signal in the middle of a step."""

    def __init__(self, number: signal.Signals, step: int, times: int = 1) -> None:
        self.number, self.step, self.times = number, step, times

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step - 1:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
            self.step = 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_and_the_run_goes_on_as_if_nothing_had_been(
    tmp_path: Path, number: signal.Signals
) -> None:
    whole = trainer_of(dataset(), tmp_path / "whole", save_strategy="no")
    whole.train()
    assert whole.interrupted is None
    # No checkpoint is due: neither by the strategy nor by the delay.
    parts = {"callbacks": [Signal(number, 3)]}
    ended = trainer_of(dataset(), tmp_path / "run", parts=parts, save_strategy="no")
    before = signal.getsignal(number)
    ended.train()
    assert signal.getsignal(number) is before
    assert ended.interrupted == number.name
    assert ended.state.global_step == 3
    found = find_latest(tmp_path / "run")
    assert found is not None
    assert found.step == 3
    again = trainer_of(dataset(), tmp_path / "run", save_strategy="no")
    again.train(resume_from_checkpoint=True)
    assert again.interrupted is None
    assert losses(again) == losses(whole)
    assert same(weights(again), weights(whole))


def test_the_newest_checkpoint_stays_when_only_the_best_is_kept(tmp_path: Path) -> None:
    trainer = trainer_of(
        dataset(), tmp_path, parts={"callbacks": [Signal(signal.SIGTERM, 3)], "eval_dataset": dataset(epochs=1)},
        save_total_limit=1, eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=True,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]


@pytest.mark.parametrize("strategy", ["steps", "epoch"])
def test_nothing_is_evaluated_on_the_way_out(tmp_path: Path, strategy: str) -> None:
    parts = {"callbacks": [Signal(signal.SIGTERM, 4)], "eval_dataset": dataset(epochs=1)}  # the end of an epoch
    options = {"eval_strategy": strategy, "eval_steps": 4, "save_strategy": strategy, "save_steps": 4}
    trainer = trainer_of(dataset(), tmp_path, parts=parts, **options)
    trainer.train()
    assert trainer.state.global_step == 4
    assert not [line for line in trainer.state.log_history if "eval_loss" in line]
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


def evaluations(trainer: Any) -> dict[int, float]:
    return {line["step"]: line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line}


def interrupted_in_evaluation(trainer: Any, step: int, batch: int) -> list[int]:
    """A signal comes with this batch of the evaluation after this step; the steps of all that are evaluated."""
    seen: list[int] = []
    real = trainer._sum_of

    def sum_of(model: Any, inputs: Any) -> Any:
        seen.append(trainer.state.global_step)
        if seen.count(step) == batch:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(model, inputs)

    trainer._sum_of = sum_of
    return seen


@pytest.mark.parametrize("save", ["no", "best"])
def test_a_signal_ends_an_evaluation_which_is_made_when_the_run_goes_on(tmp_path: Path, save: str) -> None:
    parts = {"eval_dataset": dataset(epochs=1, packing=False)}
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": save, "metric_for_best_model": "loss"}
    whole = trainer_of(dataset(), tmp_path / "whole", parts=parts, **options)
    whole.train()
    ended = trainer_of(dataset(), tmp_path / "run", parts=parts, **options)
    seen = interrupted_in_evaluation(ended, 4, 3)
    ended.train()
    assert (ended.interrupted, ended.state.global_step) == ("SIGTERM", 4)
    assert seen.count(2) > seen.count(4) == 3, "the batch that was under way is the last"
    assert list(evaluations(ended)) == [2], "a part of an evaluation is none"
    found = find_latest(tmp_path / "run")
    assert found is not None
    assert found.step == 4
    again = trainer_of(dataset(), tmp_path / "run", parts=parts, **options)
    again.train(resume_from_checkpoint=True)
    assert again.interrupted is None
    assert evaluations(again) == evaluations(whole)
    assert losses(again) == losses(whole)
    assert same(weights(again), weights(whole))
    assert (again.state.best_metric, again.state.best_global_step) == (
        whole.state.best_metric,
        whole.state.best_global_step,
    )


def test_an_evaluation_that_is_asked_for_is_not_cut_short(tmp_path: Path) -> None:
    parts = {"callbacks": [Signal(signal.SIGTERM, 1)], "eval_dataset": dataset(epochs=1)}
    trainer = trainer_of(dataset(), tmp_path, parts=parts, save_strategy="no")
    trainer.train()
    assert trainer.interrupted == "SIGTERM"
    assert trainer.evaluate()["eval_samples"] == 24


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    trainer = trainer_of(dataset(), tmp_path, parts={"callbacks": [Signal(signal.SIGINT, 2, times=2)]})
    before = signal.getsignal(signal.SIGINT)  # a shell may have started us so that it is ignored
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_in_order() -> None:
    with Interrupts() as interrupts:
        assert interrupts.asked is None
        for number in (signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert interrupts.asked == "SIGTERM"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with interrupts:
        assert interrupts.asked is None, "a new run"


def test_in_another_thread_there_are_no_handlers() -> None:
    seen = []

    def run() -> None:
        with Interrupts() as interrupts:
            seen.append(interrupts.asked)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]
