"""The sweep packs for real: every sum agrees with the data, and near the bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from asking import ask
from hypothesis import given, settings
from hypothesis import strategies as st
from made_tables import Columns, detection, films, texts, write_table

from packtrain.core.errors import ConfigError, DataError
from packtrain.planning.memory_report import heaviest_pack
from packtrain.planning.question import Baseline, Question, packing_from, read_rows
from packtrain.planning.study_values import Simulation
from packtrain.planning.sweep import KEPT, default_lengths, pack_rows, simulate, step_shape, sweep


def swept(question: Question, lengths: list[int], limits: list[dict[str, int]] | None = None) -> tuple[Simulation, ...]:
    return sweep(question, lengths, limits or [], lambda *_: None)


def check_sums(question: Question, one: Simulation) -> None:
    """What every simulation of uncut, unrepeated rows must satisfy."""
    tokens = int(question.rows.samples["tokens"].sum())
    assert one.samples_packed + one.samples_dropped == len(question.rows)
    assert one.fill * one.packs * one.packing_length == pytest.approx(tokens - one.tokens_dropped)
    assert one.tokens_per_second * one.seconds == pytest.approx(tokens - one.tokens_dropped)
    assert one.bound <= one.packs
    assert one.of_bound == pytest.approx(one.bound / one.packs)
    assert one.samples_per_pack == pytest.approx(one.samples_packed / one.packs)
    assert one.samples_per_step == pytest.approx(one.packs_per_step * one.samples_per_pack)
    assert one.steps == -(-one.packs // one.packs_per_step)
    assert one.micro_batches == -(-one.packs_per_step // question.setup.gpus)
    assert one.idle == pytest.approx(1 - one.packs_per_step / (one.micro_batches * question.setup.gpus))
    assert one.worst.tokens <= one.packing_length
    assert sum(one.fullest.values()) == pytest.approx(1)
    assert one.fits == (one.memory_bytes <= 0.9 * question.gpu.memory_bytes)


def test_sums_agree_at_every_length(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", detection(1500), gpus=4)
    found = swept(question, [2048, 8192, 20_000, 60_000])
    assert [one.packing_length for one in found] == [2048, 8192, 20_000, 60_000]
    for one in found:
        check_sums(question, one)
    assert found[0].samples_dropped > found[2].samples_dropped > found[3].samples_dropped == 0
    assert found[0].memory_bytes < found[3].memory_bytes


def test_one_resource_is_packed_at_the_bound(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", detection(4000))
    (one,) = swept(question, [20_000])
    assert one.packs <= one.bound + 1
    assert one.samples_per_pack > 8
    assert one.speedup > 1.2


def test_limits_are_tried_at_every_length_and_hold(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", films(400))
    limit = {"max_patches_per_pack": 40_000}
    found = swept(question, [4096, 8192], [limit, {"packing_length": 2048, "max_videos_per_pack": 2}])
    tried = [(one.packing_length, dict(one.limits)) for one in found]
    expected = [(4096, {}), (8192, {}), (4096, limit), (8192, limit), (2048, {"max_videos_per_pack": 2})]
    assert tried == expected
    for one in found:
        check_sums(question, one)
    assert all(one.worst.patches <= 40_000 for one in found if one.limits == limit)
    assert found[1].worst.patches > 40_000
    assert found[3].fullest["patches"] > 0.5 > found[3].fullest["tokens"]
    assert found[3].packs > found[1].packs


def test_fixed_choices_are_part_of_every_simulation(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", detection(300), packing={"max_images_per_pack": 3})
    found = swept(question, [8192, 16_384])
    assert all(one.limits == {"max_images_per_pack": 3} and one.worst.images <= 3 for one in found)


def test_cutting_keeps_what_dropping_loses(tmp_path: Path) -> None:
    columns = texts(np.array([500] * 40 + [9000, 30_000]))
    dropped, cut, split = (
        simulate(question, replace(question.packing, packing_length=4096))
        for overlong in ("drop", "truncate", "split")
        if (question := ask(tmp_path / overlong, columns, packing={"overlong": overlong}))
    )
    assert dropped is not None
    assert cut is not None
    assert split is not None
    assert (dropped.samples_packed, dropped.samples_dropped, dropped.tokens_dropped) == (40, 2, 39_000)
    assert (cut.samples_packed, cut.samples_dropped, cut.tokens_dropped) == (42, 0, 39_000 - 2 * 4096)
    assert (split.samples_packed, split.samples_dropped, split.tokens_dropped) == (42, 0, 0)


def test_repeats_of_a_mixture_are_packed_as_often_as_they_are_used(tmp_path: Path) -> None:
    columns = {**texts(np.arange(100, 200)), "source": np.array(["a"] * 60 + ["b"] * 40)}
    mixture = {"a": {"repeats": 3.0, "weight": None}, "b": {"repeats": None, "weight": None}}
    table = write_table(tmp_path / "t", columns, mixture=mixture)
    question = replace(ask(tmp_path / "u", columns), rows=read_rows(table, 0))
    (one,) = swept(question, [2048])
    assert one.samples_packed == 3 * 60 + 40
    total = 3 * sum(range(100, 160)) + sum(range(160, 200))
    assert one.fill * one.packs * 2048 == pytest.approx(total)
    assert (one.samples_dropped, one.tokens_dropped) == (0, 0)


def test_a_part_of_the_rows_is_scaled_to_all(tmp_path: Path) -> None:
    columns = detection(6000)
    whole = ask(tmp_path / "t", columns)
    part = replace(whole, rows=read_rows(write_table(tmp_path / "u", columns), 0, most=2000))
    assert len(part.rows) == 2000
    assert part.rows.scale == 3
    (one,), (all_,) = swept(part, [16_384]), swept(whole, [16_384])
    for name in ("packs", "samples_packed", "seconds", "bound", "steps"):
        assert getattr(one, name) == pytest.approx(getattr(all_, name), rel=0.1)
    assert one.packs != all_.packs, "the part was the whole"


@given(st.integers(1, 4096), st.floats(1, 300), st.integers(1, 64))
@settings(max_examples=300, deadline=None)
def test_a_step_keeps_the_number_of_samples_as_far_as_whole_packs_can(wanted: int, each: float, gpus: int) -> None:
    found = step_shape(wanted, each, gpus)
    assert found.packs >= 1
    assert found.samples == pytest.approx(found.packs * each)
    assert found.micro_batches == -(-found.packs // gpus)
    nearest = max(1, round(wanted / each))
    moved = abs(found.samples / wanted - 1)
    assert found.packs == nearest or (found.packs % gpus == 0 and moved < KEPT)
    even = max(1, round(wanted / each / gpus)) * gpus
    if abs(even * each / wanted - 1) < KEPT:
        assert found.packs == even, "a GPU is idle though the samples of a step would hardly move"
    if nearest >= 5:
        assert moved <= 1 / 9 + 1e-9  # half a pack of four and a half


@pytest.mark.parametrize(
    ("wanted", "each", "gpus", "packs"),
    [(184, 10.0, 4, 20), (128, 15.3, 4, 8), (128, 13.9, 4, 9), (130, 10.0, 3, 12)],
    ids=["rounded once", "even already", "too far", "down"],
)
def test_packs_of_a_step_keep_every_gpu_busy(wanted: int, each: float, gpus: int, packs: int) -> None:
    assert step_shape(wanted, each, gpus).packs == packs


def test_default_lengths_follow_the_data_and_the_model() -> None:
    usual = default_lengths(np.random.default_rng(0).integers(300, 3000, 100_000), 262_144)
    assert usual[0] == 4096
    assert {8000, 20_000, 24_000, 8192, 32_768, 262_144} <= set(usual)
    assert max(default_lengths(np.full(10_000, 900), 8192)) == 8192
    short = default_lengths(np.full(10_000, 90), 8192)
    assert {256, 512, 1024, 2048, 4096} <= set(short)
    assert min(default_lengths(np.full(100, 9_000), 32_768)) == 10_000
    assert default_lengths(np.full(100, 9_000), 2048) == (2048,)
    assert default_lengths(np.array([77]), 8192) == (256,)


@pytest.mark.parametrize(("wanted", "gpus"), [(8, 1), (40, 4), (128, 4)])
def test_default_lengths_have_one_that_keeps_the_step_and_idles_no_gpu(tmp_path: Path, wanted: int, gpus: int) -> None:
    question = ask(tmp_path / "t", texts(np.random.default_rng(0).integers(100, 700, 4_000)), gpus=gpus)
    question = replace(question, baseline=Baseline(effective_batch_size=wanted))

    def kept(lengths: list[int]) -> list[int]:
        found = swept(question, lengths)
        return [one.packing_length for one in found if not one.idle and abs(one.samples_per_step / wanted - 1) <= 0.05]

    tokens = question.rows.samples["tokens"]
    usual, more = (default_lengths(tokens, 32_768, samples_per_step=step, gpus=gpus) for step in (0, wanted))
    assert set(usual) < set(more)
    assert kept([length for length in more if length not in usual])


def test_nothing_fits_any_length(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", texts(np.array([900, 800])))
    with pytest.raises(DataError, match="no sample fits any"):
        swept(question, [256, 512])


def test_unknown_names_are_refused_with_the_nearest(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", texts(np.array([900, 800])))
    with pytest.raises(ConfigError, match="max_images_per_pack"):
        swept(question, [2048], [{"max_image_per_pack": 3}])
    with pytest.raises(ConfigError, match="did you mean 'packing_strategy'"):
        packing_from({"packing_stratgy": "best_fit"}, seed=0)


def test_packing_twice_gives_the_same(tmp_path: Path) -> None:
    question = ask(tmp_path / "t", detection(500))
    config = replace(question.packing, packing_length=8192)
    first, second = pack_rows(question, config), pack_rows(question, config)
    assert all((first.loads[name] == second.loads[name]).all() for name in first.loads)
    assert simulate(question, config) == simulate(question, config)


@pytest.mark.parametrize("columns", [detection(300), films(200)], ids=["images", "videos"])
def test_no_pack_needs_more_than_the_estimate_and_the_heaviest_is_found(tmp_path: Path, columns: Columns) -> None:
    question = ask(tmp_path / "t", columns)
    config = replace(question.packing, packing_length=8192)
    passes = pack_rows(question, config).passes
    one = simulate(question, config)
    assert one is not None
    needs = [question.memory_of(passes.load(number)).total for number in range(len(passes))]
    assert len(set(needs)) > 1
    assert max(needs) <= one.memory_bytes <= 1.1 * max(needs)
    assert needs[heaviest_pack(question, passes)] == max(needs)
