"""A whole study: its numbers agree with each other, and the recommendation follows from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from asking import study_of
from made_tables import TEXT, TWO_B, Columns, detection, films, texts, write_table

from packtrain.app.measure import measure
from packtrain.config.run_config import load_config
from packtrain.core.errors import ConfigError
from packtrain.core.numbers import percent
from packtrain.families.model_folder import resolve_model
from packtrain.planning.configs import MOVED
from packtrain.planning.question import Baseline
from packtrain.planning.study import StudyOutcome, StudyProgress
from packtrain.planning.study_values import Study
from packtrain.planning.sweep import step_shape
from packtrain.predicting.shapes import read_shape
from packtrain.predicting.values import TrainingSetup
from packtrain.records.synthetic import write_dataset

TODAY = Baseline(
    learning_rate=1e-4, vit_lr=1e-5, aligner_lr=2e-5, warmup_ratio=0.03, eval_steps=20, save_steps=40, logging_steps=5
)


def outcome(folder: Path, columns: Columns, **given: Any) -> StudyOutcome:
    return study_of(write_table(folder, columns), **{"gpus": 4, "baseline": TODAY, **given})


def check(found: StudyOutcome) -> None:
    """What every study must satisfy."""
    study, plan = found.study, found.plan
    recommendation, chosen = study.recommendation, study.simulations[study.recommendation.simulation]
    counts = plan.summary.epochs[0]
    assert (counts.packs, counts.bound, counts.dropped) == (chosen.packs, chosen.bound, chosen.samples_dropped)
    assert counts.fill == pytest.approx(chosen.fill)
    assert study.memory.estimate.total == chosen.memory_bytes
    assert study.ledger.get("pack: fits no pack", 0) == chosen.samples_dropped
    own, best = study.padded[0], study.padded[-1]
    assert own.real_tokens >= best.real_tokens == counts.totals["tokens"]
    assert (own.kernels, best.kernels) == ("own", "packs")
    assert study.gain == pytest.approx(chosen.tokens_per_second / best.tokens_per_second)
    fitting = max(run.tokens_per_second for run in study.padded if run.fits or run is own)
    assert not recommendation.packing or chosen.tokens_per_second > fitting, "padding is predicted to be faster"
    assert chosen.tokens_per_second / own.tokens_per_second == pytest.approx(chosen.speedup)
    assert {run.order for run in study.padded} == {"random", "by_length"}
    pack = plan.epoch(0).pack(study.memory.worst_pack)
    assert len(study.memory.worst_samples) == len(np.unique(pack.rows))
    for shown in study.picture:
        assert shown.tokens == sum(sample.tokens for sample in shown.samples) <= chosen.packing_length
    check_config(study, recommendation.config, recommendation.simulation, packed=recommendation.packing)
    words = [one.reason for one in (*recommendation.reasons, *recommendation.alternatives)]
    assert not [text for text in words if re.search(r"[+-][\d.]+ %(?! against )", text)], "a change of what?"
    for other in recommendation.alternatives:
        assert other.simulation != recommendation.simulation
        check_config(study, other.config, other.simulation, packed=True)
    assert recommendation.verdict
    assert recommendation.advice
    named = [reason.parameter for reason in recommendation.reasons]
    assert len(named) == len(set(named)), "a parameter has two reasons"


def check_config(study: Study, config: Mapping[str, Any], at: int, *, packed: bool) -> None:
    """A config says what its simulation did."""
    one, data, training = study.simulations[at], config["data"], config["training"]
    assert set(config) == {"model", "data", "training"}
    assert data["packing"] == packed
    assert data["packing_length"] == one.packing_length
    assert training["num_train_epochs"] == study.epochs
    bound_to_gpus = {"gradient_accumulation_steps", "packs_per_step"}
    assert not bound_to_gpus & set(training), "a step is counted in samples, whatever it is trained on"
    samples = training["effective_batch_size"]
    if packed:
        assert min(step_shape(samples, one.samples_per_pack, study.gpus).packs, one.packs) == one.packs_per_step
        assert samples == study.baseline.effective_batch_size or samples == round(one.samples_per_step)
        assert {name: data[name] for name in one.limits} == one.limits
    else:
        assert samples == study.baseline.effective_batch_size


EVALUATED = {"data": {"eval_path": "held_out.jsonl"}}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> StudyOutcome:
    return outcome(
        tmp_path_factory.mktemp("large") / "t", detection(8_000), lengths=[8_000, 16_000, 20_000], base=EVALUATED
    )


def test_a_detection_set_is_packed_at_the_bound_and_packing_is_recommended(large: StudyOutcome) -> None:
    check(large)
    study = large.study
    at_20k = next(one for one in study.simulations if one.packing_length == 20_000)
    assert at_20k.packs <= at_20k.bound + 1
    assert at_20k.samples_dropped < 0.005 * 8_000
    assert study.recommendation.packing
    assert study.recommendation.mean_share < 0.5
    assert "below 50 %" in study.recommendation.rule_of_thumb
    assert study.padded[0].waste > 0.25
    chosen = study.simulations[study.recommendation.simulation]
    assert chosen.fits
    assert chosen.speedup > 2
    assert chosen.samples_per_step == pytest.approx(128, rel=0.1)


def test_intervals_and_rates_of_the_config_follow_the_baseline(large: StudyOutcome) -> None:
    training = large.study.recommendation.config["training"]
    chosen = large.study.simulations[large.study.recommendation.simulation]
    for name, before in (("eval_steps", 20), ("save_steps", 40)):
        assert training[name] * chosen.samples_per_step == pytest.approx(before * 128, rel=0.06)
    assert training["save_steps"] == 2 * training["eval_steps"]
    assert training["warmup_ratio"] == 0.03
    assert training["aligner_lr"] == pytest.approx(2e-5, rel=0.06)
    named = {reason.parameter for reason in large.study.recommendation.reasons}
    expected = {"packing", "packing_length", "effective_batch_size", "eval_steps", "vit_lr", "overlong"}
    assert expected <= named


def test_savings_hold_for_the_worst_pack_and_other_limits_were_packed(large: StudyOutcome) -> None:
    memory = large.study.memory
    for saving in memory.savings:
        assert saving.bytes == memory.estimate.total - saving.total_after
        assert saving.seconds
    options = [saving.option for saving in memory.savings]
    assert {"max_images_per_pack", "max_patches_per_pack", "packing_length"} <= set(options)
    assert options.count("max_patches_per_pack") == 2, "at several values"
    shorter = next(saving for saving in memory.savings if saving.option == "packing_length")
    assert shorter.lost > 0
    assert memory.worst_bytes <= memory.estimate.total
    assert sum(memory.vision_layer.values()) > memory.vision_layer["MLP"] > 0
    assert memory.host.memory_bytes > 0
    assert any("needs the most memory" in sentence for sentence in memory.sentences)


def test_what_was_is_only_said_of_a_run_that_is_trained(large: StudyOutcome, tmp_path: Path) -> None:
    assert not any(reason.baseline for reason in large.study.recommendation.reasons), "nobody trains so"
    given = {
        "baseline": Baseline(today=True, eval_steps=20, save_delay_steps=5_000),
        "base": {"data": {"packing": False}},
    }
    reasons = outcome(tmp_path / "t", detection(500), lengths=[16_000], **given).study.recommendation.reasons
    was = {reason.parameter: reason.baseline for reason in reasons}
    assert (was["packing"], was["effective_batch_size"], was["save_delay_steps"]) == ("false", "128", "5000")
    assert "eval_steps" not in was, "the config has no evaluation"
    delay = next(reason for reason in reasons if reason.parameter == "save_delay_steps")
    assert "half of the run" in delay.reason


def test_what_may_go_wrong_is_said_with_numbers_of_this_plan(large: StudyOutcome) -> None:
    found = {one.sign: one.action for one in large.study.recommendation.trouble}
    chosen = large.study.simulations[large.study.recommendation.simulation]
    assert f"{chosen.memory_bytes / 2**30:.1f} GiB" in found["Out of memory"]
    assert "fsdp" in found["Out of memory"]
    assert "learning_rate 0.0001 -> 5e-05" in found["The loss jumps or becomes NaN"]
    assert f"num_train_epochs 1 -> 2: {2 * chosen.steps:,} steps" in found["The loss falls too slowly"]
    assert "images or frames a second" in found["Fewer samples per second than predicted"]


def test_balance_is_shown_for_ranks_that_have_packs(large: StudyOutcome) -> None:
    rows = large.study.balance
    assert [row.ranks for row in rows] == [4, 8, 32]
    for row in rows:
        assert 1 <= row.strict.slowest <= row.sorted.slowest <= row.random.slowest


def test_overlong_samples_are_named_with_a_length_that_keeps_them(large: StudyOutcome) -> None:
    dropped = large.study.simulations[large.study.recommendation.simulation].samples_dropped
    assert dropped > 0
    text = next(line for line in large.study.recommendation.advice if "fit no pack" in line)
    longest = int(large.study.dataset.statistics["tokens"]["max"])
    assert f"{dropped:,} sample" in text
    assert f"{longest:,}" in text


def test_samples_near_the_limit_are_not_packed(tmp_path: Path) -> None:
    lengths = np.append(np.random.default_rng(0).integers(3700, 4096, 600), [150] * 20)
    found = outcome(tmp_path / "t", texts(lengths), shape=TEXT, gpus=1, gpu="a10", lengths=[4096])
    check(found)
    recommendation = found.study.recommendation
    one = found.study.simulations[0]
    assert one.samples_per_pack > 1
    assert one.speedup > 1.05, "the better kernel must not pass for a gain of packing"
    assert any("but not by packing" in line for line in recommendation.advice)
    assert not recommendation.packing
    assert recommendation.mean_share > 0.7
    assert "Do not pack" in recommendation.verdict
    assert "above 70 %" in recommendation.rule_of_thumb
    best = found.study.padded[-1]
    assert recommendation.config["training"]["per_device_train_batch_size"] == best.batch_size
    assert f"batches of {best.batch_size} are {percent(best.waste)} padding; a pack" in recommendation.verdict
    reasons = {reason.parameter: reason.reason for reason in recommendation.reasons}
    assert reasons["packing_length"].startswith("longer samples would be left out, but none is: the longest has 4,0")
    lines = (recommendation.verdict, recommendation.rule_of_thumb, *recommendation.advice)
    assert not any("your current run" in line for line in lines)


def test_a_model_that_cannot_be_packed_is_padded(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(20, 400, 600)
    given = {"shape": TEXT, "gpus": 1, "gpu": "a10", "lengths": [4096]}
    assert outcome(tmp_path / "t", texts(lengths), **given).study.recommendation.packing
    found = outcome(tmp_path / "u", texts(lengths), **given, unpackable="its layers carry state along the row")
    check(found)
    recommendation = found.study.recommendation
    assert not recommendation.packing
    assert recommendation.config["data"]["packing"] is False
    assert "packing is not possible with this model (its layers carry state" in recommendation.verdict
    assert not recommendation.alternatives


def test_between_the_rules_the_measured_padding_decides(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(200, 4800, 3000)
    small = {"shape": TEXT, "gpus": 1, "gpu": "a10", "lengths": [4096]}
    found = outcome(tmp_path / "t", texts(lengths), **small)
    check(found)
    assert 0.5 < found.study.recommendation.mean_share < 0.7
    assert "says nothing" in found.study.recommendation.rule_of_thumb
    assert found.study.padded[0].waste > 0.2
    assert not found.study.recommendation.packing, "many rows at once are faster than one short pack"
    few = outcome(tmp_path / "u", texts(lengths), baseline=Baseline(effective_batch_size=2), **small)
    check(few)
    assert few.study.recommendation.packing
    assert f"{few.study.gain:.2f} times as fast as the best padding" in few.study.recommendation.verdict


def test_a_step_has_no_more_samples_than_the_data(tmp_path: Path) -> None:
    found = outcome(tmp_path / "t", texts(np.arange(60, 72)), shape=TEXT, gpus=2, gpu="a10")
    check(found)
    one, recommendation = found.study.simulations[0], found.study.recommendation
    assert (one.samples_per_step, one.packs_per_step, one.steps) == (12, one.packs, 1)
    assert recommendation.config["training"]["learning_rate"] == 1e-4, "rates stay: a step has what it had"


def test_one_sample(tmp_path: Path) -> None:
    found = outcome(tmp_path / "t", texts(np.array([77])), shape=TEXT, gpus=2, gpu="a10")
    check(found)
    assert not found.study.recommendation.packing
    assert found.study.simulations[0].packs == 1
    assert found.study.balance == ()


def test_a_text_model_has_no_vision_anywhere(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(30, 900, 2000)
    found = outcome(tmp_path / "t", texts(lengths), shape=TEXT, gpus=8, gpu="a10")
    check(found)
    assert found.study.recommendation.packing
    assert found.study.memory.estimate.part("vision activations").bytes == 0
    assert [group.name for group in found.study.dataset.by_modality] == ["text"]


def test_videos_that_do_not_fit_get_a_limit_on_patches(tmp_path: Path) -> None:
    setup = TrainingSetup(gpus=2, sharding="fsdp")
    found = outcome(
        tmp_path / "t", films(1200), setup=setup, gpu="a100-40", lengths=[24_000], baseline=Baseline(today=True)
    )
    check(found)
    study = found.study
    chosen = study.simulations[study.recommendation.simulation]
    assert chosen.fits
    limit = chosen.limits["max_patches_per_pack"]
    assert chosen.worst.patches <= limit
    assert chosen.fullest["patches"] > 0.5
    verdict = study.recommendation.verdict
    assert f"max_patches_per_pack {limit:,}" in verdict
    assert not study.recommendation.packing, "nearly all of the time goes into patches, packed or not"
    assert f"batches of {study.padded[-1].batch_size} are {percent(study.padded[-1].waste)} padding" in verdict
    assert "launches, fixed costs and the vision encoder, not into tokens" in verdict
    assert any("vision encoder takes" in line for line in study.recommendation.advice)
    assert abs(chosen.samples_per_step / 128 - 1) > MOVED, "packs would have other samples in a step; batches have not"
    assert not any("Learning rates" in line for line in study.recommendation.advice)


def test_options_that_make_it_fit_are_in_the_config(tmp_path: Path) -> None:
    setup = TrainingSetup(gradient_checkpointing=False)
    found = outcome(tmp_path / "t", detection(800), setup=setup, gpu="l4", lengths=[16_000])
    check(found)
    study = found.study
    assert study.simulations[study.recommendation.simulation].fits
    assert study.setup.gradient_checkpointing is True
    assert study.recommendation.config["training"]["gradient_checkpointing"] is True
    assert "gradient_checkpointing true" in study.recommendation.verdict
    asked, padded = study.memory.beside
    assert (asked.name, padded.name) == ("as requested", "default padded run")
    assert not asked.fits
    assert asked.estimate.total > study.memory.estimate.total
    assert padded.estimate.total == study.padded[0].memory_bytes
    states = {one.estimate.part("optimizer states").bytes for one in study.memory.beside}
    assert len(states) == 1, "the padded run is trained as it was asked for"
    assert "no fp32 master copies" in study.recommendation.verdict
    assert "method: lora" in study.recommendation.verdict


def test_little_room_comes_with_a_combination_that_leaves_more(tmp_path: Path) -> None:
    found = outcome(tmp_path / "t", detection(800), gpu="a100-40", gpus=2, lengths=[16_000])
    study = found.study
    assert study.memory.estimate.total > 0.6 * study.memory.gpu_bytes
    assert study.memory.comfortable is not None
    assert study.memory.comfortable.changes
    assert study.memory.comfortable.memory_bytes <= 0.6 * study.memory.gpu_bytes


def test_the_product_of_limits_counts_the_tiles_of_an_image(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    images, tiles = random.integers(1, 4, 400), random.integers(3, 30, 400)
    columns = {
        **{"tokens": 64 * tiles + 80, "image_tokens": 64 * tiles, "images": images, "patches": 1024 * tiles},
        "max_patches_per_image": np.full(400, 1024),
    }
    study = outcome(tmp_path / "t", columns, packing={"max_images_per_pack": 6}, lengths=[8192]).study
    worst = study.simulations[0].worst
    said = next(line for line in study.memory.sentences if " tiles;" in line)
    assert f"at most {worst.patches // 1024} tiles; the product of the limits is {6 * 29}" in said
    filters = [saving for saving in study.memory.savings if saving.option == "max_images_per_sample"]
    assert [saving.lost for saving in filters if saving.change.endswith("-> 2")] == [(images == 3).sum()]


@pytest.mark.parametrize("drop", [True, False])
def test_a_last_step_that_is_dropped_is_said_where_it_is_much_of_an_epoch(tmp_path: Path, drop: bool) -> None:
    packing = {"packing_drop_last": drop}
    study = outcome(tmp_path / "t", detection(300), packing=packing, lengths=[16_000], gpus=1).study
    one = study.simulations[0]
    tail = one.packs % one.packs_per_step
    assert tail > 0.05 * one.packs
    advised = [line for line in study.recommendation.advice if "packing_drop_last leaves out" in line]
    assert [f"{tail} packs of {one.packs}" in line for line in advised] == [True] * drop
    (reason,) = [one.reason for one in study.recommendation.reasons if one.parameter == "packing_drop_last"]
    assert ("every epoch leaves out" in reason) == drop


def test_a_limit_that_can_never_bind_is_named(tmp_path: Path) -> None:
    packing = {"max_images_per_pack": 306}
    found = outcome(tmp_path / "t", detection(500), packing=packing, lengths=[16_000])
    check(found)
    advice = found.study.recommendation.advice
    assert any("max_images_per_pack 306 can never bind" in line for line in advice)


def test_fewer_samples_per_step_than_a_pack_has_are_said_and_rates_move(tmp_path: Path) -> None:
    baseline = Baseline(effective_batch_size=4, per_device_train_batch_size=1, learning_rate=1e-4)
    found = outcome(tmp_path / "t", detection(500), baseline=baseline, gpus=1, lengths=[32_768])
    check(found)
    study = found.study
    chosen = study.simulations[0]
    assert chosen.packs_per_step == 1
    assert chosen.samples_per_step > 8
    assert any("instead of 4" in line for line in study.recommendation.advice)
    rate = study.recommendation.config["training"]["learning_rate"]
    assert rate == pytest.approx(1e-4 * (chosen.samples_per_step / 4) ** 0.5, rel=0.01)


def test_a_part_of_a_large_table_is_simulated_and_all_of_it_packed(tmp_path: Path) -> None:
    found = outcome(tmp_path / "t", detection(5000), lengths=[12_000, 16_000], most_rows=1000)
    study, plan = found.study, found.plan
    chosen = study.simulations[study.recommendation.simulation]
    counts = plan.summary.epochs[0]
    assert (counts.packs, counts.dropped) == (chosen.packs, chosen.samples_dropped)
    assert chosen.samples_packed + chosen.samples_dropped == 5000
    packed = study.dataset.tokens - chosen.tokens_dropped
    assert chosen.fill * chosen.packs * chosen.packing_length == pytest.approx(packed)
    assert study.memory.estimate.total == chosen.memory_bytes
    assert any("1,000 of 5,000 rows" in note for note in study.notes)


def test_a_split_plan_is_shown_in_pieces(tmp_path: Path) -> None:
    tokens, image = np.array([3000] * 40 + [20_000] * 5), np.full(45, 200)
    columns = {"tokens": tokens, "image_tokens": image, "images": np.ones(45, np.int64), "patches": 4 * image}
    found = outcome(tmp_path / "t", columns, packing={"overlong": "split"}, lengths=[8192])
    check(found)
    one = found.study.simulations[0]
    assert (one.samples_packed, one.samples_dropped) == (45, 0)
    part = outcome(tmp_path / "p", columns, packing={"overlong": "split"}, lengths=[8192], most_rows=30).study
    assert part.simulations[0].samples_packed == 45, "also where the sweep is of a part"
    assert len(found.study.picture) == one.packs, "every pack is shown"
    shown = [sample for pack in found.study.picture for sample in pack.samples]
    assert len(shown) == 40 + 5 * 3
    assert max(sample.tokens for sample in shown) == 8192
    assert sum(sample.vision_tokens for sample in shown) == image.sum(), "an image is in one piece only"


def test_overlong_error_keeps_to_lengths_that_hold_everything(tmp_path: Path) -> None:
    columns = texts(np.array([3000] * 60 + [9000]))
    found = outcome(tmp_path / "t", columns, packing={"overlong": "error"}, lengths=[8192, 10_000])
    assert [one.packing_length for one in found.study.simulations] == [10_000]
    with pytest.raises(ConfigError, match="9,000 tokens"):
        outcome(tmp_path / "u", columns, packing={"overlong": "error"}, lengths=[8192])


def test_a_study_is_the_same_twice_and_reports_progress(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t", detection(300))
    seen: list[StudyProgress] = []
    given = {"shape": TWO_B, "model": "m", "gpu": "h100", "setup": TrainingSetup(), "lengths": [8192]}
    first = study_of(table, **given, progress=seen.append).study
    second = study_of(table, **given).study
    assert first == second
    assert any("8,192" in progress.doing for progress in seen)


def test_a_measured_dataset_shows_what_smaller_images_would_save(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", pictures=24)
    model = "tiny:qwen3_vl"
    table = measure(data, model=model, out=tmp_path / "costs", workers=1, check=0, max_failure_rate=0.9)
    shape = read_shape(resolve_model(model, tmp_path / "models"))
    baseline = Baseline(effective_batch_size=8)
    result = study_of(table, shape=shape, model=model, gpu="l4", gpus=2, baseline=baseline, base=table.user_config)
    check(result)
    found = result.study
    options = [saving for saving in found.memory.savings if saving.option.startswith("max_pixels")]
    assert len(options) > 1, "several values"
    assert options[0].bytes > 0
    assert all(option.seconds and not option.lost for option in options)
    assert found.recommendation.config["data"]["dataset_path"] == str(data)
    assert sum(found.ledger.values()) == found.dataset.entries_read - found.dataset.samples
    assert found.dataset.statistics["objects"]["mean"] > 1
    assert "is a tiny model of" in found.recommendation.advice[0]


@pytest.mark.parametrize("gpu", ["h200", "v100-16"])
def test_every_config_is_one_that_a_run_accepts(tmp_path: Path, gpu: str) -> None:
    setup = TrainingSetup(gpus=4, train_vision=False)
    said = {"weight_decay": 0.1, "deepspeed": "own.json"}
    base = {"model": {"train_vision": False}, "data": {"packing_window": 300}, "training": said}
    given = {"setup": setup, "gpu": gpu, "packing": base["data"], "lengths": [8192, 12_000, 16_384], "base": base}
    recommendation = outcome(tmp_path / "t", detection(800), **given).study.recommendation
    configs = [recommendation.config, *(other.config for other in recommendation.alternatives)]
    assert len(configs) > 1
    for number, config in enumerate(configs):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(config))
        loaded = load_config(path)
        assert not loaded.notes
        assert loaded.data.packing_window == 300
        assert loaded.model.train_vision is False
        assert loaded.training.weight_decay == 0.1
        assert (loaded.training.sharding is None) == (gpu == "h200")
        assert (loaded.training.deepspeed is None) == (gpu != "h200"), "a run refuses both"


def test_steps_of_few_packs_are_told_of_packs_that_are_alike(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).lognormal(5.1, 1, 3000).clip(20, 4096).astype(np.int64)
    usual = {"gpus": 1, "lengths": [4096]}
    few, many = Baseline(effective_batch_size=32), Baseline(effective_batch_size=512)

    def said(name: str, baseline: Baseline, **packing: str) -> list[str]:
        study = outcome(tmp_path / name, texts(lengths), baseline=baseline, packing=packing, **usual).study
        assert study.recommendation.packing
        assert (study.simulations[0].packs_per_step < 4) == (baseline is few)
        return [line for line in study.recommendation.advice if "packing_strategy: knapsack" in line]

    (line,) = said("few", few)
    alike, best_fit = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+)(?: of them|\.$)", line))
    assert alike <= 1.005 * best_fit
    assert not said("many", many)
    assert not said("alike", few, packing_strategy="knapsack")


def test_what_a_mixture_does_not_use_is_said(tmp_path: Path) -> None:
    columns = {**texts(np.arange(100, 200)), "source": np.array(["a"] * 60 + ["b"] * 40)}
    mixture = {"a": {"repeats": None, "weight": 0.2}, "b": {"repeats": None, "weight": None}}
    table = write_table(tmp_path / "t", columns, mixture=mixture)
    given = {"shape": TEXT, "model": "m", "gpu": "a10", "setup": TrainingSetup(), "lengths": [2048]}
    advice = study_of(table, **given).study.recommendation.advice
    assert any("50 samples of 100 measured records and does not use 50 of them" in line for line in advice)


def test_idle_gpus_are_said_with_what_a_larger_step_would_gain(tmp_path: Path) -> None:
    found = outcome(tmp_path / "t", detection(3000), gpus=64, lengths=[20_000])
    check(found)
    chosen = found.study.simulations[0]
    assert chosen.packs_per_step < 64
    assert not found.study.recommendation.packing
    text = next(line for line in found.study.recommendation.advice if " would be idle " in line)
    assert "64 packs per step" in text
    assert f"{64 - chosen.packs_per_step} of 64 GPUs" in text


def test_samples_beyond_the_models_context_are_named(tmp_path: Path) -> None:
    lengths = np.append(np.random.default_rng(0).integers(100, 2000, 300), 9000)
    found = outcome(tmp_path / "t", texts(lengths), shape=TEXT, gpus=1, gpu="a10", lengths=[16_384])
    check(found)
    assert any("9,000 tokens, more than the 8,192" in line for line in found.study.recommendation.advice)
