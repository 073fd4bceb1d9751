"""A calibration predicts settings that it was not fitted to, keeps modes apart, and is kept in a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from published import CONFIGS

from packtrain.core.errors import ArtifactError
from packtrain.predicting import calibration
from packtrain.predicting.calibration import (
    Calibration,
    Fit,
    Measurement,
    allocated,
    calibration_path,
    coefficients_for,
    fit,
    leave_one_out,
    load_calibration,
    predict,
    read_calibration,
    save_calibration,
)
from packtrain.predicting.gpus import find_gpu
from packtrain.predicting.memory import DEFAULT_COEFFICIENTS, MemoryCoefficients
from packtrain.predicting.shapes import shape_from_config
from packtrain.predicting.time import Coefficients, default_coefficients, optimizer_seconds, step_time
from packtrain.predicting.values import Load, TrainingSetup

H200 = find_gpu("h200")
TRUE_TIME = Coefficients(
    matmul_efficiency=0.6,
    attention_efficiency=0.25,
    masked_attention_efficiency=0.12,
    bandwidth_efficiency=0.5,
    elementwise_passes=6.0,
    vision_factor=1.3,
    recomputed_share=0.85,
    layer_seconds=0.0008,
    waiting_seconds=0.12,
)
TRUE_MEMORY = MemoryCoefficients(activation_scale=1.2, vision_scale=0.85, attention_scale=1.3)
KEPT = TrainingSetup(gradient_checkpointing=False, vision_checkpointing=False)
LORA = replace(KEPT, method="lora", train_vision=False, train_projector=False)
FITTED = (
    ("Qwen3-VL-2B", KEPT, 8_192, 1),
    ("Qwen3-VL-2B", TrainingSetup(), 16_384, 1),
    ("Qwen3-VL-2B", LORA, 8_192, 1),
    ("Qwen3-VL-2B", TrainingSetup(attn_implementation="sdpa"), 8_192, 4),
    ("Llama-3.2-1B", KEPT, 16_384, 1),
    ("Llama-3.2-1B", TrainingSetup(), 8_192, 1),
    ("Qwen2.5-VL-3B", replace(KEPT, vision_checkpointing=True), 8_192, 1),
)
HELD_OUT = (
    ("Qwen2.5-VL-3B", LORA, 6_144, 1),
    ("Qwen3-VL-2B", TrainingSetup(), 20_000, 1),
    ("Llama-3.2-1B", replace(KEPT, attn_implementation="sdpa"), 12_288, 8),
)


def synthetic(model: str, setup: TrainingSetup, tokens: int, rows: int, *, held_out: bool = False) -> Measurement:
    """What a machine with the true coefficients would show."""
    shape = shape_from_config(CONFIGS[model])
    patches = int(1.3 * tokens) if shape.vision is not None else 0
    load = Load(
        tokens=tokens,
        squared_tokens=tokens * (1_500 if shape.vision is not None else 5_000),
        longest=min(tokens, 5_000),
        samples=max(rows, tokens // 1_300),
        rows=rows,
        supervised_tokens=tokens // 2,
        vision_tokens=patches // 4,
        patches=patches,
        squared_patches=patches * 1_400,
        largest_patches=min(patches, 1_400),
    )
    one = Measurement(
        name=f"{model} {setup} {tokens} {rows}", model=model, shape=shape, setup=setup, load=load, held_out=held_out
    )
    peak, whole = allocated(one, TRUE_MEMORY), step_time(shape, setup, load, H200, TRUE_TIME).seconds
    return replace(
        one,
        seconds=whole,
        pass_seconds=whole - optimizer_seconds(shape, setup, H200, TRUE_TIME),
        allocated=peak,
        reserved=int(1.1 * peak),
        context=700 << 20,
    )


def measured(compiled: bool = False) -> list[Measurement]:
    def one(row: tuple[str, TrainingSetup, int, int], held_out: bool) -> Measurement:
        model, setup, tokens, rows = row
        return synthetic(model, replace(setup, compiled=compiled), tokens, rows, held_out=held_out)

    return [one(row, False) for row in FITTED] + [one(row, True) for row in HELD_OUT]


def test_held_out_settings_are_predicted() -> None:
    seen = measured()
    before = predict(seen, {"eager": Fit(time=default_coefficients(), memory=DEFAULT_COEFFICIENTS)}, H200)
    assert max(abs(row.time_error) for row in before if row.held_out) > 0.15, "there is nothing to fit"
    assert max(abs(row.memory_error or 0) for row in before if row.held_out) > 0.08, "there is nothing to fit"
    after = [row for row in predict(seen, fit(seen, H200), H200) if row.held_out]
    assert len(after) == len(HELD_OUT)
    assert max(abs(row.time_error) for row in after) < 0.06
    assert max(abs(row.memory_error or 0) for row in after) < 0.03


def test_held_out_settings_are_not_looked_at() -> None:
    seen = measured()
    wrong = [
        replace(one, seconds=9 * one.seconds, allocated=9 * one.allocated) if one.held_out else one for one in seen
    ]
    assert fit(wrong, H200) == fit(seen, H200)
    failed = Measurement(
        name="failed", model="m", shape=seen[0].shape, setup=seen[0].setup, load=seen[0].load, error="out of memory"
    )
    assert fit([*seen, failed], H200) == fit(seen, H200)
    assert len(predict([*seen, failed], fit(seen, H200), H200)) == len(seen)


def test_modes_are_fitted_apart() -> None:
    slower = [replace(one, seconds=1.5 * one.seconds) for one in measured()]
    both = fit([*slower, *measured(compiled=True)], H200)
    assert set(both) == {"eager", "compiled"}
    assert both["eager"] == fit(slower, H200)["eager"]
    assert both["compiled"] == fit(measured(compiled=True), H200)["compiled"]
    assert both["compiled"].time.elementwise_passes != both["eager"].time.elementwise_passes


def test_bandwidth_is_what_the_optimizer_reaches() -> None:
    assert fit(measured(), H200)["eager"].time.bandwidth_efficiency == pytest.approx(0.5)
    unknown = [replace(one, pass_seconds=0.0) for one in measured()]
    assert fit(unknown, H200)["eager"].time.bandwidth_efficiency == default_coefficients().bandwidth_efficiency


def test_waiting_that_training_is_spared_is_told_apart() -> None:
    """What was measured with it is predicted with it; steps of training are predicted without."""
    seen = measured()
    waiting = [replace(one, waited=True) for one in seen]
    fits = fit(seen, H200)
    for plain, more in zip(predict(seen, fits, H200), predict(waiting, fits, H200), strict=True):
        setup = plain.measurement.setup
        passes = 2 if setup.train_vision and setup.vision_checkpointing else 1
        spared = plain.measurement.model == "Qwen3-VL-2B"
        expected = passes * fits["eager"].time.waiting_seconds if spared else 0.0
        assert more.seconds - plain.seconds == pytest.approx(expected)


def test_what_lies_beside_allocated_memory_is_measured_too() -> None:
    found = fit(measured(), H200)["eager"].memory
    assert found.fitted
    assert found.framework_bytes == 700 << 20
    assert found.fragmentation > 0.1, "a tenth of everything is more than a tenth of what grows with the data"


def test_without_a_gpu_only_time_is_fitted() -> None:
    seen = [replace(one, allocated=0, reserved=0, context=0) for one in measured()]
    found = fit(seen, H200)["eager"]
    assert found.time.fitted
    assert found.memory == DEFAULT_COEFFICIENTS
    assert all(row.memory_error is None for row in predict(seen, {"eager": found}, H200))


def test_leaving_one_out_judges_each_by_the_others() -> None:
    rows = leave_one_out(measured(), H200)
    assert len(rows) == len(FITTED)
    assert all(row.held_out for row in rows)
    fitted = predict(measured()[: len(FITTED)], fit(measured(), H200), H200)
    assert sum(abs(row.time_error) for row in rows) > sum(abs(row.time_error) for row in fitted)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Calibration:
    monkeypatch.setenv("PACKTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(calibration, "_installed", lambda package: "2.15.0")
    seen = tuple(measured())
    about = {"gpu": "h200", "device": "NVIDIA H200", "torch": "2.15.0", "transformers": "5.22.2", "date": "2026-11-15"}
    made = Calibration(**about, fits=fit(seen, H200), measurements=seen)
    save_calibration(made, calibration_path(H200))
    return made


def test_a_stored_calibration_comes_back_as_it_was(stored: Calibration) -> None:
    assert load_calibration(H200) == stored
    time, memory, notes = coefficients_for(H200)
    assert (time, memory) == (stored.fits["eager"].time, stored.fits["eager"].memory)
    assert "NVIDIA H200" in notes[0]
    assert load_calibration(find_gpu("a100-80")) is None


def test_what_was_measured_before_there_were_masters_had_none(stored: Calibration) -> None:
    path = calibration_path(H200)
    assert stored.measurements[0].setup.master_weights
    body = json.loads(path.read_text())
    for one in body["measurements"]:
        del one["setup"]["master_weights"]
        del one["waited"]
    path.write_text(json.dumps(body))
    assert not any(one.setup.master_weights for one in read_calibration(path).measurements)
    assert all(one.waited for one in read_calibration(path).measurements), "nor were sizes kept on the host"


def test_a_fit_of_an_earlier_form_is_made_anew(stored: Calibration) -> None:
    path = calibration_path(H200)
    body = json.loads(path.read_text())
    time = body["fits"]["eager"]["time"]
    del time["bandwidth_efficiency"]
    time["elementwise_passes"] *= 2
    path.write_text(json.dumps(body))
    assert read_calibration(path).fits == {}
    assert load_calibration(H200) == stored


def test_a_mode_that_was_not_measured_has_defaults(stored: Calibration) -> None:
    assert coefficients_for(H200, compiled=True) == (
        default_coefficients(compiled=True),
        DEFAULT_COEFFICIENTS,
        (),
    )


def test_another_torch_is_noted(stored: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_installed", lambda package: "2.16.0")
    found = load_calibration(H200)
    assert found is not None
    assert "2.15.0" in found.notes[0]
    assert "2.16.0" in coefficients_for(H200)[2][1]


@pytest.mark.parametrize("damage", ["version", "missing", "text"])
def test_another_format_is_refused_with_the_reason(stored: Calibration, damage: str) -> None:
    path = calibration_path(H200)
    body = json.loads(path.read_text())
    if damage == "version":
        body["version"] = 99
    elif damage == "missing":
        del body["fits"]["eager"]["time"]
    path.write_text("{" if damage == "text" else json.dumps(body))
    with pytest.raises(ArtifactError, match="calibration"):
        load_calibration(H200)
    time, memory, notes = coefficients_for(H200)
    assert not time.fitted
    assert not memory.fitted
    assert "not used" in notes[0]
