"""Ctrl-C and SIGTERM end a run at the end of a step with a checkpoint; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import dataset, losses, same, trainer_of, weights
from transformers import TrainerCallback

from packtrain.training.checkpoints import find_latest
from packtrain.training.interrupts import Interrupts
from packtrain.training.step_settings import StepSettings


class Signal(TrainerCallback):
    """Sends a signal in the middle of a step."""

    def __init__(self, number: signal.Signals, step: int, times: int = 1) -> None:
        self.number, self.step, self.times = number, step, times

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step - 1:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)
            self.step = 0


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
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


@pytest.mark.full
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


# ---- evaluations that a run owes when it goes on

SHORT: dict[str, Any] = {"max_steps": 4, "save_strategy": "no", "metric_for_best_model": "loss"}
BY_STEPS: dict[str, Any] = {**SHORT, "eval_strategy": "steps", "eval_steps": 2}
BY_EPOCHS: dict[str, Any] = {**SHORT, "max_steps": 8, "eval_strategy": "epoch"}
NO_GAIN = StepSettings(early_stopping_patience=1, early_stopping_threshold=1e9, loss_chunk=16)


def held_out() -> dict[str, Any]:
    return {"eval_dataset": dataset(epochs=1)}


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "step"),
    [(BY_STEPS, 2), (BY_EPOCHS, 4), (BY_EPOCHS, 8), ({**BY_EPOCHS, "max_steps": 3}, 3)],
    ids=["steps", "epoch", "the last epoch", "the last step"],
)
def test_an_evaluation_that_a_signal_in_its_step_left_out_is_made(
    tmp_path: Path, options: dict[str, Any], step: int
) -> None:
    whole = trainer_of(dataset(), tmp_path / "whole", parts=held_out(), **options)
    whole.train()
    parts = {**held_out(), "callbacks": [Signal(signal.SIGTERM, step)]}
    ended = trainer_of(dataset(), tmp_path / "run", parts=parts, **options)
    ended.train()
    assert (ended.interrupted, ended.state.global_step) == ("SIGTERM", step)
    assert step not in evaluations(ended)
    again = trainer_of(dataset(), tmp_path / "run", parts=held_out(), **options)
    again.train(resume_from_checkpoint=True)
    assert evaluations(again) == evaluations(whole)
    assert step in evaluations(whole)
    assert len(ended.trained + again.trained) == len(whole.trained)
    assert same(weights(again), weights(whole))


@pytest.mark.full
@pytest.mark.parametrize("save", [{"save_strategy": "steps", "save_steps": 100}, {"save_strategy": "epoch"}])
def test_a_final_evaluation_that_was_cut_short_is_made(tmp_path: Path, save: dict[str, Any]) -> None:
    options = {**BY_EPOCHS, **save}
    whole = trainer_of(dataset(), tmp_path / "whole", parts=held_out(), **options)
    whole.train()
    assert list(evaluations(whole)) == [4, 8]
    ended = trainer_of(dataset(), tmp_path / "run", parts=held_out(), **options)
    interrupted_in_evaluation(ended, 8, 3)
    ended.train()
    assert (ended.interrupted, list(evaluations(ended))) == ("SIGTERM", [4])
    again = trainer_of(dataset(), tmp_path / "run", parts=held_out(), **options)
    again.train(resume_from_checkpoint=True)
    assert evaluations(again) == evaluations(whole)
    assert not again.trained
    saved = [sorted(path.name for path in (tmp_path / name).glob("checkpoint-*")) for name in ("run", "whole")]
    assert saved[0] == saved[1]


@pytest.mark.full
def test_the_best_of_all_may_be_an_evaluation_that_was_made_later(tmp_path: Path) -> None:
    options = {**BY_STEPS, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    whole = trainer_of(dataset(), tmp_path / "whole", parts=held_out(), **options)
    whole.train()
    assert whole.state.best_model_checkpoint == str(tmp_path / "whole" / "checkpoint-4")
    ended = trainer_of(dataset(), tmp_path / "run", parts=held_out(), **options)
    interrupted_in_evaluation(ended, 4, 3)
    ended.train()
    again = trainer_of(dataset(), tmp_path / "run", parts=held_out(), **options)
    again.train(resume_from_checkpoint=True)
    assert again.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-4")
    assert same(weights(again), weights(whole))


@pytest.mark.full
@pytest.mark.parametrize("packs", [1, 3])
def test_no_step_is_begun_when_the_evaluation_before_it_is_cut_short_too(tmp_path: Path, packs: int) -> None:
    data = dataset(packs_per_step=packs)
    whole = trainer_of(data, tmp_path / "whole", parts=held_out(), **BY_STEPS)
    whole.train()
    for resumed in (None, True):
        ended = trainer_of(data, tmp_path / "run", parts=held_out(), **BY_STEPS)
        interrupted_in_evaluation(ended, 2, 3)
        ended.train(resume_from_checkpoint=resumed)
        assert (ended.interrupted, ended.state.global_step) == ("SIGTERM", 2)
    assert not ended.trained
    again = trainer_of(data, tmp_path / "run", parts=held_out(), **BY_STEPS)
    again.train(resume_from_checkpoint=True)
    assert evaluations(again) == evaluations(whole)
    assert same(weights(again), weights(whole))


@pytest.mark.contract
@pytest.mark.parametrize(
    ("packs", "cut"),
    [(1, True), *(pytest.param(3, cut, marks=pytest.mark.more) for cut in (True, False))],
)
def test_nor_when_it_is_the_one_that_ends_the_run(tmp_path: Path, packs: int, cut: bool) -> None:
    """Whether the signal came in the evaluation or in the step before it."""
    data, parts, options = dataset(packs_per_step=packs), {**held_out(), "step": NO_GAIN}, {**BY_STEPS, "max_steps": 6}
    whole = trainer_of(data, tmp_path / "whole", parts=parts, **options)
    whole.train()
    assert whole.state.global_step == 4, "the second evaluation is not better"
    signals = [] if cut else [Signal(signal.SIGTERM, 4)]
    ended = trainer_of(data, tmp_path / "run", parts={**parts, "callbacks": signals}, **options)
    if cut:
        interrupted_in_evaluation(ended, 4, 3)
    ended.train()
    assert (ended.interrupted, list(evaluations(ended))) == ("SIGTERM", [2])
    again = trainer_of(data, tmp_path / "run", parts=parts, **options)
    again.train(resume_from_checkpoint=True)
    assert not again.trained
    assert (again.interrupted, again.state.global_step) == (None, 4)
    assert evaluations(again) == evaluations(whole)
    assert same(weights(again), weights(whole))


def test_of_several_datasets_none_counts_before_all_are_evaluated(tmp_path: Path) -> None:
    one = dataset(epochs=1)
    parts = {"eval_dataset": {"a": one, "b": one}, "step": replace(NO_GAIN, early_stopping_patience=9)}
    options = {**BY_STEPS, "metric_for_best_model": "a_loss"}

    def told(trainer: Any) -> list[tuple[int, str]]:
        names = ("eval_a_loss", "eval_b_loss")
        return [(line["step"], name) for line in trainer.state.log_history for name in names if name in line]

    def counted(trainer: Any) -> Any:
        return trainer.state.stateful_callbacks["packtrain.early_stopping"]

    whole = trainer_of(dataset(), tmp_path / "whole", parts=parts, **options)
    whole.train()
    ended = trainer_of(dataset(), tmp_path / "run", parts=parts, **options)
    interrupted_in_evaluation(ended, 4, len(one.loader(num_workers=0)) + 2)
    ended.train()
    assert told(ended) == told(whole)[:2], "the first of the two was done"
    again = trainer_of(dataset(), tmp_path / "run", parts=parts, **options)
    again.train(resume_from_checkpoint=True)
    assert told(again) == told(whole)
    assert counted(again) == counted(whole)


def test_without_data_to_evaluate_a_run_goes_on_all_the_same(tmp_path: Path) -> None:
    ended = trainer_of(dataset(), tmp_path, parts=held_out(), **BY_STEPS)
    interrupted_in_evaluation(ended, 2, 3)
    ended.train()
    again = trainer_of(dataset(), tmp_path, max_steps=4)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 4
    assert not evaluations(again)


@pytest.mark.contract
def test_what_is_owed_is_not_evaluated_once_more_at_the_start(tmp_path: Path) -> None:
    options = {**BY_STEPS, "eval_on_start": True}
    ended = trainer_of(dataset(), tmp_path, parts=held_out(), **options)
    interrupted_in_evaluation(ended, 2, 3)
    ended.train()
    again = trainer_of(dataset(), tmp_path, parts=held_out(), **options)
    again.train(resume_from_checkpoint=True)
    assert [line["step"] for line in again.state.log_history if "eval_loss" in line] == [0, 2, 4]


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
    assert "what came after step 1 is lost" in trainer._interrupts.lost()


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


def test_a_later_sigterm_is_a_second_request() -> None:
    now = [0.0]
    with Interrupts(clock=lambda: now[0]) as interrupts:
        for second in (0.0, 1.0, 4.9):  # launchers and schedulers both send it
            now[0] = second
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.asked == "SIGTERM"
        now[0] = 5.0
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


# Signals come to a main thread that waits for ever outside of Python.
HANGS = """
import ctypes, os, signal, threading
from packtrain.training import interrupts

interrupts._GRACE = 0.2
library, lock = ctypes.CDLL(None), ctypes.create_string_buffer(64)
with interrupts.Interrupts() as taken:
    taken.on_first = lambda: print("heard", flush=True)
    library.pthread_mutex_lock(lock)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    library.pthread_mutex_lock(lock)
"""


def test_a_step_that_hangs_ends_with_the_second_signal() -> None:
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert done.stdout == "heard\n", "the first one came to whoever has to know"
    assert "ended by a second SIGINT: the current step neither finished" in done.stderr


def test_in_another_thread_there_are_no_handlers() -> None:
    seen = []

    def run() -> None:
        with Interrupts() as interrupts:
            seen.append(interrupts.asked)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]
