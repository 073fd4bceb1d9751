"""Unlisted models on two ranks, of which one has no images in some step: none waits, and gradients are those of one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_run import Gradients, Recording, arguments, losses
from test_trainer_sharded import as_launched, fresh

from packtrain import DatasetConfig, MultiModalDataset
from packtrain.modeling.load import build_model
from packtrain.modeling.preparation import prepare_model
from packtrain.training.step_settings import StepSettings

sys.path.append(str(Path(__file__).parents[1] / "delivery"))
from processes import run_ranks
from unlisted_data import weights_of, write_chats

pytestmark = pytest.mark.full
MISTRAL = "mistral3"
CASES = [(name, packing) for name in ("glm4v", MISTRAL, "aya_vision") for packing in (True, False)]
CASES += [("mllama", False)]  # it has no method to run its encoder by itself
STEPS = 2


def packs(model: str, place: str, packing: bool) -> MultiModalDataset:
    """Two packs a step, of one or two samples each; one sample in five has a picture."""
    data = MultiModalDataset(
        DatasetConfig(
            dataset_path=str(write_chats(Path(place) / "data", 16, pictures=(0, 0, 0, 0, 1))),
            model=model,
            cache_dir=str(Path(place) / "cache"),
            packing=packing,
            packing_length=160,
            packs_per_step=2 if packing else 4,
            rows_per_batch=1 if packing else 2,
            epochs=1,
            workers=1,
            check=0,
        )
    )
    os.environ["PACKTRAIN_CACHE"] = str(Path(place) / "cache")
    data.build()
    return data


class Counting(Recording):
    """Keeps how many images each batch has."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        self.images = [*getattr(self, "images", []), inputs.info.images]
        return super().training_step(model, inputs, num_items_in_batch)


def train(rank: int, world_size: int, model: str, place: str, folder: str, packing: bool) -> Any:
    as_launched(rank, world_size)
    fresh("ddp")
    data, seen = packs(model, place, packing), Gradients()
    made = build_model(model)
    if packing:
        prepare_model(made, attn_implementation="sdpa", contract=data.contract)
    # Looking for unused weights is what unlisted models do by default; without it the small image has to be enough.
    looks = {"ddp_find_unused_parameters": False} if MISTRAL in model else {}
    options: dict[str, Any] = {
        **looks,
        "save_strategy": "no",
        "max_steps": STEPS,
        "max_grad_norm": 0.0,
        "ddp_backend": "gloo",
    }
    trainer = Counting(
        model=made,
        args=arguments(data, Path(folder), lr_scheduler_type="constant", learning_rate=1e-3, **options),
        train_dataset=data,
        watch_deadline=30.0,
        callbacks=[seen],
        step=StepSettings(loss_chunk=16),
    )
    trainer.train()
    gradients = {name: gradient.numpy() for name, gradient in seen.found.items()}  # tensors would die with this process
    return trainer.trained, trainer.images, gradients, losses(trainer)


@pytest.mark.parametrize(("model_type", "packing"), CASES)
def test_a_rank_without_images_takes_part_and_gradients_are_those_of_one_rank(
    model_type: str, packing: bool, tmp_path: Path
) -> None:
    model, place = str(weights_of(model_type)), str(tmp_path)
    packs(model, place, packing)  # measured once
    answers = {}
    for world in (1, 2):
        out = tmp_path / f"out-{world}"
        answers[world] = run_ranks(
            world, train, world, model, place, str(out), packing, folder=tmp_path / f"met-{world}"
        )
        for answer in answers[world]:
            if isinstance(answer, Exception):
                raise answer
    (alone,), (first, second) = answers[1], answers[2]
    pairs = list(zip(first[1], second[1], strict=True))
    assert any((one == 0) != (other == 0) for one, other in pairs), pairs
    assert sorted(one for rank in (first, second) for ids in rank[0] for one in ids) == sorted(
        one for ids in alone[0] for one in ids
    )
    assert first[2].keys() == second[2].keys() == alone[2].keys()
    for name, gradient in alone[2].items():
        assert np.array_equal(first[2][name], second[2][name]), name
        assert np.abs(first[2][name] - gradient).max() < 1e-5 * max(1.0, np.abs(gradient).max()), name
    assert first[3] == pytest.approx(alone[3], rel=1e-5)
