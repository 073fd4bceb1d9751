"""A small model with dropout under transformers.Trainer, and what it was trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from made_packs import COLLATOR, loader_of
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

from packtrain.delivery.loader.pack_loader import PackLoader
from packtrain.delivery.trainers.mixin import PackedTrainerMixin, trainer_arguments
from packtrain.delivery.trainers.token_loss import token_loss
from packtrain.packing.pack_plan import PackPlan
from packtrain.packing.schedule import Schedule

SEED = 3
G = 4  # packs of a step


class Model(nn.Module):
    """Next-token prediction with dropout: every number drawn from the global generator shows in its weights."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.drop, self.head = nn.Embedding(90, 8), nn.Dropout(dropout), nn.Linear(8, 90)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **more: Any) -> dict[str, Tensor]:
        found = {"logits": self.head(self.drop(self.embed(input_ids)))}
        if labels is not None:  # as Trainer comes
            found = {"loss": token_loss(found, labels, more.get("num_items_in_batch")), **found}
        return found


class Packs:
    """A dataset of packs that knows its own order."""

    def __init__(self, plan: PackPlan, size: int = G, log: Path | None = None) -> None:
        self.plan, self.size, self.log = plan, size, log
        self.schedule = Schedule(plan, packs_per_step=size, seed=SEED)

    def __len__(self) -> int:
        return self.plan.num_packs

    def get_collator(self) -> Any:
        return COLLATOR

    def loader(self, **options: Any) -> PackLoader:
        assert options.pop("collator", COLLATOR) in (COLLATOR, None)
        return loader_of(self.plan, self.size, log=self.log, seed=SEED, **options)


class Recording:
    """Keeps which packs were trained, in order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trained: list[Any] = []
        self.epochs: list[float] = []

    def training_step(self, model: Any, inputs: Any, *more: Any, **options: Any) -> Any:
        self.trained.append(tuple(inputs.info.keys[0][:2]) if hasattr(inputs, "info") else inputs.pop("pack").item())
        return super().training_step(model, inputs, *more, **options)  # type: ignore[misc]


class PackTrainer(Recording, PackedTrainerMixin, Trainer):
    """Ours."""


class PlainTrainer(Recording, Trainer):
    """As it comes."""


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    logging.set_verbosity_error()
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "learning_rate": 0.05,
        "lr_scheduler_type": "cosine",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_steps": 1,
        "dataloader_pin_memory": False,
        "seed": 5,
    }
    return TrainingArguments(**{**options, **given})


def trainer_of(data: Packs, folder: Path, **given: Any) -> PackTrainer:
    args = arguments(folder, **{**trainer_arguments(data.schedule), **given})
    return PackTrainer(model=Model(), args=args, train_dataset=data)


def weights(trainer: Trainer) -> list[Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model)
    return [weight.detach().clone() for weight in model.parameters()]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
