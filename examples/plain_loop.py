"""Plain PyTorch on packs, on one device. Run it again after it was stopped, and it goes on where it was."""

from argparse import ArgumentParser
from pathlib import Path

import torch

from packtrain import DatasetConfig, MultiModalDataset, load_model, prepare_model, step_tokens, token_loss


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    for name in ("--data", "--model", "--out"):
        parser.add_argument(name, required=True)
    parser.add_argument("--packing-length", type=int, help="tokens of a pack; the model's context length if left out")
    parser.add_argument("--steps", type=int, help="stop after this optimizer step instead of at the end")
    options = parser.parse_args()
    (out := Path(options.out)).mkdir(parents=True, exist_ok=True)

    settings = {"packing_length": options.packing_length, "packs_per_step": 4}
    dataset = MultiModalDataset(DatasetConfig(dataset_path=options.data, model=options.model, **settings))
    dataset.build()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(options.model).to(device).train()
    prepare_model(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    loader = dataset.loader(dataset.get_collator(boundaries=True), span="run")

    parts, step, loss = {"model": model, "optimizer": optimizer, "loader": loader}, 0, 0.0
    if (out / "state.pt").exists():
        state = torch.load(out / "state.pt", map_location=device)
        step = state["step"]
        for name, part in parts.items():
            part.load_state_dict(state[name])
    batches, last = iter(loader), min(options.steps or loader.num_steps, loader.num_steps)
    while step < last:
        batch = next(batches).to(device)
        labels = batch.pop("labels")  # or the model would compute a loss of its own
        share = token_loss(model(**batch), labels, step_tokens(loader.schedule, batch))
        share.backward()
        loss += share.item()  # the shares of a step add up to its loss
        if batch.info.keys[0].last:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1} of {loader.num_steps}, loss {loss:.4f}")
            step, loss = step + 1, 0.0
            if step % 100 == 0 or step == last:
                torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, out / "new.pt")
                (out / "new.pt").rename(out / "state.pt")  # a state is whole or not there
    model.save_pretrained(out / "final")


if __name__ == "__main__":
    main()
