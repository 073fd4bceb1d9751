"""The order of packs: steps partition the epoch, do not depend on ranks, and are continued from a saved state."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import WORK, lvis_table, made_plan

from packtrain.core.errors import ArtifactError, ConfigError
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.plan_builder import build_plan
from packtrain.packing.schedule import EMPTY_PACK, LoaderState, Schedule, arrange, evenness

BALANCES: tuple[Any, ...] = ("sorted", "strict", "random", "length")


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> PackPlan:
    """About 135 packs an epoch, two epochs."""
    table = lvis_table(tmp_path_factory.mktemp("costs"), 2_000)
    return build_plan(table, PackingConfig(packing_length=20_000, epochs=2), WORK)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> PackPlan:
    """Windows of about 20 packs."""
    table = lvis_table(tmp_path_factory.mktemp("costs"), 2_000)
    return build_plan(table, PackingConfig(packing_length=20_000, packing_window=300), WORK)


ROWS = st.integers(1, 5)  # of a batch
plans = st.builds(
    lambda tokens, windows: made_plan([{"tokens": tokens, "window": np.sort(windows[: len(tokens)])}]),
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.lists(st.integers(0, 4), min_size=60, max_size=60),
)


@settings(max_examples=60, deadline=None)
@given(plan=plans, size=st.integers(1, 70), seed=st.integers(0, 2**30), balance=st.sampled_from(BALANCES))
def test_steps_partition_the_epoch(plan: PackPlan, size: int, seed: int, balance: Any) -> None:
    schedule = Schedule(plan, packs_per_step=size, seed=seed, balance=balance)
    steps = [schedule.step(0, number).tolist() for number in range(schedule.num_steps(0))]
    assert sorted(pack for step in steps for pack in step) == list(range(plan.epoch(0).num_packs))
    assert all(len(step) == size for step in steps[:-1])
    assert 1 <= len(steps[-1]) <= size
    assert [pack for step in steps for pack in step] == schedule.order(0).tolist()
    again = Schedule(plan, packs_per_step=size, seed=seed, balance=balance)
    assert again.order(0).tolist() == schedule.order(0).tolist()
    for number in (-1, len(steps)):
        with pytest.raises(IndexError):
            schedule.step(0, number)


@settings(max_examples=60, deadline=None)
@given(plan=plans, size=st.integers(1, 40), world_size=st.integers(1, 50), rows=ROWS, balance=st.sampled_from(BALANCES))
def test_micro_batches_hold_each_pack_once_whatever_the_world(
    plan: PackPlan, size: int, world_size: int, rows: int, balance: Any
) -> None:
    schedule = Schedule(plan, packs_per_step=size, balance=balance)
    for number in range(schedule.num_steps(0)):
        found = schedule.micro_batches(0, number, world_size, rows_per_batch=rows)
        together = world_size * rows
        assert found.shape == (-(-size // together), together), "accumulation is the same in every step"
        assert len(found) == schedule.accumulation(world_size, rows)
        found[1::2] = found[1::2, ::-1].copy()  # every other micro-batch runs the other way
        flat = found.ravel()
        packs = len(schedule.step(0, number))
        assert flat[len(flat) - packs :].tolist() == schedule.step(0, number).tolist()
        assert (flat[: len(flat) - packs] == EMPTY_PACK).all(), "the lightest packs are those without neighbours"
        assert EMPTY_PACK < 0


@settings(max_examples=80, deadline=None)
@given(plan=plans, size=st.integers(1, 40), world_size=st.integers(1, 12), rows=ROWS, balance=st.sampled_from(BALANCES))
def test_a_step_goes_on_with_the_micro_batches_it_would_have_had(
    plan: PackPlan, size: int, world_size: int, rows: int, balance: Any
) -> None:
    schedule = Schedule(plan, packs_per_step=size, balance=balance)
    for number in range(schedule.num_steps(0)):
        whole = schedule.micro_batches(0, number, world_size, rows_per_batch=rows)
        for micro_batch in range(len(whole) + 1):
            before = whole[:micro_batch][whole[:micro_batch] != EMPTY_PACK]
            assert set(before) == set(schedule.step(0, number)[: len(before)]), "what is done is a prefix of the step"
            rest = schedule.micro_batches(0, number, world_size, done=len(before), rows_per_batch=rows)
            if len(before):
                assert rest.tolist() == whole[micro_batch:].tolist()
            else:
                assert rest.tolist() == whole.tolist(), "micro-batches without packs are no progress"


@settings(max_examples=200, deadline=None)
@given(
    packs=st.integers(1, 60),
    size=st.integers(1, 40),
    worlds=st.lists(st.tuples(st.integers(1, 12), ROWS), min_size=1, max_size=4),
    data=st.data(),
)
def test_each_pack_is_trained_once_however_often_the_world_changes(
    packs: int, size: int, worlds: list[tuple[int, int]], data: st.DataObject
) -> None:
    schedule = Schedule(made_plan([{"tokens": range(1, packs + 1)}]), packs_per_step=size)
    for number in range(schedule.num_steps(0)):
        trained: list[int] = []
        for world_size, rows in worlds:  # each of them saves after some micro-batch
            rest = schedule.micro_batches(0, number, world_size, done=len(trained), rows_per_batch=rows)
            left = len(schedule.step(0, number)) - len(trained)
            assert len(rest) == (
                -(-left // (world_size * rows)) if trained else schedule.accumulation(world_size, rows)
            )
            taken = rest[: data.draw(st.integers(0, len(rest)))]
            trained += taken[taken != EMPTY_PACK].tolist()
            assert set(trained) == set(schedule.step(0, number)[: len(trained)])
        last = schedule.micro_batches(0, number, worlds[-1][0], done=len(trained), rows_per_batch=worlds[-1][1])
        trained += last[last != EMPTY_PACK].tolist()
        assert sorted(trained) == sorted(schedule.step(0, number).tolist())


@pytest.mark.parametrize("done", [-1, 4])
def test_more_than_a_step_cannot_be_done(done: int) -> None:
    schedule = Schedule(made_plan([{"tokens": [1, 2, 3]}]), packs_per_step=5)
    assert schedule.micro_batches(0, 0, 2, done=3).shape == (0, 2)
    with pytest.raises(IndexError, match=f"{done} packs in a step of 3"):
        schedule.micro_batches(0, 0, 2, done=done)


def test_no_rank_has_the_heaviest_pack_of_every_micro_batch(plan: PackPlan) -> None:
    work = plan.predicted_work(0)
    schedule = Schedule(plan, packs_per_step=16)
    by_turns, one_way = [], []
    for number in range(schedule.num_steps(0) - 1):
        by_turns.append(work[schedule.micro_batches(0, number, 4)].sum(axis=0))
        one_way.append(work[schedule.step(0, number).reshape(4, 4)].sum(axis=0))
    assert len(by_turns) > 1
    waiting, before = (np.mean([ranks.max() / ranks.mean() for ranks in steps]) for steps in (by_turns, one_way))
    assert waiting - 1 < 0.6 * (before - 1)


def test_packs_stand_by_work_inside_a_step(plan: PackPlan) -> None:
    work = plan.predicted_work(0)
    for balance in ("sorted", "strict"):
        schedule = Schedule(plan, packs_per_step=16, balance=balance)
        for number in range(schedule.num_steps(0)):
            assert (np.diff(work[schedule.step(0, number)]) >= 0).all()
    random = Schedule(plan, packs_per_step=16, balance="random")
    assert (np.diff(work[random.step(0, 0)]) < 0).any()


def test_default_steps_hold_the_same_packs_as_random_ones(plan: PackPlan) -> None:
    in_order, random = (Schedule(plan, packs_per_step=16, seed=4, balance=balance) for balance in ("sorted", "random"))
    for epoch in range(2):
        for number in range(random.num_steps(epoch)):
            assert set(in_order.step(epoch, number).tolist()) == set(random.step(epoch, number).tolist())


@pytest.mark.parametrize("balance", ["strict", "length"])
def test_strict_steps_hold_similar_packs_in_random_order(plan: PackPlan, balance: Any) -> None:
    work = plan.predicted_work(0) if balance == "strict" else plan.epoch(0).load("tokens")
    schedule = Schedule(plan, packs_per_step=16, balance=balance)
    steps = [work[schedule.step(0, number)] for number in range(schedule.num_steps(0) - 1)]
    firsts = [step[0] for step in steps]
    assert firsts != sorted(firsts)
    steps.sort(key=lambda step: (step[0], step[-1]))
    assert all(light[-1] <= heavy[0] for light, heavy in pairwise(steps))


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_strict_is_most_even_then_sorted_then_random(plan: PackPlan, world_size: int) -> None:
    strict, in_order, random = (
        evenness(Schedule(plan, packs_per_step=8 * world_size, balance=balance), world_size).slowest
        for balance in ("strict", "sorted", "random")
    )
    assert 1 <= strict <= in_order < random


def test_epochs_and_seeds_have_orders_of_their_own(plan: PackPlan) -> None:
    orders = [
        Schedule(plan, packs_per_step=4, seed=seed).order(epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]
    same = made_plan([{"tokens": np.arange(1, 60)}] * 2)
    schedule = Schedule(same, packs_per_step=4)
    assert schedule.order(0).tolist() != schedule.order(1).tolist(), "the same packs, in another order"
    assert schedule.order(0).tolist() == Schedule(same, packs_per_step=4).order(0).tolist()


def test_without_shuffling_packs_stay_in_their_order() -> None:
    plan = made_plan([{"tokens": [5, 3, 9, 1, 7]}], shuffle=False)
    assert Schedule(plan, packs_per_step=2, balance="random").order(0).tolist() == [0, 1, 2, 3, 4]
    assert Schedule(plan, packs_per_step=2).order(0).tolist() == [1, 0, 3, 2, 4]


def test_steps_of_all_epochs_are_counted() -> None:
    plan = made_plan([{"tokens": range(1, 11)}, {"tokens": range(1, 8)}])
    schedule = Schedule(plan, packs_per_step=4)
    assert [schedule.num_steps(epoch) for epoch in range(2)] == [3, 2]
    assert schedule.num_steps() == 5
    with pytest.raises(IndexError):
        schedule.num_steps(2)


def test_an_epoch_without_packs_has_no_steps() -> None:
    plan = made_plan([{"tokens": [1]}, {"tokens": []}])
    for balance in BALANCES:
        schedule = Schedule(plan, packs_per_step=4, balance=balance)
        assert schedule.num_steps(1) == 0
        assert schedule.order(1).tolist() == []


# ---- windows


@pytest.mark.parametrize("balance", BALANCES)
@pytest.mark.parametrize("size", [1, 7, 16, 50])
def test_packs_of_a_window_stay_together(windowed: PackPlan, balance: Any, size: int) -> None:
    windows = windowed.epoch(0).load("window")
    assert windows.max() > 4
    schedule = Schedule(windowed, packs_per_step=size, balance=balance)
    last = 0
    for number in range(schedule.num_steps(0)):
        mine = windows[schedule.step(0, number)]
        assert mine.min() >= last, "a window ends before a step after the next begins"
        last = int(mine.max())
        missing = windows[schedule.order(0)[: (number + 1) * size]]
        assert all((missing == window).sum() == (windows == window).sum() for window in range(last))


def test_packs_of_a_window_are_shuffled(windowed: PackPlan) -> None:
    windows = windowed.epoch(0).load("window")
    order = Schedule(windowed, packs_per_step=1, balance="random").order(0)
    for window in range(int(windows.max())):
        mine = order[windows[order] == window]
        assert mine.tolist() != sorted(mine.tolist())


def test_strict_steps_inside_a_window_are_in_random_order() -> None:
    # Two windows of 40 packs, by work: 4 packs a step.
    plan = made_plan([{"tokens": [*range(1, 41), *range(1, 41)], "window": [0] * 40 + [1] * 40}])
    schedule = Schedule(plan, packs_per_step=4, balance="strict")
    steps = [sorted((schedule.step(0, number) % 40).tolist()) for number in range(20)]
    for part in (steps[:10], steps[10:]):
        assert part != sorted(part)
        assert sorted(part) == [list(range(start, start + 4)) for start in range(0, 40, 4)]


def test_arranging_needs_no_windows() -> None:
    work = np.array([3.0, 1.0, 2.0, 5.0, 4.0])
    found = arrange(np.array([4, 3, 2, 1, 0]), work, 2, "strict", np.random.default_rng(0))
    assert sorted(found[:4].tolist()) == [0, 1, 2, 4]
    assert found[4] == 3
    assert sorted(map(tuple, found[:4].reshape(2, 2).tolist())) == [(0, 4), (1, 2)]


# ---- states


def test_states_survive_json(plan: PackPlan) -> None:
    schedule = Schedule(plan, packs_per_step=4)
    for state in (schedule.start(), LoaderState(schedule=schedule.hash, epoch=1, next_pack=8)):
        again = LoaderState.from_plain(json.loads(json.dumps(asdict(state))))
        assert again == state
        schedule.check(again)
    assert set(asdict(schedule.start())) == {"schedule", "epoch", "next_pack", "settings"}
    schedule.check(LoaderState(schedule=schedule.hash, epoch=0, next_pack=0))  # as earlier versions saved them


def test_the_state_after_so_many_steps_is_found_over_epochs() -> None:
    schedule = Schedule(
        made_plan([{"tokens": range(1, 11)}, {"tokens": [1]}, {"tokens": range(1, 8)}]), packs_per_step=4
    )
    found = [(state.epoch, state.next_pack) for state in map(schedule.state_after, range(7))]
    assert found == [(0, 0), (0, 4), (0, 8), (1, 0), (2, 0), (2, 4), (2, 7)]
    for steps in range(7):
        schedule.check(schedule.state_after(steps))
    for steps in (-1, 7):
        with pytest.raises(IndexError):
            schedule.state_after(steps)


def test_samples_of_some_steps_are_those_of_their_packs() -> None:
    counts = [{"tokens": range(1, packs + 1), "samples": np.arange(packs) + 3} for packs in (10, 1, 7)]
    schedule = Schedule(made_plan(counts), packs_per_step=4)
    each = [
        sum(3 + int(pack) for pack in schedule.step(epoch, step))
        for epoch in range(3)
        for step in range(schedule.num_steps(epoch))
    ]
    for first in range(len(each) + 1):
        for last in range(first, len(each) + 1):
            assert schedule.num_samples(first, last) == sum(each[first:last])


@pytest.mark.parametrize(
    "text",
    [
        '""',
        "[]",
        "3",
        "null",
        "{}",
        '{"schedule": "a", "epoch": 0}',
        '{"schedule": "a", "epoch": 0, "next_pack": -1}',
        '{"schedule": "a", "epoch": true, "next_pack": 0}',
        '{"schedule": "a", "epoch": 0, "next_pack": 1.5}',
        '{"schedule": 1, "epoch": 0, "next_pack": 0}',
        '{"schedule": "a", "epoch": 0, "next_pack": 0, "more": 1}',
    ],
)
def test_what_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match="loader state"):
        LoaderState.from_plain(json.loads(text))


def test_a_state_of_another_schedule_is_refused(plan: PackPlan, tmp_path: Path) -> None:
    state = Schedule(plan, packs_per_step=4).start()
    changes: list[dict[str, Any]] = [{"packs_per_step": 5}, {"seed": 1}, {"balance": "strict"}]
    others = [Schedule(plan, **{"packs_per_step": 4, **change}) for change in changes]
    table = lvis_table(tmp_path, 50)
    others.append(Schedule(build_plan(table, PackingConfig(packing_length=20_000), WORK), packs_per_step=4))
    others.append(Schedule(build_plan(table, PackingConfig(packing_length=20_000, seed=1), WORK), packs_per_step=4))
    assert len({other.hash for other in others} | {state.schedule}) == len(others) + 1
    named = [
        "packs_per_step: 4 -> 5",
        "seed: 0 -> 1",
        "balance: sorted -> strict",
        "packing.epochs: 2 -> 1",
        "packing.seed: 0 -> 1",
    ]
    for other, words in zip(others, named, strict=True):
        with pytest.raises(ArtifactError, match=rf"(?s){words}.*packs per step, seed and balance"):
            other.check(state)
        with pytest.raises(ArtifactError, match="packs per step, seed and balance"):
            other.check(dataclasses.replace(state, settings=None))
    Schedule(plan, packs_per_step=4).check(state)


def test_a_state_behind_the_end_is_refused() -> None:
    schedule = Schedule(made_plan([{"tokens": [1, 2, 3]}, {"tokens": [1, 2]}]), packs_per_step=2)
    for epoch, pack in ((0, 3), (1, 2), (1, 0)):
        schedule.check(LoaderState(schedule=schedule.hash, epoch=epoch, next_pack=pack))
    for epoch, pack in ((0, 4), (1, 3), (2, 0)):
        with pytest.raises(ArtifactError, match=f"epoch {epoch}, pack {pack}"):
            schedule.check(LoaderState(schedule=schedule.hash, epoch=epoch, next_pack=pack))


@pytest.mark.parametrize("size", [0, -1, True, 2.0, None])
def test_packs_per_step_are_checked(size: Any) -> None:
    with pytest.raises(ConfigError, match="packs_per_step"):
        Schedule(made_plan([{"tokens": [1]}]), packs_per_step=size)


def test_unknown_balance_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sorted'"):
        Schedule(made_plan([{"tokens": [1]}]), packs_per_step=1, balance="sort")  # type: ignore[arg-type]
