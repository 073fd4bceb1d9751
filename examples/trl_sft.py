"""trl.SFTTrainer on packs, images included. Run it again after it was stopped, and it goes on where it was."""

from argparse import ArgumentParser
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoProcessor
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from packtrain import DatasetConfig, MultiModalDataset, PackedTrainerMixin, load_model, prepare_model, trainer_arguments
from packtrain.core import cache_dir
from packtrain.families import resolve_model


class ShownNumbers(SFTTrainer):
    """TRL looks for a `datasets` type: it is shown the numbers of packs, and trains the packs."""

    def __init__(self, *, train_dataset: MultiModalDataset, **options: object) -> None:
        super().__init__(train_dataset=Dataset.from_dict({"pack": list(range(len(train_dataset)))}), **options)
        self.train_dataset = train_dataset


class PackSFTTrainer(PackedTrainerMixin, ShownNumbers):
    """Takes each rank's packs from the plan, and keeps the place in it in checkpoints."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    for name, kind in {"--data": str, "--model": str, "--out": str, "--packing-length": int, "--steps": int}.items():
        parser.add_argument(name, type=kind, required=kind is str)
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    settings = {"packing_length": options.packing_length, "packs_per_step": 4}
    dataset = MultiModalDataset(DatasetConfig(dataset_path=options.data, model=options.model, **settings))
    dataset.build()  # before the ranks meet: it may take long
    derived = trainer_arguments(dataset.schedule)
    derived["max_steps"] = min(options.steps or derived["max_steps"], derived["max_steps"])
    derived |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "max_length": None, "packing": False}
    usual = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "report_to": [], "bf16": torch.cuda.is_available()}
    usual |= {"use_cpu": not torch.accelerator.is_available()}  # or processes without GPUs are not joined
    arguments = SFTConfig(output_dir=options.out, logging_steps=1, save_steps=100, **usual, **derived)
    model = load_model(options.model)
    prepare_model(model, device=arguments.device)
    data = {"train_dataset": dataset, "data_collator": dataset.get_collator(boundaries=True)}
    processor = AutoProcessor.from_pretrained(resolve_model(options.model, cache_dir() / "models"))
    trainer = PackSFTTrainer(model=model, args=arguments, processing_class=processor, **data)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.out))
    model.save_pretrained(Path(options.out, "final"), is_main_process=trainer.is_world_process_zero())


if __name__ == "__main__":
    main()
