"""Unlisted models are trained: on padded rows always, on packs where the check has passed, which is kept."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments
from unlisted_runs import OWN_CACHE, SAMPLES, go_on, run, steps, trained, weights_of

from packtrain.core.errors import ConfigError, PacktrainError
from packtrain.delivery.collate.collators import PackCollator
from packtrain.delivery.encode import joins
from packtrain.families.family import BatchContract
from packtrain.training import first_packs
from packtrain.training.trainer import PackedTrainer

pytest.importorskip("torch")
PROVEN = ("glm4v", "mistral3")
MORE_PROVEN = (
    *("aya_vision", "cohere_compass", "deepseek_vl", "ernie4_5_vl_moe", "gemma4", "glm_ocr", "idefics2", "janus"),
    *("kimi_k25", "llava_next_video", "muse_spark", "ovis2", "qwen3_vl_moe", "video_llama_3", "vipllava"),
)
PADDED_ONLY = ("llama4", "lfm2_vl", "mllama", "qwen3_5")


def _full(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache in which no check is kept."""
    monkeypatch.setenv(OWN_CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


# ---- two steps


@pytest.mark.parametrize("model_type", [*PROVEN, *_full(MORE_PROVEN)])
def test_packed_and_padded_training_take_the_same_first_step(model_type: str) -> None:
    found = {}
    for packing in (True, False):
        outcome = trained(model_type, packing=packing)
        report = outcome.ready.packing_check
        assert report is not None
        assert report.passed
        assert report.rows == ("packed" if packing else "padded")
        assert {"text", "image", "images"} <= set(report.kinds)
        found[packing] = first, second = steps(outcome)
        assert first["samples"] == second["samples"] == SAMPLES
        assert first["images"] == 12
        assert second["loss"] < first["loss"]
    for name in ("loss", "supervised_tokens", "tokens", "patches"):
        assert found[True][0][name] == pytest.approx(found[False][0][name], rel=1e-5), name
    assert found[True][0]["grad_norm"] == pytest.approx(found[False][0]["grad_norm"], rel=1e-3)
    assert found[True][1]["loss"] == pytest.approx(found[False][1]["loss"], rel=1e-3)


@pytest.mark.parametrize("model_type", ["lfm2_vl", *_full(PADDED_ONLY[:1] + PADDED_ONLY[2:])])
def test_what_cannot_be_packed_is_trained_on_padded_rows(model_type: str) -> None:
    with pytest.raises(ConfigError) as refused:
        run(model_type, packing=True)
    assert model_type in str(refused.value)
    assert "data.packing=false" in refused.value.fix
    outcome = trained(model_type, packing=False)
    assert outcome.ready.packing_check is not None
    first, second = steps(outcome)
    assert math.isfinite(first["loss"])
    assert second["loss"] < first["loss"]


def test_a_resumed_run_is_the_whole_run() -> None:
    settings: dict[str, Any] = {"training__packs_per_step": 1, "training__max_steps": 3, "training__save_steps": 2}
    whole = run("glm4v", packing=True, **settings)
    expected = [(step["samples"], step["loss"]) for step in steps(whole)]
    shutil.rmtree(whole.folder / "checkpoint-3")
    outcome = go_on(whole.folder)
    assert outcome.ready.resumed == 2
    report = outcome.ready.packing_check
    assert report is not None
    assert report.passed
    assert not report.kept  # its weights are others than those of the folder
    found = [(step["samples"], step["loss"]) for step in steps(outcome)]
    assert len(expected) == 3
    assert found == [(samples, pytest.approx(loss, rel=1e-6)) for samples, loss in expected]


# ---- what is kept of the check


def _check(model: str | Path = "mistral3", *, packing: bool = True, **changed: Any) -> Any:
    report = run(model, packing=packing, dry_run=True, **changed).ready.packing_check
    assert report is not None
    assert report.passed
    return report


def test_a_second_start_keeps_the_outcome_and_any_change_looks_again(fresh: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(weights_of("mistral3"), tmp_path / "model"))
    first = _check(model)
    again = _check(model)
    assert (first.kept, again.kept) == (False, True)
    assert again.checks == first.checks
    assert "at an earlier start" in again.summary_lines()[0]
    assert not _check(model, data__packing_length=255).kept
    assert not _check(model, training__attn_implementation="eager").kept
    assert not _check(model, packing=False).kept
    assert _check(model, packing=False).kept
    assert _check(model).kept
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    name = next(iter(sorted(weights)))
    save_file({**weights, name: weights[name] * 1.5}, model / "model.safetensors", {"format": "pt"})
    assert not _check(model).kept


@pytest.mark.full
def test_a_check_in_another_precision_is_another_check(fresh: Path) -> None:
    assert [_check(model__dtype=dtype).kept for dtype in ("fp32", "bf16", "fp32", "bf16")] == [False, False, True, True]


@pytest.mark.parametrize("damage", ["cut", "changed", "failed"])
def test_a_damaged_outcome_is_not_believed(fresh: Path, damage: str) -> None:
    _check("glm4v", packing=False)
    (kept,) = (fresh / "checks").iterdir()
    text = kept.read_text()
    other = {"cut": text[:200], "changed": text.replace('"padded"', '"packed"', 1), "failed": "{}"}[damage]
    assert other != text
    kept.write_text(other)
    assert not _check("glm4v", packing=False).kept
    assert _check("glm4v", packing=False).kept


# ---- what never trains


def _refused(model: str | Path, *, packing: bool, **changed: Any) -> PacktrainError:
    with pytest.raises(PacktrainError) as refused:
        run(model, packing=packing, dry_run=True, **changed)
    return refused.value


def test_the_check_of_an_unlisted_model_cannot_be_turned_off() -> None:
    error = _refused("mistral3", packing=True, training__packing_check=False)
    assert error.where == "training.packing_check"
    assert "'mistral3'" in str(error.got)
    assert "data.packing=false" in error.fix
    assert _check(packing=False, training__packing_check=False).passed  # rows are looked at all the same


def _no_checks(cache: Path) -> bool:
    """Nothing is kept of a check that failed."""
    return not list((cache / "checks").glob("*")) if (cache / "checks").exists() else True


def test_a_failing_check_is_named_and_padded_rows_are_offered(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = PackCollator.__call__

    def sizes_in_another_order(self: Any, rows: Any) -> Any:
        batch = right(self, rows)
        if len(batch.get("image_sizes", ())) > 1:
            batch["image_sizes"] = batch["image_sizes"].flip(0)
        return batch

    monkeypatch.setattr(PackCollator, "__call__", sizes_in_another_order)
    error = _refused("mistral3", packing=True)
    assert "hidden states" in str(error)
    assert "where 1e-05 is allowed" in str(error)
    assert "data.packing=false" in error.fix
    assert "packing_check=False" not in error.fix
    assert _no_checks(fresh)


def test_a_row_that_does_not_run_is_said(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = joins._join
    monkeypatch.setattr(
        joins, "_join", lambda name, *rest: "images" if name == "image_sizes" else right(name, *rest)
    )  # along the wrong dimension
    error = _refused("mistral3", packing=True)
    assert "a packed row does not run" in str(error)
    assert "data.packing=false" in error.fix
    assert _no_checks(fresh)


def test_packs_that_cannot_be_read_offer_no_way_around_the_check(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_packs, "_samples_of_pack", lambda dataset, key: ())
    error = _refused("mistral3", packing=True)
    assert "nothing to check in the first 8 packs" in str(error)
    assert "packing_check=False" not in error.fix


def test_a_type_that_the_proof_refutes_is_not_trained_on_packs(fresh: Path) -> None:
    error = _refused("minimax_m3_vl", packing=True)
    assert "hidden states" in str(error)
    assert "data.packing=false" in error.fix
    assert _no_checks(fresh)


@pytest.mark.parametrize("packing", [True, False])
def test_norms_over_a_batch_are_refused_by_name(packing: bool) -> None:
    error = _refused("emu3", packing=packing)
    assert "8 BatchNorm layers" in str(error.got)
    assert "mix the samples of a batch" in str(error.got)


def test_an_encoder_that_sees_the_padding_of_others_is_found(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel

    right = PixtralVisionModel.forward

    def forward(self: Any, pixel_values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        outputs = right(self, pixel_values, *args, **kwargs)
        outputs.last_hidden_state[..., 0] += pixel_values.shape[-1] / 100
        return outputs

    monkeypatch.setattr(PixtralVisionModel, "forward", forward)
    error = _refused("mistral3", packing=False)
    assert "hidden states (padded)" in str(error)
    assert "per_device_train_batch_size 1" in error.fix
    assert _no_checks(fresh)


@pytest.mark.parametrize("given", [{"packing_check": False}, {"data_collator": lambda rows: rows}])
def test_a_trainer_of_ones_own_checks_an_unlisted_model(given: dict[str, Any], tmp_path: Path) -> None:
    contract = BatchContract(model_type="glm4v", unlisted=True)
    data = SimpleNamespace(config=SimpleNamespace(packing=True), contract=contract)
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match="'glm4v', which is trained on packs only where the packing check passes"):
        PackedTrainer(model=torch.nn.Linear(1, 1), args=args, train_dataset=data, **given)
