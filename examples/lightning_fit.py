"""Lightning on packs, on any number of devices."""

import os
from argparse import ArgumentParser

import lightning
import torch

import packtrain
from packtrain import DatasetConfig, MultiModalDataset, PackLoader, check_ranks, load_model, prepare_model
from packtrain.delivery import Batch


class PackModule(lightning.LightningModule):
    """A model and the packs it is trained on."""

    def __init__(self, model: torch.nn.Module, dataset: MultiModalDataset) -> None:
        super().__init__()
        self.model, self.dataset = model, dataset

    def train_dataloader(self) -> PackLoader:
        ranks = {"rank": self.trainer.global_rank, "world_size": self.trainer.world_size}
        check_ranks(**ranks)
        return self.dataset.loader(self.dataset.get_collator(boundaries=True), span="run", **ranks)

    def training_step(self, batch: Batch) -> torch.Tensor:
        labels = batch.pop("labels")
        loss = packtrain.token_loss(self.model(**batch), labels, packtrain.step_tokens(self.dataset.schedule, batch))
        # Lightning takes the mean over ranks and over the batches of a step; this takes both back.
        return loss * self.trainer.world_size * self.trainer.accumulate_grad_batches

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    for name, kind in {"--data": str, "--model": str, "--out": str, "--packing-length": int, "--steps": int}.items():
        parser.add_argument(name, type=kind, required=kind is str)
    options = parser.parse_args()
    settings = {"packing_length": options.packing_length, "packs_per_step": 4}
    dataset = MultiModalDataset(DatasetConfig(dataset_path=options.data, model=options.model, **settings))
    dataset.build()
    kept = {"use_distributed_sampler": False, "gradient_clip_val": 1.0, "max_epochs": 1, "logger": False}
    kept |= {"devices": int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or "auto"}  # those of torchrun, on CPUs too
    trainer = lightning.Trainer(max_steps=options.steps or -1, enable_checkpointing=False, **kept)
    trainer.accumulate_grad_batches = dataset.schedule.accumulation(trainer.world_size)
    model = load_model(options.model).train()
    prepare_model(model, device=trainer.strategy.root_device)
    trainer.fit(PackModule(model, dataset))
    model.save_pretrained(f"{options.out}/final", is_main_process=trainer.is_global_zero)


if __name__ == "__main__":
    main()
