"""How even the work of ranks is: measured as defined, and good on samples shaped like LVIS."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import WORK, lvis_table, made_plan

from packtrain.packing.packing_config import PackingConfig
from packtrain.packing.plan_builder import build_plan
from packtrain.packing.schedule import BalanceLine, Schedule, balance_table, evenness


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(1, 1_000), min_size=1, max_size=40),
    size=st.integers(1, 12),
    world_size=st.integers(1, 8),
    balance=st.sampled_from(["sorted", "strict", "random"]),
)
def test_evenness_is_what_it_says(tokens: list[int], size: int, world_size: int, balance: str) -> None:
    samples = [1 + n % 5 for n in tokens]
    plan = made_plan([{"tokens": tokens, "attention": [n * n for n in tokens], "samples": samples}])
    schedule = Schedule(plan, packs_per_step=size, balance=balance)  # type: ignore[arg-type]
    work = plan.predicted_work(0)
    ratios, lengths, counts = [], [], []
    for number in range(len(tokens) // size):
        step = schedule.step(0, number).tolist()
        lengths.append(sum(tokens[pack] for pack in step) / sum(samples[pack] for pack in step))
        counts.append(sum(samples[pack] for pack in step))
        for start in range(0, size - world_size + 1, world_size):
            busy = [work[pack] for pack in step[start : start + world_size]]
            ratios.append(max(busy) / (sum(busy) / world_size))
    found = evenness(schedule, world_size)
    assert found.slowest == pytest.approx(np.mean(ratios) if ratios else 1.0)
    assert found.length_spread == pytest.approx(np.std(lengths) if lengths else 0.0, abs=1e-9)
    assert found.samples_spread == pytest.approx(np.std(counts) if counts else 0.0, abs=1e-9)


def test_predicted_work_is_the_sum_over_what_a_pack_holds() -> None:
    columns = {
        name: [3, 5] for name in ("tokens", "attention", "patches", "squared_patches", "supervised_tokens", "images")
    }
    columns["attention"] = [9, 13]
    found = made_plan([columns]).predicted_work(0)
    for number, squares in enumerate((9, 13)):
        each = (WORK.per_token + WORK.per_patch + WORK.per_squared_patch + WORK.per_supervised_token) * [3, 5][number]
        assert found[number] == pytest.approx(each + WORK.per_squared_token * squares)


def test_the_table_leaves_out_ranks_that_the_plan_cannot_keep_busy() -> None:
    plan = made_plan([{"tokens": range(1, 71)}])
    lines = balance_table(plan)
    assert [(line.ranks, line.packs_per_step, line.steps) for line in lines] == [
        (2, 16, 5),
        (4, 32, 3),
        (8, 64, 2),
        (64, 64, 2),
    ]
    assert balance_table(made_plan([{"tokens": [1]}])) == []
    given_size = balance_table(plan, ranks=(4,), packs_per_step=12)
    assert [(line.packs_per_step, line.steps) for line in given_size] == [(12, 6)]
    assert [line.packs_per_step for line in balance_table(made_plan([{"tokens": range(1, 21)}]))] == [16, 20, 16]


def lvis_line(folder: Path, count: int, world_size: int) -> BalanceLine:
    plan = build_plan(lvis_table(folder, count), PackingConfig(packing_length=20_000), WORK)
    (line,) = balance_table(plan, ranks=(world_size,))
    assert line.steps > 10, "too few steps to say anything"
    assert line.packs_per_step == 8 * world_size
    return line


def check_line(line: BalanceLine) -> None:
    """The default is even without a bias; strict is more even, with one."""
    assert line.random.slowest > 1.05, "nothing to balance"
    assert line.sorted.slowest <= 1.03
    assert line.strict.slowest <= 1.01
    assert line.strict.slowest <= line.sorted.slowest < line.random.slowest
    assert line.sorted.length_spread <= 1.1 * line.random.length_spread
    assert line.sorted.samples_spread <= 1.1 * line.random.samples_spread
    assert line.strict.length_spread > 1.5 * line.random.length_spread


@pytest.mark.parametrize(("count", "world_size"), [(12_000, 8), (60_000, 32)])
def test_lvis_like_packs_are_even(tmp_path: Path, count: int, world_size: int) -> None:
    check_line(lvis_line(tmp_path, count, world_size))
