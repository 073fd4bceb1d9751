"""accelerate on packs: `accelerate launch` or torchrun, two processes or more. Run it again after it was stopped."""

from argparse import ArgumentParser
from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator

from packtrain import DatasetConfig, MultiModalDataset, check_ranks, load_model, prepare_model, step_tokens, token_loss


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    for name, kind in {"--data": str, "--model": str, "--out": str, "--packing-length": int, "--steps": int}.items():
        parser.add_argument(name, type=kind, required=kind is str)
    options = parser.parse_args()
    (out := Path(options.out)).mkdir(parents=True, exist_ok=True)
    settings = {"packing_length": options.packing_length, "packs_per_step": 4}
    dataset = MultiModalDataset(DatasetConfig(dataset_path=options.data, model=options.model, **settings))
    dataset.build()  # before the processes meet: it may take long
    accelerator = Accelerator(cpu=not torch.accelerator.is_available())  # or it does not join processes on CPUs
    ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    check_ranks(**ranks)
    model = load_model(options.model).to(accelerator.device).train()
    prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    loader = dataset.loader(dataset.get_collator(boundaries=True), span="run", **ranks)  # not for `prepare`
    parts, step = {"model": model, "optimizer": optimizer, "loader": loader}, 0
    if (out / "state.pt").exists():
        state = torch.load(out / "state.pt", map_location="cpu")  # each part moves what is its own
        step = state["step"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    trained, prepared = accelerator.prepare(model, optimizer)
    batches, last = iter(loader), min(options.steps or loader.num_steps, loader.num_steps)
    while step < last:
        batch = next(batches).to(accelerator.device)
        labels, ends = batch.pop("labels"), batch.info.keys[0].last
        with nullcontext() if ends else accelerator.no_sync(trained):
            loss = token_loss(trained(**batch), labels, step_tokens(loader.schedule, batch))
            accelerator.backward(loss * accelerator.num_processes)  # gradients become the mean over processes
        if ends:
            accelerator.clip_grad_norm_(trained.parameters(), 1.0)
            prepared.step()
            prepared.zero_grad()
            step += 1
            if step % 100 == 0 or step == last:
                accelerator.save({"step": step, **{name: parts[name].state_dict() for name in parts}}, out / "state.pt")
    model.save_pretrained(out / "final", is_main_process=accelerator.is_main_process)


if __name__ == "__main__":
    main()
