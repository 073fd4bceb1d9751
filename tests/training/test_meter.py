"""The meter: the numbers of a step follow from what its ranks did, whoever did it and however it was divided."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from packtrain.core.errors import ArtifactError
from packtrain.delivery.collate.batch_values import BatchInfo
from packtrain.delivery.encode.encoded_sample import PackKey
from packtrain.families.shape import LanguageShape, VisionShape
from packtrain.predicting.flops import training_flops
from packtrain.predicting.gpus import find_gpu
from packtrain.predicting.memory import estimate_memory
from packtrain.predicting.time import step_time
from packtrain.predicting.values import Load, ModelShape, ParameterCounts, TrainingSetup
from packtrain.runs.step_metrics import StepMetrics
from packtrain.training.meter import StepMeter
from packtrain.training.predictions import ModelPrediction, batch_load, useful_load
from packtrain.training.stopwatch import (
    BackwardEnd,
    GpuMemory,
    GpuStopwatch,
    Memory,
    Stopwatch,
    device_memory,
    stopwatch,
)

sys.path.append(str(Path(__file__).parents[1] / "delivery"))
from processes import run_ranks

SHAPE = ModelShape(
    model_type="made",
    language=LanguageShape(
        hidden=64, layers=4, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocabulary=500, tied=True,
        context_length=4096,
    ),
    vision=VisionShape(
        hidden=32, layers=2, heads=2, intermediate=64, gated=False, patch_elements=588, full_attention_layers=2,
        patches_per_token=4,
    ),
    parameters=ParameterCounts(embedding=32_000, layers=150_000, head=0, vision=40_000),
    counted_from="config",
)  # fmt: skip
SETUP = TrainingSetup(gradient_checkpointing=False)
PEAK = 1e9
MODEL = ModelPrediction(shape=SHAPE, setup=SETUP, gpu=replace(find_gpu("h200"), bf16_flops=PEAK))


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Gpu(Memory):
    """Memory that a test fills."""

    def __init__(self) -> None:
        self.held = 0

    def restart(self) -> None:
        self.held = 0

    def peak(self) -> int:
        return self.held

    def limit(self) -> int:
        return 1000


def batch(*lengths: int, padding: int = 0, images: int = 0, patches: int | None = 0, rows: int = 1) -> BatchInfo:
    keys = tuple(PackKey(epoch=0, pack=row, step=0, last=False) for row in range(rows))
    return BatchInfo(
        keys=keys,
        ids=tuple(f"s{number}" for number in range(len(lengths))),
        lengths=lengths,
        tokens=sum(lengths),
        padding=padding,
        squared_tokens=sum(length * length for length in lengths),
        supervised_tokens=sum(lengths) // 2,
        images=images,
        patches=patches,
    )


BATCHES = (batch(60, 30, padding=10, images=2, patches=32), batch(80, padding=20, images=1, patches=16))
EMPTY = BatchInfo(padding=8)


def measured(*batches: BatchInfo, seconds: float = 2.0, wait: float = 0.25, **options: Any) -> StepMetrics:
    clock = Clock()
    meter = StepMeter(watch=Stopwatch(clock), **options)
    meter.begin()
    for info in batches:
        meter.add_batch(info, wait)
    clock.now += seconds
    return end(meter)


def end(meter: StepMeter, step: int = 1, loss: Any = 1.5) -> StepMetrics:
    return meter.end(step=step, epoch=0.5, loss=loss, grad_norm=torch.tensor(0.5), learning_rates={"language": 1e-4})


def test_what_a_step_was() -> None:
    gpu = Gpu()
    found = measured(*BATCHES, EMPTY, capacity=100, memory=gpu)
    assert (found.step, found.epoch, found.loss, found.grad_norm) == (1, 0.5, 1.5, 0.5)
    assert (found.batches, found.samples, found.tokens, found.images, found.patches) == (2, 3, 170, 3, 48)
    assert (found.seq_len_avg, found.seq_len_min, found.seq_len_max) == (85.0, 80, 90)  # without the empty batch
    assert found.fill == 0.85
    assert found.padding_share == 38 / 208  # with it: those positions were computed
    assert (found.step_seconds, found.tokens_per_second, found.samples_per_second) == (2.0, 85.0, 1.5)
    assert (found.images_per_second, found.patches_per_second) == (1.5, 24.0)
    assert (found.data_wait_seconds, found.data_wait_share) == (0.75, 0.375)
    assert (found.rank_seconds, found.spread) == ((2.0,), 1.0)
    assert (found.samples_seen, found.tokens_seen) == (3, 170)
    assert (found.mfu, found.work_spread, found.predicted_seconds, found.predicted_memory_bytes) == (None,) * 4
    shown = replace(BATCHES[0], videos=2, frames=16)
    assert [(one.videos, one.frames) for one in (found, measured(shown, shown))] == [(0, 0), (4, 32)]


def test_without_a_capacity_fill_is_what_is_no_padding() -> None:
    assert measured(*BATCHES).fill == 170 / 200


def test_utilisation_counts_language_vision_and_attention_of_real_samples_only() -> None:
    found = measured(*BATCHES, model=MODEL)
    flops = [training_flops(SHAPE, SETUP, useful_load(info)) for info in BATCHES]
    assert all(one.language and one.attention and one.vision and one.vision_attention for one in flops)
    assert found.flops == pytest.approx(sum(one.total for one in flops))
    assert found.mfu == pytest.approx(sum(one.total for one in flops) / (2.0 * PEAK))
    padded = batch(60, 30, padding=5000, images=2, patches=32)
    assert measured(padded, BATCHES[1], model=MODEL).mfu == found.mfu
    more = batch(60, 30, images=2, patches=64)
    assert (measured(more, BATCHES[1], model=MODEL).mfu or 0) > (found.mfu or 0)


def test_patches_that_nobody_counted_are_not_known() -> None:
    found = measured(batch(60, images=1, patches=None), BATCHES[0], model=MODEL)
    assert (found.patches, found.patches_per_second, found.flops, found.mfu) == (None,) * 4
    assert found.images == 3


def test_padding_is_a_load_too() -> None:
    packed, rows = batch(60, 30, padding=10), batch_load(batch(60, 30, padding=30, rows=2))
    assert (useful_load(packed).tokens, useful_load(packed).squared_tokens) == (90, 4500)
    assert (batch_load(packed).tokens, batch_load(packed).squared_tokens) == (100, 4600)  # a segment of its own
    assert (rows.tokens, rows.squared_tokens, rows.rows) == (120, 2 * 60**2, 2)  # as plans count it


def test_predictions_stand_beside_what_was_measured() -> None:
    gpu = find_gpu("h200")
    predicted = ModelPrediction(shape=SHAPE, setup=SETUP, gpu=gpu)
    same = [BATCHES[0]] * 3
    found = measured(*same, model=predicted)
    load = batch_load(BATCHES[0])
    assert found.predicted_seconds == pytest.approx(step_time(SHAPE, SETUP, load, gpu, micro_batches=3).seconds)
    estimate = estimate_memory(SHAPE, SETUP, load)
    assert found.predicted_memory_bytes == estimate.total - estimate.part("framework").bytes
    large, small = Load(tokens=900, squared_tokens=900**2, longest=900), Load(tokens=100, squared_tokens=100, longest=9)
    assert predicted.seconds([large, small]) == pytest.approx(
        sum(predicted.seconds([one, one]) for one in (large, small)) / 2
    )
    assert predicted.memory_bytes([large, small]) == predicted.memory_bytes([large])


def test_memory_is_that_of_each_step() -> None:
    gpu = Gpu()
    meter = StepMeter(watch=Stopwatch(Clock()), memory=gpu)
    peaks = []
    for step, held in enumerate((700, 300), start=1):
        meter.begin()
        gpu.held = held
        peaks.append(end(meter, step))
    assert [(one.memory_bytes, one.memory_limit, one.memory_share) for one in peaks] == [
        (700, 1000, 0.7),
        (300, 1000, 0.3),
    ]


def test_what_lies_between_steps_belongs_to_none() -> None:
    clock = Clock()
    meter = StepMeter(watch=Stopwatch(clock))
    found = []
    for step in (1, 2):
        meter.begin()
        meter.add_batch(BATCHES[0], 0.1)
        clock.now += 3.0
        found.append(end(meter, step))
        clock.now += 50.0  # evaluating, saving
    assert [one.step_seconds for one in found] == [3.0, 3.0]
    assert [one.samples_seen for one in found] == [2, 4]


def test_what_was_seen_goes_on_after_a_restart() -> None:
    meter = StepMeter()
    for step in (1, 2, 3):
        meter.add_batch(BATCHES[0], 0.0)
        state, last = meter.state_dict(), end(meter, step)
    again = StepMeter()
    again.load_state_dict(state)
    again.add_batch(BATCHES[0], 0.0)
    resumed = end(again, 3)
    assert (resumed.samples_seen, resumed.tokens_seen) == (last.samples_seen, last.tokens_seen) == (6, 270)
    with pytest.raises(ArtifactError, match="samples_seen"):
        again.load_state_dict({"version": 1, "samples_seen": -1, "tokens_seen": 0})


def test_a_step_without_anything_has_numbers() -> None:
    found = measured(EMPTY, seconds=0.0, wait=0.0, model=MODEL)
    assert (found.tokens, found.fill, found.tokens_per_second, found.seq_len_min, found.mfu) == (0, 0.0, 0.0, 0, 0.0)
    assert math.isfinite(found.spread)


@pytest.mark.contract
def test_the_own_work_of_a_rank_ends_with_its_backward_pass() -> None:
    clock = Clock()
    meter = StepMeter(watch=Stopwatch(clock))
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    meter.attach(model)
    for step in (1, 2, 3):
        meter.begin()
        loss = model(torch.ones(1, 4)).sum()
        clock.now += 2.0
        loss.backward()
        clock.now += 5.0  # the others, the optimizer
        found = end(meter, step, loss.detach())
        assert (found.rank_seconds, found.step_seconds) == ((2.0,), 7.0)


@pytest.mark.contract
def test_nothing_is_left_on_a_model_that_is_no_longer_measured() -> None:
    model = nn.Linear(4, 4)
    meter, other = StepMeter(), StepMeter()
    meter.attach(model)
    other.attach(model)
    assert [len(weight._post_accumulate_grad_hooks) for weight in model.parameters()] == [2, 2]
    meter.detach()
    meter.detach()
    assert [len(weight._post_accumulate_grad_hooks) for weight in model.parameters()] == [1, 1]


def test_time_and_memory_are_those_of_the_device_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a run on the host has no business with the GPU")

    # A machine with a GPU, on which a run is told to use the host.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    for name in ("Event", "synchronize", "reset_peak_memory_stats", "max_memory_allocated", "mem_get_info"):
        monkeypatch.setattr(f"torch.cuda.{name}", never)
    meter = StepMeter()
    meter.attach(nn.Linear(2, 2), torch.device("cpu"))
    meter.add_batch(BATCHES[0], 0.0)
    assert end(meter, 1).memory_bytes is None
    gpu = torch.device("cuda", 1)
    assert isinstance(stopwatch(gpu), GpuStopwatch)
    assert isinstance(device_memory(gpu), GpuMemory)
    with pytest.raises(AssertionError, match="no business"):
        StepMeter().attach(nn.Linear(2, 2), gpu)
    with pytest.raises(AssertionError, match="no business"):
        StepMeter(device=gpu)


@pytest.mark.contract
def test_only_the_last_gradients_keep_their_hooks() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)])
    came: list[int] = []
    end_of = BackwardEnd(model, lambda: came.append(1))
    counts = []
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        end_of.keep_last()
        counts.append(len(came))
        came.clear()
    assert counts == [12, 4, 4]
    model[0](torch.ones(1, 4)).sum().backward()
    assert len(came) == 2, "the first layer's gradients come last"
    came.clear()
    end_of.close()
    model(torch.ones(1, 4)).sum().backward()
    assert came == []


def check_step_of_two(first: StepMetrics) -> None:
    """Rank 0 had the first batch for a second, rank 1 the second one for two."""
    alone = measured(*BATCHES, model=MODEL)
    for name in ("batches", "samples", "tokens", "images", "patches", "seq_len_avg", "seq_len_min", "seq_len_max"):
        assert getattr(first, name) == getattr(alone, name), name
    assert (first.fill, first.padding_share, first.flops) == (alone.fill, alone.padding_share, alone.flops)
    assert (first.loss, first.rank_seconds, first.step_seconds, first.slowest_rank) == (1.5, (1.0, 2.0), 2.0, 1)
    assert first.spread == pytest.approx(4 / 3)
    assert first.work_spread is not None
    assert first.work_spread > 1
    assert first.data_wait_seconds == 0.2
    assert first.mfu == pytest.approx((alone.flops or 0) / (2 * 2.0 * PEAK))


def share_of(rank: int, meeting: list[Any], **options: Any) -> StepMetrics:
    """A rank's step, with a list for a network; complete on the last rank to come."""

    class Listed(StepMeter):
        def _gather(self, mine: Any) -> list[Any]:
            meeting.append(mine)
            return meeting

    clock = Clock()
    meter = Listed(model=MODEL, world_size=2, rank=rank, watch=Stopwatch(clock), **options)
    meter.add_batch(BATCHES[rank], 0.1 * (rank + 1))
    clock.now += 1.0 + rank
    return end(meter, 1, torch.tensor(1.0 + rank))


