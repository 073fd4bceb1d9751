"""Out of memory ends a run with an error that names the pack and what would have fitted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import dataset, model_of, shared, trainer_of

from packtrain.core.errors import MemoryLimitError
from packtrain.delivery.collate.batch_values import BatchInfo
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.families.model_folder import resolve_model
from packtrain.packing.schedule import EMPTY_PACK
from packtrain.predicting.gpus import find_gpu
from packtrain.predicting.memory import estimate_memory
from packtrain.predicting.shapes import read_shape
from packtrain.predicting.values import TrainingSetup
from packtrain.training.meter import StepMeter, Stopwatch
from packtrain.training.predictions import (
    DeviceMemory,
    Failure,
    ModelPrediction,
    batch_load,
    explain,
    is_memory_error,
    requested_bytes,
)

GIB = 2**30
BATCH = BatchInfo(
    keys=(PackKey(epoch=1, pack=33),),
    ids=tuple(f"id{number}" for number in range(12)),
    lengths=(500,) * 12,
    tokens=6000,
    padding=400,
    supervised_tokens=3000,
    vision_tokens=800,
    images=4,
    patches=3200,
)


def failure(**given: Any) -> Failure:
    return Failure(**{"rank": 1, "step": 12, "doing": "forward and backward", "batch": BATCH, **given})


def oom(text: str = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ...") -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(text)


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (oom(), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory of the user"), False),
    ],
)
def test_which_errors_are_meant(error: Exception, wanted: bool) -> None:
    assert is_memory_error(error) is wanted


def test_everything_is_said() -> None:
    memory = DeviceMemory(free=2 * GIB, total=80 * GIB, reserved=70 * GIB, before=30 * GIB)
    found = explain(oom(), failure(), memory)
    assert isinstance(found, MemoryLimitError)
    assert found.exit_code == 1
    first, text = str(found).splitlines()[0], str(found)
    assert first == "rank 1, step 12: out of memory in forward and backward, epoch 1, pack 33"
    for words in (
        "6,000 tokens and 400 padding tokens",
        "3,200 patches",
        "4 images",
        "id0",
        "and 4 more",
        "2.0 GiB of 80.0 GiB free",
    ):
        assert words in text


def test_in_proportion_to_what_was_asked_for() -> None:
    # 42 GiB are there for the data of a step; this one held 40 and asked for 20 more.
    memory = DeviceMemory(free=2 * GIB, total=80 * GIB, reserved=70 * GIB, before=30 * GIB)
    text = str(explain(oom(), failure(), memory))
    tokens = 6400 * 42 // 60 // 64 * 64
    assert f"packing_length of at most {tokens:,} (in proportion" in text
    assert f"max_patches_per_pack of at most {3200 * tokens // 6400:,}" in text


def test_by_the_memory_model() -> None:
    shape = read_shape(resolve_model("tiny:qwen3_vl", shared() / "models"))
    setup = TrainingSetup(weights_dtype="fp32")
    live = ModelPrediction(shape=shape, setup=setup, gpu=find_gpu("h200"))
    needed = live.memory_bytes([batch_load(BATCH)])  # what the meter expects of this batch, without the framework
    limit = needed + estimate_memory(shape, setup, batch_load(BATCH)).part("framework").bytes - 1
    found = explain(oom(), failure(), DeviceMemory(free=limit, total=limit), ModelPrediction(shape=shape, setup=setup))
    assert "by the memory model" in found.fix
    length = int(found.fix.split("at most ")[1].split(" ")[0].replace(",", ""))
    assert 0 < length < 6400


def test_the_advice_and_the_live_prediction_see_one_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that one of them left out would name a length that the other knows to be too long."""
    seen: dict[str, Any] = {}
    shape = read_shape(resolve_model("tiny:qwen3_vl", shared()))
    model = ModelPrediction(shape=shape, setup=TrainingSetup(), gpu=find_gpu("h200"))
    monkeypatch.setattr(ModelPrediction, "memory_bytes", lambda _, loads: seen.setdefault("live", loads[0]).tokens)
    monkeypatch.setattr(ModelPrediction, "fitting", lambda _, load, usable: seen.setdefault("advice", load).tokens)
    meter = StepMeter(watch=Stopwatch(), model=model)
    meter.begin()
    meter.add_batch(BATCH, 0.0)
    meter.end(step=1, epoch=0.5, loss=1.5, grad_norm=None, learning_rates={})
    explain(oom(), failure(), DeviceMemory(free=GIB, total=GIB), model)
    assert seen["live"] == seen["advice"]
    counts = ("tokens", "supervised_tokens", "vision_tokens", "patches", "images")
    assert [getattr(seen["live"], name) for name in counts] == [6400, 3000, 800, 3200, 4]


