"""What a run is expected to need is known before its first step, and said where the GPU has less."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packtrain.app.train.forecast import (
    batch_rows,
    disk_warning,
    heaviest,
    memory_warning,
    model_prediction,
    predict_run,
)
from packtrain.app.train.prepare import Prepared, prepare
from packtrain.app.train.resolve import resolve_run
from packtrain.app.train.trainer_arguments import accepted_arguments, course_notes, make_arguments, make_course
from packtrain.config.run_config import RunConfig, with_overrides
from packtrain.core.errors import ConfigError
from packtrain.packing.schedule import EMPTY_PACK
from packtrain.predicting.host_memory import PROCESS_BYTES
from packtrain.predicting.memory import estimate_memory
from packtrain.records.synthetic import write_dataset
from packtrain.training.predictions import ModelPrediction

H200 = "NVIDIA H200"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("expected")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKTRAIN_CACHE", str(folder / "cache"))
        return made(folder)


@pytest.fixture
def padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> Prepared:
    """Two epochs; rows of a step do not always fill its batches of three."""
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path / "cache"))
    size = (f"training.effective_batch_size={steps}", "training.per_device_train_batch_size=3")
    return made(tmp_path, "data.packing=false", "training.num_train_epochs=2", *size)


def made(folder: Path, *overrides: str) -> Prepared:
    data = {"dataset_path": str(write_dataset(folder, pictures=24)), "packing_length": 1024, "max_failure_rate": 0.5}
    training = {"output_dir": str(folder / "run")}
    config = RunConfig.of({"model": {"model_name_or_path": "tiny:qwen3_vl"}, "data": data, "training": training})
    return prepare(resolve_run(config, world_size=1, overrides=overrides))


def on(prepared: Prepared, *, compiled: bool, memory: int | None = None) -> ModelPrediction:
    found = model_prediction(prepared, gpu=H200, attention="varlen", compiled=compiled, bf16=True)
    assert found is not None
    assert found.gpu is not None
    return found if memory is None else replace(found, gpu=replace(found.gpu, memory_bytes=memory))


def test_nothing_is_said_where_everything_fits(small: Prepared) -> None:
    found = predict_run(small, on(small, compiled=True))
    assert found is not None
    assert found.memory_bytes < found.gpu_bytes
    busy = predict_run(small, on(small, compiled=True), workers=4)
    assert busy is not None
    assert busy.host_bytes - found.host_bytes > 4 * PROCESS_BYTES, "each worker is a process, with its batches"
    assert memory_warning(found, small) == ()
    assert predict_run(small, None) is None
    assert memory_warning(None, small) == ()


def test_the_length_that_is_named_fits(small: Prepared) -> None:
    machine = on(small, compiled=True)
    worst = heaviest(small, machine)
    needed = estimate_memory(machine.shape, machine.setup, worst, machine.memory).total
    fixed = estimate_memory(machine.shape, machine.setup, replace(worst, tokens=1, longest=1), machine.memory).states
    tight = on(small, compiled=True, memory=needed - (needed - fixed) // 100)
    found = predict_run(small, tight)
    assert found is not None
    (said,) = memory_warning(found, small)
    assert "packing_length of at most" in said
    assert 0 < found.fitting_tokens < worst.tokens
    (none,) = memory_warning(predict_run(small, on(small, compiled=True, memory=1)), small)
    assert "no batch would fit" in none


def test_a_disk_that_is_too_small_is_said(small: Prepared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine = on(small, compiled=False)
    args = make_arguments(small)
    args.save_steps = 100
    course = make_course(args, small.run, steps=900, epochs=1.0, trained=["language"], dtype="float32")
    assert (course.kept, course.saved_times) == (2, 9)
    assert disk_warning(course, machine, tmp_path / "new") == ()
    free = SimpleNamespace(free=12 << 20)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    (said,) = disk_warning(course, machine, tmp_path / "new")
    assert "2 kept and one being written" in said
    assert "where 12.0 MiB are free" in said
    free.free = 1 << 20
    with pytest.raises(ConfigError, match=r"(?s)where 1.0 MiB are free.*for the first checkpoint"):
        disk_warning(course, machine, tmp_path / "new")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("save_steps=2", ""),
        ("save_steps=10", "save_steps 10 is beyond the run's 9 steps"),
        ("save_delay_steps=10", "no checkpoint is saved"),
        ("save_delay_steps=10 save_steps=20", "no checkpoint is saved"),
        ("eval_steps=2", ""),
        ("eval_steps=10", "evaluation runs at the end only"),
        ("eval_steps=2 eval_delay=10", "evaluation never runs"),
        ("num_train_epochs=9.9", ""),
        ("num_train_epochs=1230", "every sample is trained on 1,230 times"),
        ("warmup_steps=9", "the warm-up of 9 steps is longer than the run"),
    ],
)
def test_what_lies_beyond_the_end_is_said(given: str, words: str) -> None:
    run = resolve_run(load_config_of(given))
    args = accepted_arguments({**run.arguments, "output_dir": "none", "use_cpu": True}, given=())
    epochs = run.length.epochs or 1.0
    course = make_course(args, run, steps=9, epochs=epochs, trained=[], dtype="float32")
    notes = course_notes(args, run, steps=9, epochs=epochs)
    assert words in " ".join(notes)
    assert len(notes) == bool(words)
    saved = {"save_steps=2": "every 2 steps and at the end", "save_delay_steps=10": "none (save_delay_steps: 10)"}
    assert course.saves.startswith(saved.get(given.split()[0], "one, at the end"))


def load_config_of(given: str) -> RunConfig:
    data = {"dataset_path": "a.jsonl", **({"eval_path": "b.jsonl"} if given.startswith("eval") else {})}
    return with_overrides(
        RunConfig.of({"model": {"model_name_or_path": "tiny:llama"}, "data": data}),
        [f"training.{one}" for one in given.split()],
    )


def test_compiled_rows_are_as_long_as_packs_may_be(small: Prepared) -> None:
    assert heaviest(small, on(small, compiled=True)).tokens == 1024
    assert heaviest(small, on(small, compiled=False)).tokens <= 1024


@pytest.mark.parametrize("steps", [7])
def test_batches_are_those_that_processes_get(padded: Prepared) -> None:
    schedule = padded.dataset.schedule
    for world_size, epoch in product((1, 2), (0, 1)):
        steps = range(schedule.num_steps(epoch))
        places = np.concatenate([schedule.micro_batches(epoch, step, world_size, rows_per_batch=3) for step in steps])
        real = {frozenset(batch[batch != EMPTY_PACK].tolist()) for batch in places.reshape(-1, 3)} - {frozenset()}
        order, starts = batch_rows(schedule, 3, epoch)
        assert {frozenset(batch.tolist()) for batch in np.split(order, starts[1:])} == real


@pytest.mark.parametrize("steps", [7, 9])
def test_no_batch_of_the_run_has_more_than_is_expected(padded: Prepared) -> None:
    worst = heaviest(padded, on(padded, compiled=False))
    seen = [batch.info for batch in padded.dataset.loader(span="run", num_workers=0)]
    assert len({info.keys[0].epoch for info in seen}) == 2

    def most(of: Any) -> int:
        return max(of(info) for info in seen)

    assert worst.tokens == most(lambda info: info.tokens + info.padding)
    assert worst.samples == most(lambda info: info.samples) == 3
    for name in ("supervised_tokens", "vision_tokens", "patches", "images"):
        assert getattr(worst, name) == most(lambda info, name=name: getattr(info, name)), name