def test_the_shares_of_two_ranks_make_one_step() -> None:
    meeting: list[Any] = []
    share_of(0, meeting)
    check_step_of_two(share_of(1, meeting))


def test_memory_is_that_of_the_fullest_rank() -> None:
    class Full(Gpu):
        def restart(self) -> None:
            self.held = 900

    meeting: list[Any] = []
    share_of(0, meeting, memory=Full())
    assert share_of(1, meeting, memory=Gpu()).memory_bytes == 900


# ---- two ranks, one start of processes for all checks


def on_rank(rank: int, world_size: int, shared: str) -> tuple[StepMetrics, StepMetrics, bool]:
    """One step over half of the batches, and one of DDP in which rank 1 waits until rank 0 is done with its work."""
    clock = Clock()
    meter = StepMeter(model=MODEL, world_size=world_size, rank=rank, watch=Stopwatch(clock))
    meter.add_batch(BATCHES[rank], 0.1 * (rank + 1))
    clock.now += 1.0 + rank
    first = end(meter, 1, torch.tensor(1.0 + rank))
    meter.load_state_dict({"version": 1, "samples_seen": 10, "tokens_seen": 100})

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    meter.attach(model)
    sign, waited = Path(shared), False
    plain = meter.done

    def done_and_told() -> None:
        plain()
        if rank == 0:
            sign.touch()

    meter._backward._on_end = done_and_told  # type: ignore[union-attr]
    meter.begin()
    loss = model(torch.ones(1, 4)).sum()
    if rank == 1:  # were a rank only done once it had heard from the others, both would wait for ever
        deadline = time.monotonic() + 60
        while not sign.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        waited = sign.exists()
        clock.now += 4.0
    loss.backward()
    clock.now += 8.0 if rank == 0 else 4.0
    return first, end(meter, 2, loss.detach()), waited


