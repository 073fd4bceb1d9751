"""What a trainer leaves behind, on its model and in its folder, and what it says of samples that are missing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from small_run import SAMPLES, dataset, model_of, trainer_of

from packtrain.core.errors import PacktrainError
from packtrain.modeling.model_parts import model_parts
from packtrain.training.checkpoints import complete_checkpoints
from packtrain.training.meter import StepMeter
from packtrain.training.step_settings import StepSettings

pytestmark = pytest.mark.contract


# ---- what is left behind


def test_a_model_is_handed_on_as_it_came(tmp_path: Path) -> None:
    model, data = model_of("qwen3_vl"), dataset("qwen3_vl")
    encoder = model_parts(model).vision
    ordinary = encoder.forward
    meter = StepMeter()
    split = {"step": StepSettings(vision_batch_patches=64, loss_chunk=16), "meter": meter}
    trainer_of(data, tmp_path, model, parts=split, save_strategy="no", max_steps=1).train()
    assert encoder.forward != ordinary, "it is split"
    assert not any(weight._post_accumulate_grad_hooks for weight in model.parameters()), "the meter's hooks are gone"
    trainer_of(data, tmp_path, model)
    assert encoder.forward == ordinary
    for _ in range(2):  # as often as one likes
        trainer_of(data, tmp_path, model, parts=split)
        trainer_of(data, tmp_path, model)
    assert encoder.forward == ordinary


def test_hooks_are_gone_also_when_training_fails(tmp_path: Path) -> None:
    model = model_of()

    def fail(_: Any) -> None:
        raise RuntimeError("in the middle of it")

    parts = {"meter": StepMeter(), "on_step": fail}
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer_of(dataset(), tmp_path, model, parts=parts, save_strategy="no").train()
    assert not any(weight._post_accumulate_grad_hooks for weight in model.parameters())


@pytest.mark.more
def test_checkpoints_of_an_earlier_run_are_set_aside(tmp_path: Path) -> None:
    first = trainer_of(dataset(), tmp_path, save_steps=2, max_steps=6)
    first.train()
    with pytest.warns(UserWarning, match=r"from checkpoint-2.*set-aside-checkpoint-4, set-aside-checkpoint-6"):
        trainer_of(dataset(), tmp_path, save_steps=3, max_steps=3).train(str(tmp_path / "checkpoint-2"))
    assert [one.step for one in complete_checkpoints(tmp_path)] == [2, 3]
    with pytest.warns(UserWarning, match=r"starts again.*set-aside-checkpoint-2, set-aside-checkpoint-3"):
        trainer_of(dataset(), tmp_path, save_steps=1, max_steps=1).train()
    assert [one.step for one in complete_checkpoints(tmp_path)] == [1]
    before = complete_checkpoints(tmp_path)
    broken = trainer_of(dataset(packs_per_step=2), tmp_path, max_steps=2)
    with pytest.raises(PacktrainError):  # of another plan
        broken.train(resume_from_checkpoint=True)
    assert complete_checkpoints(tmp_path) == before, "a run that does not begin changes nothing"


# ---- samples that cannot be decoded


def test_an_evaluation_says_what_it_lacks(tmp_path: Path) -> None:
    place = tmp_path / "data"
    data = dataset("qwen2_vl", folder=place)
    trainer = trainer_of(data, tmp_path / "run", parts={"eval_dataset": data})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        whole = trainer.evaluate()
    assert (whole["eval_samples"], whole["eval_failures"]) == (SAMPLES, 0)
    for picture in list(place.glob("*.png"))[:3]:
        picture.unlink()
    with pytest.warns(UserWarning, match=f"eval: 3 of {SAMPLES} samples could not be decoded"):
        less = trainer.evaluate()
    assert (less["eval_samples"], less["eval_failures"]) == (SAMPLES - 3, 3)
    assert trainer.state.log_history[-1]["eval_failures"] == 3
