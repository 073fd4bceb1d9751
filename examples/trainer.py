"""transformers.Trainer on packs, on any number of GPUs with torchrun. Run it again after it was stopped: it goes on."""

from argparse import ArgumentParser
from pathlib import Path

import torch
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from packtrain import DatasetConfig, MultiModalDataset, PackedTrainerMixin, load_model, prepare_model


class PackTrainer(PackedTrainerMixin, Trainer):
    """Takes each rank's packs from the plan, and keeps the place in it in checkpoints."""


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    for name in ("--data", "--model", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--packing-length", type=int, help="tokens of a pack; the model's context length if left out")
    parser.add_argument("--steps", type=int, help="stop after this optimizer step instead of at the end")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)

    settings = {"packing_length": options.packing_length, "packs_per_step": 4}
    dataset = MultiModalDataset(DatasetConfig(dataset_path=options.data, model=options.model, **settings))
    dataset.build()  # before the ranks meet: how long it takes depends on the data
    steps = min(options.steps or dataset.schedule.num_steps(), dataset.schedule.num_steps())
    usual = {"learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 1, "save_steps": 100}
    usual |= {"use_cpu": not torch.accelerator.is_available()}  # or processes without GPUs are not joined
    arguments = TrainingArguments(output_dir=options.out, report_to=[], max_steps=steps, **usual)
    model = load_model(options.model)
    prepare_model(model, device=arguments.device)
    trainer = PackTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset,
        data_collator=dataset.get_collator(boundaries=True),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(options.out))
    model.save_pretrained(Path(options.out, "final"), is_main_process=trainer.is_world_process_zero())


if __name__ == "__main__":
    main()