@pytest.mark.full
@pytest.mark.contract
def test_two_ranks_make_one_step(tmp_path: Path) -> None:
    answers = run_ranks(2, on_rank, 2, str(tmp_path / "sign"), folder=tmp_path)
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    (first, second, _), (other, _, waited) = answers
    assert first == other, "ranks disagree"
    check_step_of_two(first)
    assert waited, "rank 0 was not done before it had heard from rank 1"
    assert (second.rank_seconds, second.step_seconds) == ((0.0, 4.0), 8.0)
    assert (second.samples_seen, second.tokens_seen) == (10, 100)


def test_ranks_agree_on_the_order_of_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[float]] = []

    def all_gather(parts: list[torch.Tensor], vector: torch.Tensor, group: object) -> None:
        sent.append(vector.tolist())
        for part in parts:
            part.copy_(vector)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo")
    meter = StepMeter(world_size=2)
    assert meter._gather({"tokens": 1.0, "images": 2.0})[1] == {"tokens": 1.0, "images": 2.0}
    meter._gather({"images": 2.0, "tokens": 1.0})
    assert sent[0] == sent[1], "sets of names are in another order in every process"


def test_nothing_here_needs_transformers() -> None:
    code = """
import sys
import packtrain.runs.metrics_log, packtrain.training.monitors, packtrain.training.progress
assert "torch" not in sys.modules
import packtrain.training.meter
assert "torch" in sys.modules and not {"transformers", "accelerate", "peft"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_alone_no_group_is_needed() -> None:
    assert not dist.is_initialized()
    assert measured(*BATCHES).samples == 3
