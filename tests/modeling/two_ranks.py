"""Two processes that train one tiny model together, one of them without media: what runs on each rank."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.append(str(Path(__file__).parents[1] / "delivery"))
from processes import process_of

FAMILY = "qwen3_vl"
WORLD = 2
# What each rank gets in each step: kinds of media of its samples; None is an empty pack.
STEPS: tuple[tuple[Any, Any], ...] = (
    ((("image",), ()), ((), ())),  # rank 1 has text only
    ((("image",),), None),  # rank 1 has nothing at all
    (None, (("video",), ())),  # and the other way round
    ((("image",), ("video",)), (("image",), ())),  # the encoder runs twice on rank 0
    ((("image",),), (("video",),)),  # once on each, for other media
)
COLLECTIVE_SECONDS = 20
SPLIT = 16  # patches at once, where a scenario splits encoders: less than a video has


def run_ranks(scenarios: tuple[str, ...], folder: Path, deadline: float, *, hook: bool = True) -> Any:
    """The results of both ranks by scenario, or what went wrong. Ends what it started when the deadline passes."""
    started = [process_of(_rank, rank, scenarios, str(folder), hook) for rank in range(WORLD)]
    for process in started:
        process.start()
    for process in started:
        process.join(deadline)
    stuck = [process for process in started if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    if stuck:
        return "did not end"
    if any(process.exitcode for process in started):
        return "".join(path.read_text() for path in sorted(folder.glob("*.error")))
    return {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(WORLD)] for name in scenarios}


def _rank(rank: int, scenarios: tuple[str, ...], folder: str, hook: bool) -> None:
    """One process; scenarios follow each other, because starting is what takes long."""
    torch.set_num_threads(1)
    out = Path(folder)
    timeout = timedelta(seconds=COLLECTIVE_SECONDS)
    dist.init_process_group("gloo", init_method=f"file://{out / 'store'}", rank=rank, world_size=WORLD, timeout=timeout)
    for scenario in scenarios:
        try:
            torch.save(_train(rank, scenario, hook), out / f"{scenario}-{rank}.pt")
        except Exception as error:
            (out / f"{rank}.error").write_text(f"{scenario}, rank {rank}: {type(error).__name__}: {error}\n")
            os._exit(3)  # without waiting for the other rank
    dist.destroy_process_group()


def _train(rank: int, scenario: str, hook: bool) -> dict[str, Any]:
    model, wrapped = build(scenario, hook=hook)
    sharded = sum(isinstance(parameter, DTensor) for parameter in model.parameters())
    found: dict[str, Any] = {"sharded": sharded, "parameters": len(list(model.parameters())), "gradients": []}
    for step in STEPS:
        total = sum(batch.info.supervised_tokens for batch in map(batch_of, step))
        # Ranks are averaged, and the loss is a sum over all of them.
        (WORLD * loss(wrapped, batch_of(step[rank])) / total).backward()
        found["gradients"].append({name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        update(model)
    with torch.no_grad():  # one rank with media and one without, when nothing is trained
        found["evaluated"] = float(loss(wrapped, batch_of(STEPS[0][rank])))
    return found


def build(scenario: str, *, hook: bool) -> tuple[Any, Any]:
    """The model and what wraps it: `ddp` or `fsdp`, `-own` with the encoder wrapped on its own, `-frozen`, `-split`."""
    from encoded import contract, fresh_model

    from packtrain.modeling.vision import add_empty_media_hook, split_vision

    model = fresh_model(FAMILY).train()
    if "frozen" in scenario:
        model.model.visual.requires_grad_(False)
    if "checkpointed" in scenario:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if "split" in scenario:
        split_vision(model, SPLIT)
    if hook:
        add_empty_media_hook(model, contract(FAMILY))
    if scenario.startswith("ddp"):
        return model, torch.nn.parallel.DistributedDataParallel(model)
    if scenario.startswith("fsdp"):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (WORLD,))
        for layer in model.model.language_model.layers:
            fully_shard(layer, mesh=mesh)
        if "own" in scenario:
            for block in model.model.visual.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model.model.visual, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, model


def batch_of(kinds: Any) -> Any:
    """The packed batch of one rank in one step."""
    from encoded import packed, sample

    return packed(FAMILY, *(sample(FAMILY, *media, seed=at) for at, media in enumerate(kinds or ())))


def loss(model: Any, batch: Any) -> Any:
    from encoded import loss_of

    return loss_of(model, batch)


def update(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
    model.zero_grad()


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
