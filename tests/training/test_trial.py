"""A trial runs a setting as training would, says what its batch really was, and never takes the others with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from packtrain.core.errors import ConfigError
from packtrain.delivery.encode.synthetic_samples import Mix, SyntheticSamples, pack_lengths, row_lengths
from packtrain.families.registry import known_shapes
from packtrain.predicting.values import TrainingSetup
from packtrain.training import trial as trials
from packtrain.training.masters import MasterWeights
from packtrain.training.step_settings import LOSS_CHUNK
from packtrain.training.trial import OUT_OF_MEMORY, Trial, measure_trial

KNOWN_SHAPES = known_shapes()

CPU = torch.device("cpu")
KEPT = TrainingSetup(weights_dtype="fp32", gradient_checkpointing=False, vision_checkpointing=False)
LORA = replace(KEPT, method="lora", train_vision=False, train_projector=False)
SHORT = Mix(mean_tokens=64)
TILED: dict[str, Any] = {
    **KNOWN_SHAPES["smolvlm-2.2b"],
    "image_token_id": 511,
    "text_config": {**KNOWN_SHAPES["small-text"], "vocab_size": 512},
    "vision_config": {
        **KNOWN_SHAPES["smolvlm-2.2b"]["vision_config"],
        **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"image_size": 84, "patch_size": 14},
    },
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(setup: TrainingSetup = KEPT, **changes: Any) -> Trial:
    name = changes.pop("model", "small")
    given: dict[str, Any] = {"tokens": 160, "mix": SHORT, "steps": 2, "warmup": 1, **changes}
    return Trial(model=name, config=given.pop("config", KNOWN_SHAPES.get(name)), setup=setup, **given)


@pytest.mark.contract
@pytest.mark.parametrize(
    ("setup", "changes"),
    [
        (KEPT, {}),
        (replace(KEPT, gradient_checkpointing=True, vision_checkpointing=True), {"model": "small-wide"}),
        (replace(KEPT, attn_implementation="sdpa"), {"rows": 2, "tokens": 96}),
        (LORA, {"model": "small-text"}),
        (replace(KEPT, chunked_loss=False), {"config": TILED, "model": "tiled"}),
    ],
    ids=["packed", "recomputed", "padded", "lora", "tiles"],
)
def test_a_trial_measures_a_step_and_knows_its_batch(setup: TrainingSetup, changes: dict[str, Any]) -> None:
    trial = small(setup, **changes)
    found = measure_trial(trial, CPU)
    assert found.error == ""
    assert 0 < found.pass_seconds < found.seconds
    assert (found.allocated, found.reserved, found.context) == (0, 0, 0), "there is no GPU to ask"
    load = found.load
    assert load.tokens == 160 if trial.rows is None else load.tokens == 2 * 96
    assert load.rows == (trial.rows or 1)
    assert 0 < load.supervised_tokens < load.tokens
    assert load.longest <= trial.tokens
    if found.shape.vision is not None:
        assert load.patches == load.vision_tokens * found.shape.vision.patches_per_token > 0
        assert load.largest_patches**2 <= load.squared_patches <= load.patches**2
    assert found.mode == "eager"


def test_a_step_really_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[Any] = []
    monkeypatch.setattr(trials, "build", lambda *args: models.append(build(*args)) or models[-1])
    measure_trial(small(), CPU)
    (model,) = models
    untouched = build(KNOWN_SHAPES["small"], CPU, torch.float32)
    pairs = zip(model.parameters(), untouched.parameters(), strict=True)
    assert all(not torch.equal(now, before) for now, before in pairs)
    assert all(weight.grad is not None for weight in model.parameters()), "gradients stay, as when they accumulate"


build = trials.build


@pytest.mark.parametrize("masters", [True, False])
def test_it_is_trained_with_the_optimizer_of_the_setup(masters: bool) -> None:
    setup = replace(KEPT, weights_dtype="bf16", attn_implementation="sdpa", master_weights=masters)
    made = trials._Run(small(setup), CPU)
    assert isinstance(made._optimizer, MasterWeights) == masters
    made._step(lambda: None)
    kept = {name for state in made._optimizer.state.values() for name in state}
    assert kept == {"step", "exp_avg", "exp_avg_sq", *(["master"] if masters else [])}


@pytest.mark.parametrize("masters", [True, False])
def test_adapters_have_the_precision_of_the_setup(masters: bool) -> None:
    made = trials._Run(
        small(replace(LORA, weights_dtype="bf16", attn_implementation="sdpa", master_weights=masters)), CPU
    )
    assert {weight.dtype for weight in made._trained} == {torch.bfloat16 if masters else torch.float32}
    made._step(lambda: None)
    assert isinstance(made._optimizer, MasterWeights) == masters


def test_too_little_memory_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trials._Run, "_step", fail)
    found = measure_trial(small(held_out=True), CPU)
    assert (found.error, found.seconds, found.held_out) == (OUT_OF_MEMORY, 0.0, True)


def test_what_does_not_run_is_a_result_and_a_mistake_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(trials._Run, "_step", fail)
    assert measure_trial(small(), CPU).error == "RuntimeError: no kernel for this"
    gemma = {"model_type": "gemma3", "vision_config": {"model_type": "siglip_vision_model"}, "text_config": {}}
    with pytest.raises(ConfigError, match="synthetic images"):
        measure_trial(small(config=gemma, model="gemma"), CPU)


@pytest.mark.parametrize("tokens", [64, 1_000, 8_192])
def test_packs_are_filled_to_the_last_token(tokens: int) -> None:
    lengths = pack_lengths(tokens, Mix(mean_tokens=200), seed=3)
    assert sum(lengths) == tokens
    assert min(lengths) >= min(tokens, 50)
    assert lengths == pack_lengths(tokens, Mix(mean_tokens=200), seed=3)


def test_rows_differ_in_length() -> None:
    lengths = row_lengths(400, 4)
    assert max(lengths) == 400
    assert len(set(lengths)) == 4


@pytest.mark.parametrize("share", [0.0, 1.0, 3.0])
def test_samples_have_the_images_that_are_asked_for(share: float) -> None:
    make = SyntheticSamples(KNOWN_SHAPES["small"], Mix(patches_per_token=share), dtype=torch.float32)
    sample = make.sample(0, 400)
    assert len(sample) == 400
    assert sample.vision is not None
    assert sample.vision.patches == pytest.approx(share * 400, rel=0.1)
    assert sample.vision.patches == len(sample.media.get("pixel_values", ()))
    assert int(sample.labels[0]) == -100


def test_estimates_take_the_loss_in_the_chunks_that_training_takes() -> None:
    assert TrainingSetup().loss_chunk == LOSS_CHUNK


def test_a_name_says_what_a_trial_is() -> None:
    assert small().name == "small, full, packed 160, kept, eager, 64 a sample"
    assert "padded 4 x 160" in small(rows=4).name
    assert "compiled" in small(replace(KEPT, compiled=True)).name
