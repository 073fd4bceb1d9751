"""What is chosen, what follows from it, and what is changed when nothing fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from asking import ask
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tables import detection, films

from packtrain.core.errors import ConfigError
from packtrain.planning.choice import (
    MOST_DROPPED,
    acceptable,
    changes_for,
    choose,
    conservative,
    efficient,
    make_room,
)
from packtrain.planning.configs import derive_intervals
from packtrain.planning.question import Baseline
from packtrain.planning.study_values import Simulation
from packtrain.planning.sweep import sweep
from packtrain.predicting.values import Load, TrainingSetup


def simulation(**given: object) -> Simulation:
    """An unremarkable simulation, with some numbers given."""
    usual: dict[str, object] = {
        "packing_length": 8000,
        "limits": {},
        "packs": 100,
        "bound": 100,
        "of_bound": 1.0,
        "fill": 0.99,
        "samples_packed": 10_000,
        "samples_dropped": 0,
        "tokens_dropped": 0,
        "samples_per_pack": 100.0,
        "packs_per_step": 1,
        "samples_per_step": 100.0,
        "micro_batches": 1,
        "steps": 100,
        "worst": Load(tokens=8000, squared_tokens=1, longest=1),
        "memory_bytes": 1 << 30,
        "fits": True,
        "seconds": 1.0,
        "tokens_per_second": 1000.0,
        "speedup": 2.0,
        "fullest": {"tokens": 1.0},
    }
    return Simulation(**{**usual, **given})  # type: ignore[arg-type]


SIMULATIONS = st.lists(
    st.builds(
        lambda length, dropped, fits, speed, moved, memory: simulation(
            packing_length=length,
            samples_dropped=dropped,
            fits=fits,
            tokens_per_second=speed,
            samples_per_step=100 * moved,
            memory_bytes=memory,
        ),
        st.integers(1000, 30_000),
        st.sampled_from([0, 10, 40, 60, 900]),
        st.booleans(),
        st.floats(100, 1000),
        st.sampled_from([0.95, 1.0, 1.08, 1.2, 2.0]),
        st.integers(1, 100),
    ),
    min_size=1,
    max_size=12,
)


@given(SIMULATIONS)
@settings(max_examples=150, deadline=None)
def test_the_choice_is_never_beaten_by_another_that_is_as_good(found: list[Simulation]) -> None:
    chosen, allowed = choose(found, 100).simulation, acceptable(found, 100)
    assert any(chosen is one for one in allowed)
    if any(one.fits for one in allowed):
        assert chosen.fits
    else:
        assert chosen.memory_bytes == min(one.memory_bytes for one in allowed)
        return
    steady = [one for one in allowed if one.fits and abs(one.samples_per_step / 100 - 1) <= 0.1]
    for other in steady:
        more = other.samples_dropped > chosen.samples_dropped  # for a little speed none is given up
        assert other.tokens_per_second <= (1.0633 if more else 1.0102) * chosen.tokens_per_second
        if other.tokens_per_second >= chosen.tokens_per_second and abs(chosen.samples_per_step / 100 - 1) <= 0.1:
            assert chosen.samples_dropped <= other.samples_dropped
    if abs(chosen.samples_per_step / 100 - 1) > 0.1 and steady:
        assert chosen.tokens_per_second > 1.08 * max(one.tokens_per_second for one in steady)


def test_ties_go_to_fewer_dropped_then_to_the_shorter() -> None:
    fast = simulation(packing_length=20_000, tokens_per_second=1005.0, samples_dropped=5)
    kept = simulation(packing_length=24_000, samples_dropped=2)
    short = simulation(packing_length=16_000, samples_dropped=2)
    assert choose([fast, kept, short], 100).simulation == short
    assert choose([fast, kept], 100).simulation == kept
    little = replace(fast, tokens_per_second=1050.0)
    assert choose([little, kept, short], 100).simulation == short, "samples are not given up for a little speed"
    clearly = replace(fast, tokens_per_second=1100.0)
    assert choose([clearly, kept, short], 100).simulation == clearly


def test_the_samples_of_a_step_move_only_for_much_more_speed() -> None:
    steady = simulation(packing_length=16_000)
    moved = simulation(packing_length=8_000, samples_per_step=120.0, tokens_per_second=1080.0)
    assert choose([steady, moved], 100).simulation == steady
    faster = replace(moved, tokens_per_second=1200.0)
    assert choose([steady, faster], 100).simulation == faster
    assert choose([steady, faster], 100, fixed_step=True).simulation == steady, "not the user's"
    assert choose([moved], 100, fixed_step=True).simulation == moved, "nothing else is there"
    far = replace(moved, samples_per_step=140.0, tokens_per_second=5000.0)
    assert choose([steady, far], 100).simulation == steady


def test_speed_does_not_buy_lost_samples() -> None:
    lossy = simulation(tokens_per_second=9000.0, samples_packed=9_000, samples_dropped=1_000)
    careful = simulation(samples_dropped=10, packing_length=16_000)
    assert lossy.dropped_share > MOST_DROPPED > careful.dropped_share
    assert choose([lossy, careful], 100).simulation == careful
    assert choose([lossy], 100).simulation == lossy


def test_alternatives_are_others_and_do_what_they_say() -> None:
    found = [
        simulation(packing_length=8_000, memory_bytes=10, tokens_per_second=900.0),
        simulation(packing_length=16_000, memory_bytes=20, tokens_per_second=1000.0),
        simulation(packing_length=20_000, memory_bytes=25, tokens_per_second=1009.0),
        simulation(packing_length=32_000, memory_bytes=90, tokens_per_second=2000.0, fits=False),
    ]
    chosen = choose(found, 100).simulation
    assert chosen == found[1]
    more, less = efficient(found, chosen), conservative(found, chosen)
    assert more is not None
    assert less is not None
    assert more.simulation == found[2]
    assert "+0.9 %" in more.reason
    assert less.simulation == found[0]
    assert "-10.0 %" in less.reason
    assert efficient(found[:2], found[1]) is None
    assert conservative(found[:1], found[0]) is None


@given(
    st.integers(1, 2000),
    st.integers(1, 5),
    st.integers(16, 4096),
    st.floats(0.2, 5),
    st.integers(200, 100_000),
)
@settings(max_examples=150, deadline=None)
def test_intervals_see_as_many_samples_as_before(
    every: int, saves: int, before: int, factor: float, steps: int
) -> None:
    baseline = Baseline(
        eval_steps=every, save_steps=every * saves, logging_steps=every, learning_rate=1e-4, vit_lr=2e-6
    )
    new = derive_intervals(baseline, before=before, after=before * factor, steps=steps)
    assert new.save_steps % new.eval_steps == 0
    assert new.save_steps == saves * new.eval_steps or saves * new.eval_steps > steps
    assert max(new.save_steps, new.eval_steps) <= steps, "nothing lies beyond the end"
    if not new.moved and every <= steps:
        assert new.eval_steps == max(every, 10), "steps of about as many samples keep their intervals"
    elif every / factor >= 10 and every / factor <= steps:
        assert new.eval_steps * factor == pytest.approx(every, abs=factor)
    assert new.eval_steps >= 10
    assert new.logging_steps >= 1
    assert new.moved == (abs(factor - 1) > 0.05)
    assert new.learning_rate is not None
    assert new.vit_lr is not None
    if new.moved:
        assert new.learning_rate == pytest.approx(1e-4 * factor**0.5, rel=0.01)
        assert new.vit_lr == pytest.approx(2e-6 * factor**0.5, rel=0.01)
    else:
        assert (new.learning_rate, new.vit_lr) == (1e-4, 2e-6)


def test_what_is_not_set_is_proposed_or_left_out() -> None:
    new = derive_intervals(Baseline(), before=128, after=128, steps=1000)
    assert (new.eval_steps, new.save_steps, new.logging_steps) == (250, 250, 10)
    assert (new.learning_rate, new.vit_lr, new.warmup_steps) == (None, None, None)
    tiny = derive_intervals(Baseline(), before=128, after=128, steps=1)
    assert (tiny.eval_steps, tiny.save_steps, tiny.logging_steps) == (1, 1, 1)
    warm = derive_intervals(Baseline(warmup_steps=100, save_delay_steps=50), before=100, after=200, steps=500)
    assert (warm.warmup_steps, warm.save_delay_steps) == (50, 25)


def test_a_baseline_that_contradicts_itself_is_refused() -> None:
    assert Baseline(per_device_train_batch_size=2, effective_batch_size=128).accumulation(4) == 16
    assert Baseline(gradient_accumulation_steps=3).samples_per_step(8) == 48
    assert Baseline(effective_batch_size=4).samples_per_step(8) == 4
    with pytest.raises(ConfigError, match="numbers that agree"):
        Baseline(gradient_accumulation_steps=3, effective_batch_size=128).accumulation(4)
    with pytest.raises(ConfigError, match="eval_steps"):
        Baseline(eval_steps=0)
    with pytest.raises(ConfigError, match="learning_rate"):
        Baseline(learning_rate=2.0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("setup", "gpu"),
    [
        (TrainingSetup(gradient_checkpointing=False, chunked_loss=False), "h100"),
        (TrainingSetup(gpus=4), "l4"),
    ],
    ids=["checkpointing is enough", "states are too large"],
)
def test_room_is_made_with_no_more_than_is_needed(tmp_path: Path, setup: TrainingSetup, gpu: str) -> None:
    question = ask(tmp_path / "t", detection(800), setup=setup, gpu=gpu)
    found = sweep(question, [12_000, 16_000], [], lambda *_: None)
    assert not any(one.fits for one in found)
    room = make_room(question, found)
    assert room.enough
    assert any(question.fits(one.worst, room.setup) for one in found)
    assert room.setup.method == "full"
    changed = [change.parameter for change in room.changes]
    assert len(changed) == len(set(changed)) > 0
    for name in set(changed) - {"chunked_loss"}:  # taking any one back that has a price is too much
        back = replace(room.setup, **{name: getattr(setup, name)})
        assert not any(question.fits(one.worst, back) for one in found), name


def test_videos_get_a_limit_on_patches_before_training_something_else(tmp_path: Path) -> None:
    setup = TrainingSetup(gpus=2, sharding="fsdp")
    question = ask(tmp_path / "t", films(1500), setup=setup, gpu="a100-40")
    found = sweep(question, [24_000], [], lambda *_: None)
    assert not found[0].fits
    room = make_room(question, found)
    assert room.enough
    assert room.setup.method == "full"
    assert room.setup.optimizer == "adamw"
    (limits,) = room.limits
    again = sweep(replace(question, setup=room.setup), [24_000], [limits], lambda *_: None)
    assert again[1].fits
    assert again[1].samples_dropped == 0
    assert again[1].worst.patches <= limits["max_patches_per_pack"] < found[0].worst.patches


@pytest.mark.full
def test_every_length_is_told_its_own_limit_on_patches(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", films(1500), setup=TrainingSetup(gpus=2, sharding="fsdp"), gpu="a100-40")
    lengths = [20_000, 24_000]
    room = make_room(question, sweep(question, lengths, [], lambda *_: None))
    assert len({limits["max_patches_per_pack"] for limits in room.limits}) == len(lengths), "else any would do"
    again = sweep(replace(question, setup=room.setup), lengths, room.limits, lambda *_: None)
    for one in again:
        told = {change.parameter: change for change in changes_for(room, one)}.get("max_patches_per_pack")
        limit = one.limits.get("max_patches_per_pack")
        assert (told is None) == (limit is None)
        if told is not None:
            assert told.packing == f"{limit:,}"
            assert f"{one.packing_length:,}" in told.reason


def test_when_nothing_helps_it_is_said(tmp_path: Path) -> None:
    columns = {"tokens": np.array([400_000, 390_000])}
    question = ask(tmp_path / "t", columns, gpu="t4")
    found = sweep(question, [400_000], [], lambda *_: None)
    room = make_room(question, found)
    assert not room.enough
    assert question.memory_of(found[0].worst, room.setup).total < found[0].memory_bytes
    assert not question.fits(found[0].worst, room.setup)