def test_the_length_that_is_named_fits_every_pack_of_the_plan() -> None:
    shape = read_shape(resolve_model("tiny:qwen3_vl", shared() / "models"))
    setup = TrainingSetup(weights_dtype="fp32")
    own = batch_load(BATCH)
    heavy = replace(own, patches=10 * own.patches, squared_patches=100 * own.squared_patches)
    limit = estimate_memory(shape, setup, own).total * 49 // 50
    found = explain(
        oom(),
        failure(),
        DeviceMemory(free=limit, total=limit),
        ModelPrediction(shape=shape, setup=setup, heaviest=heavy),
    )
    assert "the heaviest pack of the plan" in found.fix
    length = int(found.fix.split("at most ")[1].split(" ")[0].replace(",", ""))
    sums = ("tokens", "squared_tokens", "supervised_tokens", "vision_tokens", "patches", "squared_patches")
    fewer = {name: getattr(heavy, name) * length // heavy.tokens for name in sums}
    patches = int(found.fix.split("max_patches_per_pack of at most ")[1].split(";")[0].replace(",", ""))
    assert patches == pytest.approx(fewer["patches"], rel=0.1), "of the pack that the length is for"
    assert 0 < estimate_memory(shape, setup, replace(heavy, **fewer)).total <= limit


def test_padded_batches_get_fewer_rows_and_not_a_longer_length() -> None:
    shape = read_shape(resolve_model("tiny:qwen3_vl", shared() / "models"))
    setup = TrainingSetup(weights_dtype="fp32", attn_implementation="sdpa")
    lengths = (16_000, *(8000,) * 7)
    rows = BatchInfo(
        keys=tuple(PackKey(epoch=0, pack=number) for number in range(8)),
        ids=tuple("abcdefgh"),
        lengths=lengths,
        tokens=sum(lengths),
        padding=8 * 16_000 - sum(lengths),
        supervised_tokens=8000,
    )
    load = batch_load(rows)
    assert (load.rows, load.tokens, load.squared_tokens) == (8, 8 * 16_000, 8 * 16_000**2)
    limit = estimate_memory(shape, setup, load).total * 7 // 10
    model = ModelPrediction(shape=shape, setup=setup, heaviest=load)
    fix = explain(oom(), failure(batch=rows, capacity=32_000), DeviceMemory(free=limit, total=limit), model).fix
    assert "packing_length" not in fix
    fewer = int(fix.split("at most ")[1].split(" ")[0])
    assert 1 <= fewer < 8
    smaller = replace(load, rows=fewer, samples=fewer, tokens=fewer * 16_000, squared_tokens=fewer * 16_000**2)
    assert estimate_memory(shape, setup, smaller).total <= limit


def test_no_length_is_named_that_is_not_shorter() -> None:
    room = DeviceMemory(free=2 * GIB, total=80 * GIB, reserved=70 * GIB, before=30 * GIB)
    fix = explain(oom(), failure(capacity=2000), room).fix  # its padding counts in the batch, not in the length
    assert int(fix.split("at most ")[1].split(" ")[0].replace(",", "")) < 2000


@pytest.mark.parametrize(
    ("fitted", "words"), [(3000, "2,944 (the largest batch"), (0, "4,800 (a guess"), (9000, "a guess")]
)
def test_where_nothing_is_known_about_the_device(fitted: int, words: str) -> None:
    assert words in explain(oom("no numbers"), failure(fitted=fitted), DeviceMemory()).fix


def test_before_and_without_packs() -> None:
    assert "no pack would have fitted" in explain(oom(), failure(batch=BatchInfo()), DeviceMemory()).fix
    empty = BatchInfo(keys=(PackKey(epoch=0, pack=EMPTY_PACK),), padding=8)
    assert "an empty pack" in str(explain(oom(), failure(batch=empty), DeviceMemory()))


def test_what_was_asked_for() -> None:
    assert requested_bytes(oom()) == 20 * GIB
    assert requested_bytes(oom("Tried to allocate 512.00 MiB")) == 512 * 2**20
    assert requested_bytes(oom("nothing")) == 0


# ---- planted in a run


def small_memory(model: Any, tokens: int) -> Any:
    """A model that runs out of memory on longer batches."""

    def forward(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs["input_ids"].numel() > tokens:
            raise oom()

    model.register_forward_pre_hook(forward, with_kwargs=True)
    return model


def test_a_pack_that_does_not_fit_ends_the_run_with_its_name(tmp_path: Path) -> None:
    data = dataset()
    lengths = sorted(data.plan.epoch(0).load("tokens").tolist())
    limit = lengths[-1] - 1
    trainer = trainer_of(data, tmp_path, small_memory(model_of(), limit), save_strategy="no")
    with pytest.raises(MemoryLimitError) as caught:
        trainer.train()
    error = caught.value
    assert f"{lengths[-1]:,} tokens" in str(error)
    assert "rank 0, step" in error.where
    pack = int(error.where.rsplit(" ", 1)[1])
    epoch = 0 if "epoch 0" in error.where else 1
    assert data.plan.epoch(epoch).load("tokens")[pack] > limit, "it names the pack"
    assert "packing_length of at most" in error.fix
    assert "instead of 128" in error.fix
    assert len(trainer.trained) > 1
    assert "the largest batch that has fitted so far" in error.fix


def test_an_error_of_another_kind_stays_what_it_is(tmp_path: Path) -> None:
    model = model_of()

    def fail(*_: Any) -> None:
        raise RuntimeError("shapes do not match")

    model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trainer_of(dataset(), tmp_path, model, save_strategy="no").train()


def test_in_the_step_of_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(dataset(), tmp_path, save_strategy="no")

    def step(*_: Any, **__: Any) -> None:
        raise oom()

    monkeypatch.setattr("torch.optim.AdamW.step", step)
    with pytest.raises(MemoryLimitError, match="in the optimizer's step"):
        trainer.train()


def test_in_evaluation(tmp_path: Path) -> None:
    data = dataset(packing_length=4096, packs_per_step=1, epochs=1)
    longest = int(dataset().plan.epoch(0).load("tokens").max())
    parts = {"eval_dataset": data}
    trainer = trainer_of(
        dataset(), tmp_path, small_memory(model_of(), longest + 64), parts=parts, eval_strategy="steps", eval_steps=1
    )
    with pytest.raises(MemoryLimitError, match="step 2: out of memory in evaluation"):
        trainer.train()
