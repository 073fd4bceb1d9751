"""Runs in numbers: long ones are thinned without hiding anything, and losses are compared at equal samples."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import Made, expected_loss, steps_of, write_run

from packtrain.reports.curves import edges_for, thin
from packtrain.reports.run_content import runs_content
from packtrain.reports.run_page import render_runs, run_markdown
from packtrain.runs.run_summary import FEWEST, compare_runs, loss_window, smooth_loss, summarise_run, trailing_mean
from packtrain.runs.step_metrics import STEP_KEYS
from packtrain.runs.training_run import Steps, TrainingRun, read_run

NUMBERS = st.floats(-1e6, 1e6) | st.just(float("nan"))


def made_run(tmp_path: Path, name: str, **changes: object) -> TrainingRun:
    return read_run(write_run(tmp_path / name, replace(Made(), **changes)))  # type: ignore[arg-type]


@given(st.lists(NUMBERS, max_size=80), st.integers(1, 20))
def test_thinning_keeps_every_number_inside_its_band(values: list[float], buckets: int) -> None:
    y = np.array(values)
    x = np.arange(1, len(y) + 1, dtype=float)
    edges = edges_for(len(y), buckets)
    found = thin(x, y, edges)
    good = np.isfinite(y)
    assert found.steps.sum() == good.sum(), "every finite number is in exactly one bucket"
    assert (np.diff(found.bucket) > 0).all()
    for at, bucket in enumerate(found.bucket.tolist()):
        inside = good & (x <= edges[bucket + 1] + 1e-9) & (x >= edges[bucket] - 1e-9)
        assert found.low[at] >= y[inside].min()
        assert found.high[at] <= y[inside].max()
        assert found.low[at] - 1e-6 <= found.mean[at] <= found.high[at] + 1e-6
        assert edges[bucket] - 1e-9 <= found.x[at] <= edges[bucket + 1] + 1e-9
    if good.any():
        assert (found.low.min(), found.high.max()) == (y[good].min(), y[good].max()), "extremes are never lost"


@given(st.lists(st.tuples(NUMBERS, st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=40), st.integers(1, 60))
def test_trailing_mean_is_the_mean_of_what_lies_behind(steps: list[tuple[float, int, int]], width: int) -> None:
    y, added, weights = (np.array(column, np.float64) for column in zip(*steps, strict=True))
    x = np.cumsum(added)
    found = trailing_mean(x, y, weights, float(width))
    for at in range(len(x)):
        covered = np.clip(x - (x[at] - width), 0, added) * (x <= x[at]) * np.isfinite(y)  # samples of each step
        if covered.any():
            expected = np.average(np.nan_to_num(y), weights=weights * covered / added)
            assert found[at] == pytest.approx(expected, rel=1e-6, abs=1e-4)
        else:
            assert np.isnan(found[at])


def test_summary_adds_up(tmp_path: Path) -> None:
    made = Made(steps=50)
    one, steps = summarise_run(read_run(write_run(tmp_path / "run", made))), steps_of(made)
    assert (one.steps, one.samples, one.tokens) == (50, steps[-1].samples_seen, steps[-1].tokens_seen)
    assert one.seconds == pytest.approx(sum(step.step_seconds for step in steps))
    warm = steps[1:]
    assert one.tokens_per_second == pytest.approx(
        sum(step.tokens for step in warm) / sum(step.step_seconds for step in warm)
    )
    assert one.loss_start == steps[0].loss
    assert one.memory == max(step.memory_bytes or 0 for step in steps)
    padded = sum(step.tokens / (1 - step.padding_share) for step in steps)
    assert one.padding == pytest.approx(1 - sum(step.tokens for step in steps) / padded)
    assert one.eval_best == min(one.eval_start or 0, one.eval_end or 0)


def test_steps_without_loss_are_in_no_mean_and_are_no_broken_ones(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", Made(steps=50))
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    whole = [line["loss"] for line in steps]
    for line in (steps[0], steps[20], *steps[40:]):  # more at the end than the final loss is a mean of
        line |= {"loss": None, "supervised_tokens": 0}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    one = summarise_run(read_run(folder))
    assert (one.loss_start, one.loss_not_finite) == (whole[1], 0)
    assert one.loss_end is not None
    assert min(whole[30:40]) <= one.loss_end <= max(whole[30:40])


def test_a_run_without_a_gpu_leaves_out_what_it_does_not_know(tmp_path: Path) -> None:
    one = summarise_run(made_run(tmp_path, "cpu", gpu=False, steps=5))
    assert (one.memory, one.memory_share, one.mfu, one.predicted_seconds) == (None, None, None, None)


def test_losses_that_are_not_numbers_are_counted_and_left_out(tmp_path: Path) -> None:
    one = summarise_run(made_run(tmp_path, "nan", steps=60, nan_at=(10, 60)))
    assert one.loss_not_finite == 2
    assert one.loss_end is not None
    every = summarise_run(made_run(tmp_path, "all", steps=3, nan_at=(1, 2, 3)))
    assert (every.loss_start, every.loss_end, every.loss_not_finite) == (None, None, 3)


def test_runs_are_compared_where_they_have_seen_equally_many_samples(tmp_path: Path) -> None:
    """The padded run is twice as long and its steps are smaller: compared at its end it would look better trained."""
    packed = made_run(tmp_path, "packed", steps=60, samples_per_step=20, seconds=0.5, noise=0.005)
    padded = made_run(
        tmp_path, "padded", mode="padded", steps=300, samples_per_step=8, seconds=0.4, seed=3, noise=0.005
    )
    both = compare_runs([packed, padded])
    assert both is not None
    assert both.samples == packed.steps["samples_seen"][-1] < padded.steps["samples_seen"][-1]
    ours, theirs = both.runs
    assert (both.baseline, both.fastest) == (1, 0)
    assert ours.loss == pytest.approx(theirs.loss, rel=0.015)
    assert theirs.loss > 1.3 * smooth_loss(padded.steps, loss_window(padded.steps))[-1], (
        "at its own end the longer run is far lower"
    )
    middle = both.samples - both.window / 2
    assert ours.loss == pytest.approx(expected_loss(Made(), middle), rel=0.02)
    assert ours.speedup == pytest.approx(theirs.seconds / ours.seconds)
    assert theirs.seconds == pytest.approx(np.interp(both.samples, padded.steps["samples_seen"], padded.steps.elapsed))
    assert theirs.speedup == 1.0
    assert both.target == max(ours.loss, theirs.loss)
    assert ours.to_target <= ours.seconds + 1e-9
    assert abs(padded.steps["samples_seen"][theirs.steps - 1] - both.samples) <= 8


def test_evaluations_at_equal_samples_are_what_losses_are_compared_by(tmp_path: Path) -> None:
    """They are of the same data, which the last samples of two trainings are not."""
    one = made_run(tmp_path, "a", steps=60, evaluate=10)
    other = replace(one, evaluations=tuple(replace(each, eval_loss=1.1 * each.eval_loss) for each in one.evaluations))
    both = compare_runs([one, other])
    assert both is not None
    assert both.evaluated
    assert both.apart == pytest.approx(0.1)
    assert both.runs[0].eval_loss == one.evaluations[-1].eval_loss
    far = replace(one, evaluations=one.evaluations[:3])
    both = compare_runs([one, far])
    assert both is not None
    assert (both.evaluated, both.runs[1].eval_loss) == (False, None)
    assert both.apart == 0.0, "the losses in training are the same"


def test_runs_that_learned_differently_are_apart(tmp_path: Path) -> None:
    both = compare_runs([made_run(tmp_path, "a"), made_run(tmp_path, "b", end=1.6, seed=5)])
    assert both is not None
    assert both.apart > 0.5
    slow, target = both.runs[1], both.target
    assert target == slow.loss
    assert both.runs[0].to_target < 0.8 * both.runs[0].seconds, "the better run was there long before"


def test_one_run_or_one_without_steps_is_not_compared(tmp_path: Path) -> None:
    run = made_run(tmp_path, "a", steps=4)
    empty = made_run(tmp_path, "b", steps=0, evaluate=0)
    assert compare_runs([run]) is None
    assert compare_runs([run, empty]) is None


def steps_lasting(seconds: list[float]) -> Steps:
    columns = dict.fromkeys(STEP_KEYS, np.full(len(seconds), np.nan))
    return Steps(columns={**columns, "step_seconds": np.array(seconds), "tokens": np.full(len(seconds), 100.0)})


@pytest.mark.parametrize(
    ("seconds", "warm"),
    [
        pytest.param([1.0] * 20, [0], id="the first step always"),
        pytest.param([25.0, 1.1, 9.7, *[1.0] * 20], [0, 2], id="compiled once more at the third; the second counts"),
        pytest.param([25.0, *[1.0] * 21, 30.0], [0], id="later slow steps are the run's own"),
        pytest.param([25.0, 1.0, 1.0], [0], id="also where there are few"),
        pytest.param([25.0], [], id="unless there is no other"),
        pytest.param([3.0, *[1.0] * 6, 20.0, *[1.0] * 9], [0, 7], id="a process resumed at the eighth"),
        pytest.param([22.0, *[21.0] * 6, 9.0, *[1.8] * 9], [0], id="the first session ran on a busy machine"),
        pytest.param([22.0, *[21.0] * 4, *[1.8] * 12], [0], id="and was half of the first ten"),
    ],
)
def test_no_speed_counts_the_steps_that_warm_up(seconds: list[float], warm: list[int]) -> None:
    assert np.flatnonzero(steps_lasting(seconds).warm).tolist() == warm


def test_steps_that_warm_up_count_as_long_as_a_step_is_later() -> None:
    assert steps_lasting([25.0, 2.0, 1.0, 3.0]).elapsed.tolist() == [2.0, 4.0, 5.0, 8.0]
    found = steps_lasting([25.0, 1.0, 9.0, *[1.0] * 7]).elapsed
    assert found.tolist() == list(range(1, 11))


def test_a_speed_up_is_the_ratio_of_the_speeds_that_are_shown(tmp_path: Path) -> None:
    """A slow first step that counted in one of them alone made a run the faster by its time and slower by its speed."""
    steps, slow = 40, 60.0
    runs = [made_run(tmp_path, name, steps=steps, seconds=0.5, world_size=1) for name in ("packed", "padded")]
    for run, first, other in zip(runs, (0.5, slow), (0.55, 0.5), strict=True):
        run.steps.columns["step_seconds"][:] = [first, *([other] * (steps - 1))]
    packed, padded = runs[0], replace(runs[1], facts=replace(runs[1].facts, mode="padded"))
    both, summaries = compare_runs([packed, padded]), [summarise_run(run) for run in (packed, padded)]
    assert both is not None
    ours, theirs = both.runs
    assert ours.speedup == pytest.approx(0.5 / 0.55), "by all its seconds it would be 2.7"
    assert ours.speedup == pytest.approx(summaries[0].tokens_per_second / summaries[1].tokens_per_second)
    assert [one.tokens_per_second for one in both.runs] == pytest.approx([one.tokens_per_second for one in summaries])
    assert ours.speedup == pytest.approx(theirs.seconds / ours.seconds)
    assert (summaries[1].warm_seconds, summaries[1].seconds) == (slow, pytest.approx(slow + 0.5 * (steps - 1)))


@pytest.mark.parametrize("steps", [6, FEWEST, FEWEST + 1])
def test_few_steps_compare_no_speed_and_call_no_losses_the_same(tmp_path: Path, steps: int) -> None:
    long, short = (
        made_run(tmp_path, mode, mode=mode, steps=number, samples_per_step=16, noise=0.001)
        for mode, number in {"packed": 30, "padded": steps}.items()
    )
    long = replace(long, steps=made_run(tmp_path, "other", mode="padded", steps=30, noise=0.001).steps)
    if steps < FEWEST:
        short.steps.columns["step_seconds"][2] *= 9  # no number of steps may become negative
    both, content = compare_runs([long, short]), runs_content([long, short])
    assert both is not None
    ours, theirs = both.runs
    assert (theirs.steps, both.enough) == (steps, steps > FEWEST)
    for told in (ours.speedup, ours.seconds, ours.tokens_per_second, ours.to_target):
        assert (told is not None) == both.enough
    headline, said = content["headline"], content["lead"] + run_markdown(content) + render_runs([long, short])
    if both.enough:
        assert headline.startswith("The same loss")
        assert "Samples compared" not in said
    else:
        assert re.fullmatch(
            rf"Losses [\d.]+ % apart after {16 * steps} samples; too few steps to compare speed", headline
        )
        counts = f"packed has {steps} steps and padded has {steps} steps"
        assert (
            f"In {16 * steps} samples {counts}; {FEWEST} of each, first step excluded, are needed to compare speed"
            in said
        )
        assert not re.search(r"[-\u2212]\d+ steps", said)
        assert "Speedup over the baseline" not in said


def test_a_run_has_one_final_loss(tmp_path: Path) -> None:
    """On its own page, beside another run, and where both have seen as many samples."""
    run = made_run(tmp_path, "a", steps=45)
    both = compare_runs([run, run])
    assert both is not None
    assert both.runs[0].loss == summarise_run(run).loss_end == summarise_run(run, both.window).loss_end
    assert both.window == summarise_run(run).loss_window


def test_final_losses_are_means_over_the_same_number_of_samples(tmp_path: Path) -> None:
    """A step that lies partly in the window counts by that part."""
    run = made_run(tmp_path, "a", steps=30, samples_per_step=28)
    samples, tokens = (run.steps[name][-2:] for name in ("samples", "supervised_tokens"))
    one = summarise_run(run, samples[1] + samples[0] / 2)
    expected = np.average(run.steps["loss"][-2:], weights=tokens * (0.5, 1.0))
    assert one.loss_end == pytest.approx(expected, rel=1e-9) != pytest.approx(run.steps["loss"][-1], rel=1e-4)


def test_the_table_of_losses_begins_where_the_first_step_has_ended(tmp_path: Path) -> None:
    runs = [made_run(tmp_path, f"{size}", steps=80 // size, samples_per_step=size) for size in (2, 16)]
    points = runs_content(runs)["along"]
    assert [point["samples"] for point in points] == [20.5, 41.0, 61.5, 82.0], "not 8.2, which is in a first step"
    assert all(loss is not None for point in points for loss in point["losses"])


def test_evaluations_that_lack_samples_are_not_compared(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, Made(steps=60, evaluate=10)) for name in ("a", "b")]
    both = compare_runs([read_run(folder) for folder in folders])
    assert both is not None
    assert both.evaluated
    path = folders[1] / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [{**line, "eval_failures": 1} if line["kind"] == "eval" else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    both = compare_runs([read_run(folder) for folder in folders])
    assert both is not None
    assert not both.evaluated


def test_a_loss_that_still_falls_is_told_from_noise(tmp_path: Path) -> None:
    falls, ended, noisy = (
        runs_content([made_run(tmp_path, name, steps=60, **changes)])["lead"]
        for name, changes in {
            "falls": {"noise": 0.002, "half": 2000.0},
            "ended": {"noise": 0.002, "half": 50.0},
            "noisy": {"noise": 0.5, "half": 2000.0, "seed": 2},
        }.items()
    )
    assert "still falling: by " in falls
    assert "still falling" not in ended + noisy


def test_noise_is_what_single_steps_make_of_a_loss(tmp_path: Path) -> None:
    """Runs that differ by their seed alone: how far apart their losses are lies within it."""
    found = []
    for noise in (0.002, 0.3):
        pair = [made_run(tmp_path, f"{noise}-{at}", noise=noise, seed=at, evaluate=0, steps=60) for at in (1, 2)]
        both = compare_runs(pair)
        assert both is not None
        assert both.noise is not None
        assert both.apart is not None
        found.append(both)
    assert found[0].noise < 0.02 < found[1].noise
    assert found[1].apart <= found[1].noise
    assert compare_runs([replace(run, evaluations=()) for run in pair[:1] * 2]).apart == 0
