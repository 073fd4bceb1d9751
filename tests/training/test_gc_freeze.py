"""Objects that live as long as a run are set aside after its first steps, and given back however it ends."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from small_run import dataset, trainer_of

from packtrain.training import callbacks
from packtrain.training.callbacks import FreezeObjects, freeze_objects

pytestmark = pytest.mark.usefixtures("unfreezing")


def test_what_is_set_aside_is_given_back() -> None:
    def fail() -> None:
        with FreezeObjects():
            freeze_objects()
            assert gc.get_freeze_count() > 1000
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.get_freeze_count() == 0


def test_a_run_sets_aside_after_its_first_and_tenth_step(monkeypatch: pytest.MonkeyPatch) -> None:
    at: list[int] = []
    run = FreezeObjects()
    monkeypatch.setattr(callbacks, "freeze_objects", lambda: at.append(run._steps))
    for _ in range(2):  # every call of `train` counts again
        with run:
            for _ in range(12):
                run.on_step_end()
    assert at == [1, 10, 1, 10]


def test_the_trainer_does_it(tmp_path: Path) -> None:
    frozen: list[int] = []
    trainer = trainer_of(dataset(), tmp_path)
    stepped = trainer._freeze.on_step_end

    def watch(*args: object, **values: object) -> None:
        stepped(*args, **values)
        frozen.append(gc.get_freeze_count())

    trainer._freeze.on_step_end = watch  # type: ignore[method-assign]
    trainer.train()
    assert frozen[0] > 1000
    assert gc.get_freeze_count() == 0
