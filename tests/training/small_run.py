"""A tiny real model, a small dataset of text and pictures, and the trainer over both."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import TrainerCallback, TrainingArguments
from transformers.utils import logging

from packtrain import DatasetConfig, MultiModalDataset
from packtrain.delivery.trainers.mixin import trainer_arguments
from packtrain.modeling.adapters import set_trainable
from packtrain.modeling.load import load_model
from packtrain.modeling.model_settings import ModelSettings
from packtrain.modeling.preparation import prepare_model
from packtrain.training.step_settings import StepSettings
from packtrain.training.trainer import PackedTrainer

sys.path.append(str(Path(__file__).parents[1] / "delivery"))  # where processes for ranks are
SAMPLES = 24
G = 3  # packs of a step


@cache
def shared() -> Path:
    """Models and measured data, made once."""
    return Path(mkdtemp(prefix="small-run-"))


def write_samples(folder: Path, samples: int = SAMPLES, *, pictures: bool = True, every: int = 3) -> Path:
    """Answers of different lengths; every third sample, or another share of them, has a picture."""
    path = folder / "data.jsonl"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(samples):
        content: list[dict[str, str]] = []
        if pictures and number % every == every // 4:
            side = 40 + 8 * (number % 4)
            Image.new("RGB", (side, side), (number * 7 % 256, 99, 90)).save(folder / f"{number}.png")
            content.append({"type": "image", "image": f"{number}.png"})
        content.append({"type": "text", "text": f"question {number}"})
        answer = " ".join(f"word{number * 5 + place}" for place in range(1 + number**2 % 23))
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"id": f"r{number}", "messages": messages}))
    path.write_text("\n".join(lines) + "\n")
    return path


def sees(family: str) -> bool:
    return family not in ("llama", "qwen3")


def dataset(family: str = "llama", *, folder: Path | None = None, **settings: Any) -> MultiModalDataset:
    """Packs of a few samples each; other settings are of DatasetConfig."""
    place = folder if folder is not None else shared() / family
    options: dict[str, Any] = {"packing_length": 176 if sees(family) else 128, "packs_per_step": G, "epochs": 2}
    options |= settings
    return _built(family, place, tuple(sorted(options.items())))


@cache
def _built(family: str, place: Path, options: tuple[tuple[str, Any], ...]) -> MultiModalDataset:
    made = MultiModalDataset(
        DatasetConfig(
            dataset_path=str(write_samples(place, pictures=sees(family))),
            model=f"tiny:{family}",
            cache_dir=str(place / "cache"),
            workers=1,
            check=0,
            **dict(options),
        )
    )
    # Folders of models are part of a plan's inputs: the same ones in every process, whatever its test has set.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACKTRAIN_CACHE", str(place / "cache"))
        made.build()
    return made


def model_of(family: str = "llama", *, dropout: float = 0.2, method: str = "full", **settings: Any) -> Any:
    """Ready for packs, in fp32, with dropout in its attention, and in its adapters where it has some."""
    model = load_model(f"tiny:{family}", cache_dir=shared() / "models")
    for module in model.modules():
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = dropout
    torch.manual_seed(1)  # adapters are drawn
    chosen = ModelSettings(name=f"tiny:{family}", method=method, lora_dropout=dropout, **settings)  # type: ignore[arg-type]
    prepare_model(model, attn_implementation="sdpa")
    return set_trainable(model, chosen)


def arguments(data: MultiModalDataset, folder: Path, **given: Any) -> TrainingArguments:
    logging.set_verbosity_error()
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "learning_rate": 0.01,
        "lr_scheduler_type": "cosine",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_steps": 1,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    derived = trainer_arguments(data.schedule, rows_per_batch=data.rows_per_batch)
    return TrainingArguments(**{**options, **derived, **given})


class Recording(PackedTrainer):
    """Keeps which samples were trained, in order."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.trained: list[tuple[str, ...]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self.trained.append(inputs.info.ids)
        return super().training_step(model, inputs, num_items_in_batch)


def trainer_of(
    data: MultiModalDataset, folder: Path, model: Any = None, *, parts: dict[str, Any] | None = None, **given: Any
) -> Recording:
    """`parts` are arguments of the trainer, everything else is one of TrainingArguments."""
    options: dict[str, Any] = {"packing_check": False, "step": StepSettings(loss_chunk=16), **(parts or {})}
    return Recording(
        model=model if model is not None else model_of(data.config.model_name.removeprefix("tiny:")),
        args=arguments(data, folder, **given),
        train_dataset=data,
        **options,
    )


def losses(trainer: PackedTrainer) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}


def weights(trainer: PackedTrainer) -> dict[str, Tensor]:
    """Of the whole model, also where it is sharded."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    return {name: whole(weight).detach().clone() for name, weight in model.named_parameters()}


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    assert left.keys() == right.keys()
    return all(torch.equal(left[name], right[name]) for name in left)


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


class Gradients(TrainerCallback):
    """Keeps the gradients of the first step, before the optimizer uses them."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if not self.found:
            named = model.named_parameters()
            self.found = {name: whole(weight.grad).clone() for name, weight in named if weight.grad is not None}
