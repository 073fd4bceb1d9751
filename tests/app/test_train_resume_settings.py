"""`packtrain train --resume` with other settings: what is asked for happens and is said, or is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Run, files
from made_runs_data import write_config

from packtrain.app.train.resume import changes_note, refuse_changes
from packtrain.config.run_config import RunConfig, with_overrides
from packtrain.config.sections import ModelSection
from packtrain.core.errors import ConfigError

LORA = {"model_name_or_path": "tiny:qwen3_vl", "method": "lora", "lora_rank": 4, "lora_target_modules": ["k_proj"]}
FULL = {"model_name_or_path": "tiny:qwen3_vl"}


def refused(model: dict[str, Any], *overrides: str, **training: Any) -> str:
    """What is said about a run with these settings that is asked for others; nothing where they are taken."""
    before = RunConfig.of({"model": model, "training": training})
    try:
        refuse_changes(before, with_overrides(before, overrides))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("model", "asked", "words"),
    [
        (LORA, "model.lora_alpha=2", "model.lora_alpha: the run has 8, requested is 2"),
        (LORA, "model.lora_rank=8", "model.lora_rank: the run has 4, requested is 8"),
        (
            LORA,
            "model.lora_target_modules=[v_proj]",
            "lora_target_modules: the run has [k_proj], requested is [v_proj]",
        ),
        (LORA, "model.lora_target_modules=all", "the run has [k_proj], requested is all"),
        (LORA, "model.method=dora", "model.method: the run has lora, requested is dora"),
        (LORA, "model.use_dora=true", "model.method: the run has lora, requested is dora"),
        (LORA, "model.quantization_bit=4", "model.method: the run has lora, requested is qlora"),
        (LORA, "model.method=full", "model.method: the run has lora, requested is full"),
        (FULL, "model.method=lora", "model.method: the run has full, requested is lora"),
        (FULL, "model.train_vision=false", "model.train_vision: the run has true, requested is false"),
        (FULL, "model.train_projector=false", "model.train_projector: the run has true, requested is false"),
        (FULL, "model.train_language=false", "model.train_language: the run has true, requested is false"),
        (FULL, "training.vit_lr=0", "train_vision: the run has true, requested is false, because of training.vit_lr 0"),
        (
            LORA,
            "training.aligner_lr=1e-3",
            "has false, requested is true, because of training.aligner_lr 0.001",
        ),
        (FULL, "training.optim=sgd", "training.optim: the run has adamw_torch_fused, requested is sgd"),
        (FULL, "training.optim_args=amsgrad=True", "training.optim_args: the run has nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) and "=" in value else "",
)
def test_what_makes_other_parameters_or_states_is_refused(model: dict[str, Any], asked: str, words: str) -> None:
    said = refused(model, asked)
    assert words in said
    assert "leave these out, or start a new run in another training.output_dir" in said


@pytest.mark.parametrize(
    ("model", "asked"),
    [
        (LORA, "model.lora_dropout=0.3"),
        (LORA, "model.lora_alpha=8"),
        (LORA, "model.merge_adapters=true"),
        (FULL, "model.lora_rank=8"),
        (FULL, "model.train_vision=true"),
        (FULL, "training.vit_lr=1e-6"),
        (FULL, "training.optim=adamw_torch_fused"),
        (FULL, "training.optim=multimodal"),
        (FULL, "training.lr_scheduler_type=cosine"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_checkpoint_can_follow_is_taken(model: dict[str, Any], asked: str) -> None:
    assert refused(model, asked) == ""


def test_every_setting_of_the_model_is_known_to_be_one_or_the_other() -> None:
    """A new one has to be thought of."""
    refused = {"method", "use_dora", "quantization_bit", "lora_rank", "lora_alpha", "lora_target_modules"}
    refused |= {"train_language", "train_vision", "train_projector"}
    taken = {"lora_dropout", "merge_adapters", "dtype"}
    compared_elsewhere = {"model_name_or_path", "plugins", "vit_img_size", "mp_image_token_length"}
    assert {*ModelSection.known()} == refused | taken | compared_elsewhere


def test_schedules_that_have_come_to_their_rates_keep_them() -> None:
    plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "learning_rate": 0.01}
    said = refused(FULL, "training.learning_rate=0.1", **plateau)
    assert "training.learning_rate: the run has 0.01, requested is 0.1; reduce_lr_on_plateau continues from" in said
    assert refused(FULL, "training.weight_decay=0.1", **plateau) == ""
    assert "lr_scheduler_type: the run has reduce_lr_on_plateau" in refused(
        FULL, "training.lr_scheduler_type=cosine", **plateau
    )


def test_deepspeed_has_its_own_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("packtrain.config.setup.find_spec", lambda _: object())
    said = refused(FULL, "training.weight_decay=0.1", deepspeed="zero2", learning_rate=0.01)
    assert "training.weight_decay: the run has nothing, requested is 0.1; DeepSpeed restores it" in said


def test_all_that_is_refused_is_said_at_once() -> None:
    said = refused(LORA, "model.lora_alpha=2", "training.optim=sgd")
    assert "lora_alpha" in said
    assert "optim" in said


def test_what_is_taken_is_named_with_both_values() -> None:
    before = RunConfig.of({"model": FULL, "training": {"learning_rate": 0.01, "max_steps": 4, "output_dir": "a"}})
    asked = ("training.learning_rate=0.001", "training.warmup_steps=2", "training.output_dir=b")
    (note,) = changes_note(before, with_overrides(before, asked))
    assert note.endswith("changed settings: training.learning_rate 0.01 -> 0.001; training.warmup_steps nothing -> 2")
    assert changes_note(before, before) == ()


# ---- the command


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == "step"}


@pytest.fixture
def ended(run: Run, tmp_path: Path) -> Path:
    """The config of a run of two steps, its cosine at rate 0."""
    config = write_config(tmp_path, max_steps=2, lr_scheduler_type="cosine", packing_check=False)
    code, _, err = run("train", config)
    assert code == 0, err
    return config


@pytest.mark.full
def test_a_run_goes_on_with_what_is_asked_for(run: Run, ended: Path, tmp_path: Path) -> None:
    asked = ("training.max_steps=4", "training.learning_rate=0.004", "training.save_steps=3")
    code, out, err = run("train", ended, *asked, "--resume", "--json")
    assert code == 0, err
    folder, notes = tmp_path / "out", json.loads(out)["notes"]
    rates = [steps_of(folder)[step]["learning_rates"]["language"] for step in (3, 4)]
    assert rates == pytest.approx([0.004 * 0.5, 0.004 * 0.5 * (1 - 0.5**0.5)]), "of a cosine over four steps"
    assert (folder / "checkpoint-3").is_dir()
    assert yaml.safe_load((folder / "run.yaml").read_text())["training"]["learning_rate"] == 0.004
    (note,) = (note for note in notes if "continues with changed settings" in note)
    for words in ("learning_rate 0.01 -> 0.004", "max_steps 2 -> 4", "save_steps 100 -> 3"):
        assert f"training.{words}" in note
    code, out, err = run("train", ended, *asked, "--resume", "--json")
    assert code == 0, err
    assert not any("changed settings" in note for note in json.loads(out)["notes"]), "they are the run's own by now"


@pytest.mark.full
def test_what_is_refused_leaves_the_run_as_it_is(run: Run, ended: Path, tmp_path: Path) -> None:
    before = files(tmp_path / "out")
    for asked, words, expected in (
        ("model.method=lora", "model.method: the run has full, requested is lora", 2),
        ("training.max_steps=12", "another plan: epochs: 0.4 -> 2.4; steps: 2 -> 12", 1),
    ):
        code, _, err = run("train", ended, asked, "--resume")
        assert code == expected
        assert words in " ".join(err.split())
        assert files(tmp_path / "out") == before, "or it could not be resumed any more"


@pytest.mark.full
def test_a_run_can_be_made_shorter_but_not_than_it_is(run: Run, tmp_path: Path) -> None:
    config = write_config(tmp_path, num_train_epochs=2, save_steps=2, save_total_limit=9, packing_check=False)
    assert run("train", config)[0] == 0
    code, _, err = run("train", config, "training.num_train_epochs=1", "--resume")
    assert code == 2
    assert "5 steps, and the run has trained 10" in " ".join(err.split())
    assert "training.max_steps=10" in err
    for step in (4, 6, 8, 10):
        shutil.rmtree(tmp_path / "out" / f"checkpoint-{step}")
    code, out, err = run("train", config, "training.num_train_epochs=1", "--resume", "--json")
    assert code == 0, err
    assert (json.loads(out)["resumed"], json.loads(out)["outcome"]["samples_seen"]) == (2, 40), "one epoch, exactly"


@pytest.mark.full
def test_a_run_without_a_checkpoint_begins_anew_with_any_settings(run: Run, tmp_path: Path) -> None:
    config = write_config(tmp_path, max_steps=1, save_strategy="no", packing_check=False)
    assert run("train", config)[0] == 0
    facts = tmp_path / "out" / "run.json"
    ended = json.loads(facts.read_text())
    facts.write_text(json.dumps({**ended, "outcome": {**ended["outcome"], "status": "failed"}}))
    code, out, err = run("train", config, "model.method=lora", "--resume", "--json")
    assert code == 0, err
    assert any("starts from the beginning" in note for note in json.loads(out)["notes"])
    assert (tmp_path / "out" / "final" / "adapter_model.safetensors").exists()
