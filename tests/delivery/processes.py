"""Real processes for tests: ranks of a gloo group, each of which answers with a value or an error."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TORCH = "torch.distributed"
TRAINER = "packtrain.training.trainer"  # with transformers, which takes seconds to import
_preloaded = [TORCH]


def context(preload: str = TORCH) -> Any:
    """Processes forked from one clean process that has this module imported already: fast, and without our threads."""
    if preload not in _preloaded:
        forkserver._forkserver._stop()  # the next one has this module too
        _preloaded.append(preload)
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(_preloaded)
    return found


def process_of(target: Callable[..., Any], *args: Any, preload: str = TRAINER) -> Any:
    """A process with the environment of this test: that of the clean one is of the first test which needed it."""
    return context(preload).Process(target=_as_here, args=(dict(os.environ), target, args))


def _as_here(environment: dict[str, str], target: Callable[..., Any], args: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # every run of the trainer collects garbage, and need not look for it among modules
    gc.unfreeze = lambda: None
    target(*args)


def run_ranks(
    world_size: int, target: Callable[..., Any], *args: Any, folder: Path, seconds: float = 120, preload: str = TRAINER
) -> list[Any]:
    """What `target(rank, *args)` returned or raised on each rank, each within so many seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = process_of(_rank, rank, world_size, str(folder / "group"), theirs, target, args, preload=preload)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return [pipe.recv() if pipe.poll(seconds) else TimeoutError("no answer") for pipe in pipes]
    finally:
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()


def _rank(rank: int, world_size: int, meeting: str, pipe: Connection, target: Callable[..., Any], args: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    try:
        answer = target(rank, *args)
    except Exception as error:
        answer = error
    try:
        pipe.send(answer)
    except Exception:
        pipe.send(RuntimeError(f"{type(answer).__name__}: {answer}"))
    dist.destroy_process_group()
