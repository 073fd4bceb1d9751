"""Padding is counted on the batches that would really be formed, and agrees with counting by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from asking import ask
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tables import detection, texts

from packtrain.packing.resources import Samples
from packtrain.planning.clock import FIELDS, one_pass
from packtrain.planning.padding import best_padded, padded_order, padded_passes, padded_run, padded_runs
from packtrain.planning.question import Baseline
from packtrain.planning.sweep import pack_rows
from packtrain.predicting.time import step_time
from packtrain.predicting.values import Load, TrainingSetup

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=60)


def samples_of(lengths: list[int]) -> Samples:
    tokens = np.array(lengths, np.int64)
    names = ("patches", "squared_patches", "largest_patches", "vision_tokens", "images", "frames", "supervised_tokens")
    return Samples(
        {"tokens": tokens, "longest": tokens, "samples": np.ones_like(tokens), **dict.fromkeys(names, tokens // 3)}
    )


@given(LENGTHS, st.integers(1, 9), st.sampled_from(["random", "by_length"]), st.integers(0, 5))
@settings(max_examples=120, deadline=None)
def test_padded_batches_agree_with_a_count_by_hand(lengths: list[int], size: int, order: str, seed: int) -> None:
    taken = padded_order(np.array(lengths), order, 4 * size, seed)  # type: ignore[arg-type]
    assert sorted(taken.tolist()) == list(range(len(lengths)))
    passes = padded_passes(samples_of(lengths), taken, size)
    batches = [taken[start : start + size] for start in range(0, len(lengths), size)]
    assert len(passes) == len(batches)
    for number, batch in enumerate(batches):
        longest = max(lengths[at] for at in batch)
        load = passes.load(number)
        assert load.tokens == len(batch) * longest
        assert load.squared_tokens == len(batch) * longest**2
        assert (load.rows, load.samples, load.longest) == (len(batch), len(batch), longest)
        assert load.patches == sum(lengths[at] // 3 for at in batch)
    worst = passes.worst()
    assert all(getattr(worst, name) == passes[name].max() for name in FIELDS)


def test_grouping_sorts_inside_groups_only() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 400)
    order = padded_order(lengths, "by_length", 100, 3)
    for start in range(0, 400, 100):
        assert (np.diff(lengths[order[start : start + 100]]) <= 0).all()
    assert (np.diff(lengths[order]) > 0).any(), "groups were not kept apart"


def test_waste_is_the_share_of_padding_and_grouping_saves_most_of_it(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", detection(2000), baseline=Baseline(per_device_train_batch_size=4))
    packed = pack_rows(question, replace(question.packing, packing_length=20_000))
    assert packed.dropped > 0
    random, grouped = (
        padded_run(question, packed.samples, packed.dropped, order, 4)  # type: ignore[arg-type]
        for order in ("random", "by_length")
    )
    for run in (random, grouped):
        assert run.real_tokens == packed.samples["tokens"].sum()
        assert run.waste == pytest.approx(1 - run.real_tokens / run.computed_tokens)
        assert run.samples + run.dropped == 2000
        assert run.batches == -(-run.samples // 4)
        assert run.steps == -(-run.batches // 32)
        assert run.worst.longest <= 20_000
    assert random.waste > 0.3
    assert grouped.waste < random.waste / 3
    assert grouped.seconds < random.seconds


def test_samples_of_one_length_waste_nothing(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", texts(np.full(100, 700)))
    packed = pack_rows(question, replace(question.packing, packing_length=4096))
    assert [run.waste for run in padded_runs(question, packed.samples)][:2] == [0, 0]


CUTS = {"drop": 30_000, "split": 30_000, "truncate": 4096, "cutoff_len": 2000}  # the longest row of the run of today


@pytest.mark.parametrize("overlong", CUTS)
def test_the_run_of_today_has_all_its_samples(tmp_path: Path, overlong: str) -> None:
    columns = texts(np.array([500] * 40 + [9000, 30_000]))
    given = {"cutoff_len": CUTS[overlong]} if overlong == "cutoff_len" else {"overlong": overlong}
    question = ask(tmp_path / "t", columns, packing=given)
    packed = pack_rows(question, replace(question.packing, packing_length=4096))
    own, best = padded_runs(question, packed.samples)[0], best_padded(question, packed.samples, packed.dropped)
    assert (own.samples, own.dropped) == (42, 0), "what fits no pack is no reason to leave it out of a padded run"
    assert own.worst.longest == CUTS[overlong]
    assert own.kernels == "own"
    assert best.kernels == "packs"
    assert best.real_tokens == packed.samples["tokens"].sum(), "the other comparison is over the same samples"


def test_the_best_padding_is_the_fastest_that_fits_with_the_kernels_of_packs(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", detection(400), setup=TrainingSetup(compiled=True))
    packed = pack_rows(question, replace(question.packing, packing_length=16_000))
    best = best_padded(question, packed.samples, packed.dropped)
    assert best.fits
    for order in ("random", "by_length"):
        for size in (1, 2, 4, 8):
            one = padded_run(question, packed.samples, packed.dropped, order, size, "packs")  # type: ignore[arg-type]
            assert one.seconds >= best.seconds or not one.fits
            assert one.seconds < padded_run(question, packed.samples, packed.dropped, order, size).seconds  # type: ignore[arg-type]


def test_the_users_own_run_comes_first(tmp_path: Path) -> None:
    question = ask(
        tmp_path / "t", detection(600), baseline=Baseline(group_by_length=True, per_device_train_batch_size=2)
    )
    packed = pack_rows(question, replace(question.packing, packing_length=30_000))
    runs = padded_runs(question, packed.samples)
    assert [run.order for run in runs[:2]] == ["by_length", "random"]
    assert all(run.batch_size == 2 for run in runs[:2])
    assert all(run.fits and run.order == "by_length" and run.batch_size > 2 for run in runs[2:])


LOADS = {
    "a pack": Load(
        tokens=8000,
        squared_tokens=9_000_000,
        longest=2500,
        samples=7,
        supervised_tokens=4000,
        vision_tokens=2000,
        patches=8000,
        squared_patches=12_000_000,
        largest_patches=1800,
        images=7,
    ),
    "texts": Load(tokens=3000, squared_tokens=1_000_000, longest=900, samples=9, supervised_tokens=2000),
    "two rows": Load(tokens=6000, squared_tokens=18_000_000, longest=3000, samples=2, rows=2, supervised_tokens=2000),
    "one row": Load(tokens=3000, squared_tokens=9_000_000, longest=3000, supervised_tokens=2000),
}


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "eager"])
@pytest.mark.parametrize("name", LOADS)
def test_the_clock_agrees_with_the_time_model(tmp_path: Path, name: str, attention: str) -> None:
    question = ask(tmp_path / "t", texts(np.array([10])), setup=TrainingSetup(attn_implementation=attention))  # type: ignore[arg-type]
    small = Load(tokens=1, squared_tokens=1, longest=1)
    steps = [step_time(question.shape, question.setup, load, question.gpu) for load in (LOADS[name], small)]
    alone, least = (float(question.clock.seconds(one_pass(load))[0]) for load in (LOADS[name], small))
    # What a step has once is the same for both.
    assert alone - least == pytest.approx(steps[0].seconds - steps[1].seconds, rel=1e-9)
    assert question.clock.epoch(one_pass(LOADS[name]), 1) == pytest.approx(steps[0].seconds, rel=1e-9)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_step_has_its_optimizer_whatever_the_spread_of_lengths(tmp_path: Path, attention: str) -> None:
    lengths = np.array([100, 120, 90, 110, 80, 100, 20_000, 18_000])
    once = []
    for kernel in ("varlen", attention):
        question = ask(tmp_path / kernel, texts(lengths), setup=TrainingSetup(attn_implementation=kernel))  # type: ignore[arg-type]
        passes = padded_passes(question.rows.samples, np.arange(len(lengths)), 2)
        once.append(question.clock.epoch(passes, len(passes)) - float(question.clock.seconds(passes).sum()))
    assert once[0] > 0
    assert once[1] == pytest.approx(once[0], rel=1e-6), "updating weights takes as long with any attention"


@pytest.mark.parametrize(
    ("sharding", "waits"), [("ddp", "step"), ("zero1", "step"), ("zero2", "pass"), ("fsdp", "pass")]
)
def test_gpus_wait_for_each_other_where_they_exchange(tmp_path: Path, sharding: str, waits: str) -> None:
    columns = texts(np.array([4000, 100, 100, 4000]))
    question = ask(tmp_path / "t", columns, gpus=2)
    question = replace(question, setup=replace(question.setup, sharding=sharding))
    passes = padded_passes(question.rows.samples, np.arange(4), 1)
    long, short = question.clock.seconds(passes)[:2]
    # Each GPU has one long and one short pass in a step; in the first order never at the same time.
    crossed, sorted_ = (question.clock.epoch(passes.take(np.array(order)), 4) for order in ([0, 1, 2, 3], [0, 3, 1, 2]))
    assert crossed - sorted_ == pytest.approx(long - short if waits == "pass" else 0.0, abs=1e-9)
    one_sided = question.clock.epoch(passes.take(np.array([0, 1, 3, 2])), 4)
    assert one_sided - sorted_ == pytest.approx(long - short)
